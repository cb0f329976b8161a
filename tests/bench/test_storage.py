from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.bench_runs import report_of, run_benchmark


def test_small_run_measures_every_engine_that_works(tmp_path: Path) -> None:
    report, printed = report_of("storage.py", tmp_path)
    measured = {(row["engine"], row["operation"]) for row in report["rows"]}
    reasons = " ".join(report["not_measured"])
    for engine in ("io_uring", "libaio", "aiofiles"):
        for operation in ("read", "write", "mixed"):
            assert (engine, operation) in measured or f"engine '{engine}'" in reasons
    assert ("aiofiles", "read") in measured
    with_fio = shutil.which("fio") is not None
    for row in report["rows"]:
        assert row["mib_per_s"] > 0
        assert row["cpu_s_per_gib"] >= 0
        assert row["checksum_s_per_gib"] > 0
        for ratio in (row["ratio"], row["fio_ratio"]):
            assert (ratio is not None) == with_fio
            assert ratio is None or (len(ratio) == 5 and ratio == sorted(ratio) and ratio[0] > 0)
    assert "Page transfers" in printed
    assert len(report["series"]) == 3


def test_small_run_of_plain_transfers(tmp_path: Path) -> None:
    report, printed = report_of("transfers.py", tmp_path)
    measured = {(row["way"], row["operation"]) for row in report["rows"]}
    for way in ("torch", "aiofiles", "numpy.memmap"):
        assert {(way, "read"), (way, "write")} <= measured
    for row in report["rows"]:
        assert row["mib_per_s"] > 0
        assert row["ratio"] == sorted(row["ratio"])
    assert "Plain transfers" in printed


def test_contradictory_options_are_a_wrong_call(tmp_path: Path) -> None:
    done = run_benchmark("storage.py", "--small", "--full", "--directory", str(tmp_path))
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
