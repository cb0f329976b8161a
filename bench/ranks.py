"""Ranks of torch.distributed as processes that talk over gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ANSWER_TIMEOUT_S = 300

# Ranks are forked by a server that has imported all modules, because importing takes seconds.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # The profiler would log its start.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "muon"])

Serve = Callable[..., contextlib.AbstractContextManager[Callable[[Any], Any]]]


class World:
    """The ranks of one job, which wait idle until they are asked."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def ask(self, question: Any) -> list[Any]:
        """Send a question to all ranks; return their answers by rank.

        Raises:
            RuntimeError: a rank failed, with its traceback, or did not answer in time.
        """
        for connection in self._connections:
            connection.send(question)
        return [self._answer(rank) for rank in range(len(self._connections))]

    def _answer(self, rank: int) -> Any:
        if not self._connections[rank].poll(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"rank {rank} has not answered for {ANSWER_TIMEOUT_S} s")
        answer, failure = self._connections[rank].recv()
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed:\n{failure}")
        return answer


@contextlib.contextmanager
def start_world(world_size: int, folder: Path, serve: Serve, *arguments: Any) -> Iterator[World]:
    """Start the ranks of a job, on loopback and with one thread each.

    Args:
        world_size: number of ranks.
        folder: an empty folder for all ranks.
        serve: called on each rank with ``folder`` and ``arguments`` once torch.distributed is
            initialized; yields a function that answers a question.
        arguments: more arguments of ``serve``.
    """
    with contextlib.ExitStack() as stack:
        connections = []
        for rank in range(world_size):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(
                target=_work, args=(theirs, rank, world_size, folder, serve, arguments)
            )
            process.start()
            theirs.close()
            connections.append(stack.enter_context(ours))
            stack.callback(process.join)
            stack.push(lambda kind, *_, process=process: process.kill() if kind else None)
        world = World(connections)
        yield world
        for connection in connections:
            connection.send(None)


def _work(
    connection: Connection,
    rank: int,
    world_size: int,
    folder: Path,
    serve: Serve,
    arguments: Sequence[Any],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=ANSWER_TIMEOUT_S),
    )
    try:
        with serve(folder, *arguments) as answer:
            while (question := connection.recv()) is not None:
                connection.send((answer(question), None))
    except Exception:
        connection.send((None, traceback.format_exc()))
    dist.destroy_process_group()
