"""Work in a process of its own, which may hang or take all memory, and what came of it."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import tierstore
from tests.support import killed_processes


@dataclass(frozen=True)
class Outcome:
    """Result or error of some work, as text and values only, so that processes can send it."""

    value: Any = None
    error: str = ""
    """The name of the class, the message and the notes."""
    typed: bool = False
    """True if tierstore raises the error on purpose."""


def apart(work: Callable[..., Any], *arguments: Any, within_s: float = 60.0) -> Outcome:
    """Do some work in a process of its own; it must end in time once the process runs."""
    ours, theirs = killed_processes._processes.Pipe()
    child = killed_processes._processes.Process(target=_do, args=(theirs, work, arguments))
    child.start()
    theirs.close()
    try:
        ours.recv()  # It runs; until here it is not the work that takes long.
        ended = ours.poll(within_s)
        assert ended, f"not ended after {within_s} s"
        try:
            outcome: Outcome = ours.recv()
        except EOFError:
            child.join()
            raise AssertionError(f"the process died with exit code {child.exitcode}") from None
        return outcome
    finally:
        child.kill()
        child.join()
        ours.close()


def result_apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of some work in a process of its own, whose memory is counted apart."""
    outcome = apart(work, *arguments, within_s=280.0)
    assert not outcome.error, outcome.error
    return outcome.value


def _do(connection: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    connection.send("begins")
    connection.send(outcome_of(work, *arguments))
    os._exit(0)  # Threads that hang are not waited for.


def outcome_of(work: Callable[..., Any], *arguments: Any) -> Outcome:
    try:
        return Outcome(value=work(*arguments))
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error))
        return Outcome(error=text, typed=isinstance(error, tierstore.TierstoreError))


def allow_more_memory(nbytes: int) -> None:
    """Let this process have so many bytes of addresses more than now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, used + nbytes))


@contextmanager
def failing_close(part_of_path: str) -> Iterator[list[str]]:
    """Have the close of files with this in their paths fail, as on NFS; yields those it struck.

    The descriptor is gone all the same, as with the real call.
    """
    struck: list[str] = []
    real = os.close

    def close(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if part_of_path in path:
            struck.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch("os.close", close):
        yield struck


def in_threads(calls: dict[str, Callable[[], Any]], within_s: float = 4.0) -> dict[str, str]:
    """Name -> the class of the error that the call raised, or what it did instead."""
    came = dict.fromkeys(calls, "never ended")

    def do(name: str) -> None:
        came[name] = outcome_of(calls[name]).error.partition(":")[0] or "raised nothing"

    threads = [threading.Thread(target=do, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(came)


def assert_free(directory: Path) -> None:
    """Check that whoever locks a storage of this directory now gets the lock at once."""
    fd = os.open(directory / "lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
