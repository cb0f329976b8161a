from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "storage.py"


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_small_run_measures_every_engine_that_works(tmp_path: Path) -> None:
    scratch = tmp_path / "device"
    scratch.mkdir()
    report_path = tmp_path / "report.json"
    done = run_benchmark("--small", "--directory", str(scratch), "--json", str(report_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(report_path.read_text())
    measured = {(row["engine"], row["operation"]) for row in report["rows"]}
    assert {("aiofiles", "read"), ("aiofiles", "write")} <= measured
    assert ("io_uring", "read") in measured or "io_uring" in report["not_measured"][0]
    with_fio = shutil.which("fio") is not None
    for row in report["rows"]:
        assert row["mib_per_s"] > 0
        assert row["cpu_s_per_gib"] >= 0
        assert (row["ratio_median"] is not None) == with_fio
        if with_fio:
            assert row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
    assert "Page transfers" in done.stdout
    assert list(scratch.iterdir()) == []


def test_contradictory_options_are_a_wrong_call(tmp_path: Path) -> None:
    done = run_benchmark("--small", "--full", "--directory", str(tmp_path))
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
