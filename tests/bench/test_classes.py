"""Adam on pages beside the class as it is, as a user measures it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_runs import run_benchmark


@pytest.mark.long
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("classes.py", "--directory", str(tmp_path), "--small", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["parameters"] for row in rows] == ["8 of 64 x 64"] * 5 + ["50 of 8 x 8"] * 5
    for row in rows:
        assert row["contender"] in done.stdout
        assert 0 < row["cpu_s"] <= row["step_s"] * 1.1
    base = [row["cpu_ratio"] for row in rows if row["contender"] == "plain, foreach"]
    assert {ratio for row in base for ratio in row} == {1.0}
