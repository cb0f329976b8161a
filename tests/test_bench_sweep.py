from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "sweep.py"


def test_small_run(tmp_path: Path) -> None:
    scratch = tmp_path / "device"
    scratch.mkdir()
    report_path = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--small"),
            *("--directory", str(scratch), "--json", str(report_path)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(report_path.read_text())
    for word in ("compute nothing", "one host_memory"):
        assert word in done.stdout
    plain, committed = report["rows"]
    with_fio = shutil.which("fio") is not None
    for row in (plain, committed):
        assert row["mib_per_s"] > 0
        assert row["cpu_s_per_gib"] > 0
        assert 0 <= row["stall"] <= 1
        assert (row["ratio"] is not None) == with_fio
        assert row["ratio"] is None or row["ratio"] == sorted(row["ratio"])
    assert plain["commit_s"] == 0 < committed["commit_s"]
    smaller, larger = report["growth"]
    assert smaller["pages"] < larger["pages"]
    # All of it in memory would be twice as much; the process itself is in both.
    assert larger["peak_bytes"] - smaller["peak_bytes"] < larger["state_bytes"] // 2
    assert list(scratch.iterdir()) == []
