"""Programs of bench/ and what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.forked_programs import run_program

BENCH = Path(__file__).parents[2] / "bench"


def run_benchmark(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(BENCH / program, *arguments)


def run_without(library: str, program: str, report_path: Path) -> subprocess.CompletedProcess[str]:
    """Do a small run of a program that does not find a library, which may be installed."""
    folder = report_path.parent
    (folder / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more:"
        f" None if name == {library!r} else found(name, *more)\n"
    )
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, str(BENCH / program), "--small", "--json", str(report_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
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
