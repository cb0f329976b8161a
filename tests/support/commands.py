"""Calls of the command line: in this process, and in a process of its own."""

from __future__ import annotations

import subprocess
from typing import Any

from typer.testing import CliRunner

from tests.support.forked_programs import run_program
from tierstore.cli import app


def call(*arguments: object) -> tuple[int, str, str]:
    """Call a command in this process: its exit code, stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def call_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call a command in a process of its own."""
    return run_program("tierstore.cli", *arguments, **options)
