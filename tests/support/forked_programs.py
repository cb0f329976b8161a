"""Programs that run as a user runs them, but without the seconds that their imports take."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import torch

from tests.support import killed_processes

TIMEOUT_S = 240.0


def run_program(
    program: str | Path,
    *arguments: object,
    stdout: int | None = None,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module as ``python -m`` does, in a process that a server forks.

    Args:
        program: path of a script, or name of a module.
        arguments: the arguments of the program.
        stdout: file descriptor to write to; the default captures the output.
        stderr: likewise.
        environment: variables that the program has in addition.
    """
    command = [str(program), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complained:
        descriptors = [
            Connection(os.dup(file.fileno() if given is None else given), readable=False)
            for given, file in ((stdout, printed), (stderr, complained))
        ]
        child = killed_processes._processes.Process(
            target=_run, args=(command, *descriptors, dict(environment or {}))
        )
        child.start()
        for descriptor in descriptors:
            descriptor.close()
        child.join(TIMEOUT_S)
        try:
            assert child.exitcode is not None, f"{command} takes too long"
        finally:
            child.kill()
            child.join()
        return subprocess.CompletedProcess(
            command, child.exitcode, _content(printed), _content(complained)
        )


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _run(
    command: list[str], stdout: Connection, stderr: Connection, environment: dict[str, str]
) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = command
    program = Path(command[0])
    if program.suffix == ".py":
        sys.path.insert(0, str(program.parent))
        main = types.ModuleType("__main__")
        main.__file__ = str(program)
        # The second name is what processes that the program starts call it.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(program.read_bytes(), program, "exec"), main.__dict__)
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
