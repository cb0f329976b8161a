"""Time of Newton-Schulz, measured as a user measures it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_runs import run_benchmark


@pytest.mark.long  # Products of bfloat16 take long on some CPUs.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("newton_schulz.py", "--small", "--json", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    assert [(row["shape"], row["dtype"]) for row in rows] == [
        ([32, 64], "bfloat16"),
        ([96, 128], "bfloat16"),
        ([32, 64], "float32"),
        ([96, 128], "float32"),
    ]
    for row in rows:
        for name in ("ratio", "usual_of_products", "ours_of_products"):
            assert row[name] == sorted(row[name])
            assert row[name][0] > 0
        assert 0 < row["ours_error"] < (0.1 if row["dtype"] == "bfloat16" else 1e-3)
        assert f"{row['shape'][0]} x {row['shape'][1]}" in done.stdout
    steps = report["steps"]
    assert [(step["shape"], step["count"]) for step in steps] == [([32, 32], 2), ([64, 32], 1)]
    # The ratio of all lies between the ratios of the shapes, in each round.
    assert min(s["ratio"][0] for s in steps) <= report["step_ratio"][2]
    assert report["step_ratio"][2] <= max(s["ratio"][-1] for s in steps)
