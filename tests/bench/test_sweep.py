from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.bench_runs import report_of


@pytest.mark.long  # Sizes of a state are processes that import torch.
@pytest.mark.timeout(1200)
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("sweep.py", tmp_path)
    for word in ("compute nothing", "one host_memory"):
        assert word in printed
    plain, committed = report["rows"]
    with_fio = shutil.which("fio") is not None
    for row in (plain, committed):
        assert row["mib_per_s"] > 0
        assert row["cpu_s_per_gib"] > row["thread_s_per_gib"] > 0
        assert 0 <= row["stall"] <= 1
        assert (row["ratio"] is not None) == with_fio
        assert row["ratio"] is None or row["ratio"] == sorted(row["ratio"])
    assert plain["commit_s"] == 0 < committed["commit_s"]
    smaller, larger = report["growth"]
    assert smaller["pages"] < larger["pages"]
    # All of it in memory would be twice as much; the process itself is in both.
    assert larger["peak_bytes"] - smaller["peak_bytes"] < larger["state_bytes"] // 2
