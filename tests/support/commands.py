"""Calls of the command line: in this process, and in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
from typing import Any

from typer.testing import CliRunner

from tests.support.forked_programs import run_program
from tierstore.tools.cli import app


def call(*arguments: object) -> tuple[int, str, str]:
    """Call a command in this process: its exit code, stdout and stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def call_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call a command in a process of its own."""
    return run_program("tierstore.tools", *arguments, **options)


def call_on_terminal(
    stream: str, *arguments: object, columns: int = 80
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Call a command with its "stdout" or "stderr" on a terminal.

    Returns:
        The call; and what the terminal received, at most a few KiB.
    """
    ours, theirs = pty.openpty()
    environment = {"COLUMNS": str(columns)}
    try:
        done = call_process(*arguments, environment=environment, **{stream: theirs})
        os.close(theirs)
        shown = b""
        while piece := _read(ours):
            shown += piece
    finally:
        os.close(ours)
    return done, shown.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux reports the end of a terminal as EIO.
        return b""
