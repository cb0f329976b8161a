from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench_runs import report_of

TIMES = ("commit_s", "commit_cpu_s", "durable_s", "thread_cpu_s")


@pytest.mark.long
def test_small_run(tmp_path: Path) -> None:
    report, printed = report_of("commit.py", tmp_path)
    assert "Commits of 20 parameters" in printed
    rows = {row["case"]: row for row in report["rows"]}
    assert {name: (row["facts"]["pages"], row["facts"]["tiers"]) for name, row in rows.items()} == {
        "2 groups, pages on disk": (2, ["nvme"]),
        "2 groups, pages in memory": (2, ["host"]),
        "2 groups per layer, pages on disk": (4, ["nvme"]),
        "2 groups per layer, pages in memory": (4, ["host"]),
        "2 groups, pages in memory, 2 ranks": (2, ["host"]),
    }
    for row in rows.values():
        for time in TIMES:
            taken = row[time]
            assert 0 < taken["least"] <= taken["median"] <= taken["p95"]
        assert row["commit_s"]["least"] <= row["durable_s"]["least"]
        assert row["facts"]["engine"] in ("io_uring", "libaio", "aiofiles")
