"""A few processes that are the ranks of one world after another, and do what a test tells them."""

from __future__ import annotations

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


class RankPool:
    """Runs functions on the ranks of a gloo group: ``pool.run(3, "tests.program:work", ...)``.

    A world is made for each call and destroyed after it; the processes, as many as were ever
    needed, stay, because starting one takes seconds.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._connections: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, world_size: int, function: str, *arguments: Any) -> list[Any]:
        """Return what a function, named ``module:name``, returned on each rank.

        Raises:
            AssertionError: it raised on one; the message is its traceback.
        """
        while len(self._connections) < world_size:
            self._start()
        world = self._directory / f"world-{next(self._numbers)}"
        connections = self._connections[:world_size]
        for rank, connection in enumerate(connections):
            connection.send_bytes(pickle.dumps((world, rank, world_size, function, arguments)))
        deadline = time.monotonic() + JOB_TIMEOUT_S
        answers = []
        for rank, connection in enumerate(connections):
            left = max(0.0, deadline - time.monotonic())
            assert connection.poll(left), f"rank {rank} of {world_size} takes too long: {function}"
            answers.append(pickle.loads(connection.recv_bytes()))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        assert not failures, "\n".join(failures)
        return [found for found, _ in answers]

    def _start(self) -> None:
        ours, theirs = killed_processes._processes.Pipe()
        child = killed_processes._processes.Process(target=_serve, args=(theirs,))
        child.start()
        self._stack.callback(child.join)
        self._stack.callback(child.kill)
        theirs.close()
        self._connections.append(self._stack.enter_context(ours))


def _serve(connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            world, rank, world_size, function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer: tuple[Any, str | None]
        try:
            answer = _work(world, rank, world_size, function, arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        # Not send(), which would keep tensors in memory that both processes share.
        connection.send_bytes(pickle.dumps(answer))


def _work(
    world: Path, rank: int, world_size: int, function: str, arguments: tuple[Any, ...]
) -> Any:
    module, _, name = function.partition(":")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{world}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        return getattr(importlib.import_module(module), name)(*arguments)
    finally:
        dist.destroy_process_group()
