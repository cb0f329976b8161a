from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_runs import run_benchmark


@pytest.mark.long
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("planning.py", "--small", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "Worked plans" in done.stdout
    assert "Settings that fit" in done.stdout
    report = json.loads(path.read_text())
    (case,) = report["fits"].values()
    assert "--offload-gradients backward" in case["options"]
    assert sum(case["needs"]["GPU"].values()) < 24e9
    assert case["steps_allowed"] == pytest.approx(1.2e15 / (12 * 6.74e9), rel=0.01)
