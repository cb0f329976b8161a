"""A few processes that are the ranks of one world after another, and do what a test tells them."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import pickle
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.support import killed_processes

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
JOB_TIMEOUT_S = 120.0
# Of each process. Groups that a test makes and does not destroy have threads, which wake up every
# 10 ms.
THREADS_MAX = 60


class RankPool:
    """Runs functions on the ranks of a gloo group: ``pool.run(3, "tests.program:work", ...)``.

    The processes of each size of world stay for all calls, and their world with them. After a call
    that failed they are ended, because its ranks may be anywhere in their collectives.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._worlds: dict[int, _World] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for world in self._worlds.values():
            world.end()

    def run(self, world_size: int, function: str, *arguments: Any) -> list[Any]:
        """Return what a function, named ``module:name``, returned on each rank.

        Raises:
            AssertionError: it raised on one; the message is its traceback.
        """
        world = self._worlds.pop(world_size, None)
        if world is None:
            world = _World(self._directory / f"world-{next(self._numbers)}", world_size)
        try:
            found = world.run(function, arguments)
        except BaseException:
            world.end()
            raise
        if world.threads > THREADS_MAX:
            world.end()
        else:
            self._worlds[world_size] = world
        return found


class _World:
    """The processes of a gloo group, in the order of their ranks."""

    def __init__(self, file: Path, world_size: int) -> None:
        self._stack = ExitStack()
        self._pids: list[int] = []
        self._connections = [self._start(file, rank, world_size) for rank in range(world_size)]

    def run(self, function: str, arguments: tuple[Any, ...]) -> list[Any]:
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, arguments)))
        deadline = time.monotonic() + JOB_TIMEOUT_S
        answers = []
        for rank, connection in enumerate(self._connections):
            left = max(0.0, deadline - time.monotonic())
            size = len(self._connections)
            assert connection.poll(left), f"rank {rank} of {size} takes too long: {function}"
            answers.append(pickle.loads(connection.recv_bytes()))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        assert not failures, "\n".join(failures)
        return [found for found, _ in answers]

    @property
    def threads(self) -> int:
        """Number of threads of the rank that has the most."""
        return max(len(os.listdir(f"/proc/{pid}/task")) for pid in self._pids)

    def end(self) -> None:
        self._stack.close()

    def _start(self, file: Path, rank: int, world_size: int) -> Connection:
        ours, theirs = killed_processes._processes.Pipe()
        child = killed_processes._processes.Process(
            target=_serve, args=(theirs, file, rank, world_size)
        )
        child.start()
        assert child.pid is not None
        self._pids.append(child.pid)
        self._stack.callback(child.join)
        self._stack.callback(child.kill)
        theirs.close()
        return self._stack.enter_context(ours)


def _serve(connection: Connection, file: Path, rank: int, world_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        module, _, name = function.partition(":")
        answer: tuple[Any, str | None]
        try:
            answer = getattr(importlib.import_module(module), name)(*arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        gc.collect()  # Groups end with their threads.
        # Not send(), which would keep tensors in memory that both processes share.
        connection.send_bytes(pickle.dumps(answer))
