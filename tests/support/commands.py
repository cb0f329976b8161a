"""Calls of the command line: in this process, and in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tierstore.cli import app

ROOT = Path(__file__).resolve().parents[2]


def call(*arguments: object) -> tuple[int, str, str]:
    """Call a command in this process: its exit code, stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def call_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call a command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "tierstore.cli", *map(str, arguments)],
        check=False,
        cwd=ROOT,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )
