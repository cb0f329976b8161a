"""Elementwise rules as kernels and as operations of torch, measured as a user measures them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.bench_runs import run_benchmark
from tests.support.devices import needs_avx2


@needs_avx2
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("rules.py", "--small", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["rule"] for row in rows] == ["momentum", "weights", "AdamW", "AdamW, 8 bits"]
    for row in rows:
        assert row["rule"] in done.stdout
        assert row["ratio"] == sorted(row["ratio"])
        assert row["kernel_ns"] > 0
        assert (row["optim_ns"] is None) == (row["fused_ns"] is None) == (row["rule"] != "AdamW")
