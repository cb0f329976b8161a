"""Programs of bench/ and what they report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.forked_programs import run_program

BENCH = Path(__file__).parents[2] / "bench"


def run_benchmark(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(BENCH / program, *arguments)


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
