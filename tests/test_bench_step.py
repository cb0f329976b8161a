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
    muon, adamw = json.loads(report_path.read_text())["comparisons"]
    assert muon["title"] in done.stdout
    assert adamw["title"] in done.stdout
    # bf16 parameters: a master and one bf16 state, or two of float32; and a little framing.
    assert 6 <= muon["state_bytes"] / muon["parameters"] <= 7
    assert 12 <= adamw["state_bytes"] / adamw["parameters"] <= 13
    for comparison in (muon, adamw):
        rows = {row["case"]: row for row in comparison["rows"]}
        assert list(rows) == [
            "in memory",
            "I/O alone",
            "on NVMe",
            "on NVMe, read ahead in backward",
            comparison["bound"] + " again",
        ]
        assert set(rows[comparison["bound"]]["ratio"]) == {1.0}
        for row in rows.values():
            assert row["ratio"][0] > 0
            assert row["ratio"] == sorted(row["ratio"])
            assert min(row["backward_s"], row["step_s"], row["drain_s"], row["commit_s"]) > 0
    assert list(scratch.iterdir()) == []
