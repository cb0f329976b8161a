"""Programs of bench/, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def run_benchmark(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / program), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        # Threads that wait for each other's processor would be all that this measures.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def report_of(program: str, tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return what a small run wrote, and what it printed; it leaves nothing behind."""
    scratch = tmp_path / "device"
    scratch.mkdir()
    report_path = tmp_path / "report.json"
    paths = ("--directory", str(scratch), "--json", str(report_path))
    done = run_benchmark(program, "--small", *paths, *arguments)
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == []
    return json.loads(report_path.read_text()), done.stdout
