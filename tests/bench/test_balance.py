"""Balance of the work of a step over ranks, computed as a user computes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_runs import run_benchmark


@pytest.mark.long
def test_small_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run_benchmark("balance.py", "--small", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    partitions = ("sharded", "flat", "by_parameter")
    assert [(row["model"], row["partition"], row["world_size"]) for row in rows] == [
        *(("MLP of 11008", partition, ranks) for partition in partitions for ranks in (8, 64)),
        ("MLP of 14336", "flat", 64),
        ("Qwen3-30B-A3B", "sharded", 64),
    ]
    assert rows[-1]["matrices"] == 48 * (4 + 3 * 128)
    for row in rows:
        assert 1 <= row["bound"] <= row["busiest"] <= row["makespan"]
        assert f"{row['makespan']:.3f}" in done.stdout
        assert row["busiest"] <= 1.1
        # Where elements are cut equally, matrices that are whole on a rank stay there.
        if row["partition"] != "flat":
            assert row["makespan"] < 1.3
        if row["partition"] == "by_parameter":
            assert row["makespan"] == row["busiest"]  # Nobody waits for anybody.
