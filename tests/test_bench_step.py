from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "step.py"


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
    assert "Optimizer step" in done.stdout
    resident, paged = report["rows"][:2]
    assert resident["read_bytes"] == resident["written_bytes"] == 0
    # bf16: an embedding of 12 bytes per parameter, matrices of 6, and a little framing.
    assert 6 <= paged["read_bytes"] / report["parameters"] <= 13
    assert paged["written_bytes"] == paged["read_bytes"]
    for row in report["rows"]:
        assert 0 < row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
    assert list(scratch.iterdir()) == []
