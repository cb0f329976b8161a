from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bench" / "checkpoint.py"


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
        # Threads that wait for each other's processor would be all that this measures.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(report_path.read_text())
    for word in ("Saving", "dcp.load of", "Publishing, by size"):
        assert word in done.stdout
    assert [row["case"] for row in report["saving"]] == [
        "store.checkpoint()",
        "dcp.save",
        "dcp.save again",
        "torch.save, fsync",
    ]
    assert [row["case"] for row in report["loading"]] == [
        "of dcp.save",
        "of dcp.save again",
        "published",
    ]
    for row in report["saving"] + report["loading"]:
        assert 0 < row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        assert 0 < row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
    sizes = [(point["state_bytes"], point["pages"]) for point in report["points"]]
    assert sizes[0][1] < sizes[1][1]
    assert sizes[0][0] < sizes[2][0]
    assert list(scratch.iterdir()) == []
