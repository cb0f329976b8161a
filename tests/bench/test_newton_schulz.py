from __future__ import annotations

import json
from pathlib import Path

from tests.support.bench_runs import run_benchmark


def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("newton_schulz.py", "--small", "--json", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    assert [(row["shape"], row["dtype"]) for row in rows] == [
        ([64, 256], "bfloat16"),
        ([512, 768], "bfloat16"),
        ([64, 256], "float32"),
        ([512, 768], "float32"),
    ]
    for row in rows:
        assert row["ratio"] == sorted(row["ratio"])
        assert row["ratio"][0] > 0
        assert 0 < row["ours_error"] < (0.1 if row["dtype"] == "bfloat16" else 1e-3)
        assert f"{row['shape'][0]} x {row['shape'][1]}" in done.stdout
