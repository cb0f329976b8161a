"""A program and all processes that it started, ended together."""

from __future__ import annotations

import contextlib

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants with -9.

    Descendants of ``torchrun`` have their own sessions: a signal to its group does not reach
    them. The process is stopped before they are listed: it cannot start more.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.suspend()
        descendants = process.children(recursive=True)
        process.kill()
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
        psutil.wait_procs(descendants, timeout=10)
