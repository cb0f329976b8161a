"""Classes with states of other shapes on NVMe, as a user measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_runs import run_benchmark


@pytest.mark.long
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ("--directory", str(tmp_path), "--small", "--json", str(path))
    done = run_benchmark("whole_classes.py", *options)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == ["SOAP", "Shampoo", "Adafactor", "AdamW"]
    for row in rows:
        assert row["name"] in done.stdout
        assert row["equal"]
        # Small pages have much padding, and manifests beside them.
        assert 1 <= row["read_ratio"] < 1.6
        assert 1 <= row["written_ratio"] < 1.6
