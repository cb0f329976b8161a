"""Training in a process that is killed, and a look at what it left behind."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import muon
import tierstore
from tests.support import training
from tests.support.faults import FaultyStorage
from tierstore.run.striped_storage import StripedStorage
from tierstore.storage.base import Storage
from tierstore.storage.select import open_storage

# A server that has imported everything forks the children: starting one takes milliseconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.preloaded"])


class KillAt:
    """Kills this process at the n-th operation of the storage that is not a transfer."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, operation: str, name: str, when: str) -> None:
        if operation not in ("read", "write", "create", "size"):
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def open_store(
    directory: Path, kill_at: int = 0, directories: int = 1, **options: Any
) -> tierstore.TierStore:
    kill = KillAt(kill_at)
    parts = [
        FaultyStorage(open_storage(place / "rank-00000"), on_operation=kill)
        for place in places(directory, directories)
    ]
    storage: Storage = parts[0]
    if directories > 1:
        storage = StripedStorage(parts, lambda parts: [3e8, 2e8, 1e8][: len(parts)])
    return tierstore.TierStore(storage, page_bytes=10000, buffers=3, resume=True, **options)


def places(directory: Path, directories: int) -> list[Path]:
    """Return the directories of a run that has ``directories`` of them under ``directory``."""
    if directories == 1:
        return [directory]
    return [directory / str(number) for number in range(directories)]


def train(
    acknowledge: Connection,
    directory: Path,
    steps: int,
    seed: int,
    kill_at: int = 0,
    synchronize: bool = False,
    directories: int = 1,
) -> None:
    """Go on to ``steps``, telling of each step when its commit() has returned."""
    torch.set_num_threads(1)
    parameters = training.make_parameters(torch.bfloat16)
    store = open_store(directory, kill_at, directories)
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    scheduler = training.make_scheduler(optimizer)
    position = {"step": 0}
    store.register(scheduler=scheduler, position=position)
    start = optimizer.restore()

    def commit(step: int) -> None:
        position["step"] = step
        store.commit()
        if synchronize:
            store.synchronize()
        acknowledge.send(step)

    training.train(
        optimizer,
        parameters,
        range(start + 1, steps + 1),
        scheduler=scheduler,
        after_step=commit,
        seed=seed,
    )
    store.close()
    acknowledge.send("closed")


@contextmanager
def process(*arguments: Any, **options: Any) -> Iterator[tuple[Any, Connection]]:
    """Run train() in a process; yields it and the receiving end of its news."""
    receiver, sender = _processes.Pipe(duplex=False)
    child = _processes.Process(target=train, args=(sender, *arguments), kwargs=options)
    child.start()
    sender.close()
    try:
        yield child, receiver
    finally:
        child.kill()
        child.join()
        receiver.close()


def news(receiver: Connection) -> list[Any]:
    """Everything that a process that has ended had told."""
    messages = []
    try:
        while True:
            messages.append(receiver.recv())
    except EOFError:
        return messages


def look(
    directory: Path, scratch: Path, directories: int = 1
) -> tuple[int, dict[str, torch.Tensor], Any]:
    """Restore a copy of a run: (step, every tensor and scalar, the position)."""
    shutil.copytree(directory, scratch)
    try:
        with tierstore.TierStore(places(scratch, directories), resume=True) as store:
            parameters = training.make_parameters(torch.bfloat16)
            optimizer = muon.Muon(training.make_groups(parameters), store=store)
            position: dict[str, int] = {}
            store.register(scheduler=training.make_scheduler(optimizer), position=position)
            step = optimizer.restore()
            return step, _state(optimizer, parameters), position
    finally:
        shutil.rmtree(scratch)


@functools.cache
def state_after(seeds: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The same training with everything resident, step i + 1 with ``seeds[i]``."""
    parameters = training.make_parameters(torch.bfloat16)
    optimizer = muon.Muon(
        training.make_groups(parameters), store=tierstore.TierStore(None, page_bytes=10000)
    )
    scheduler = training.make_scheduler(optimizer)
    optimizer.state_dict()  # Lays out the pages, as restore() does.
    for step, seed in enumerate(seeds, start=1):
        training.train(optimizer, parameters, range(step, step + 1), scheduler=scheduler, seed=seed)
    return _state(optimizer, parameters)


def _state(
    optimizer: muon.Muon, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Copies of every tensor, scalar and learning rate."""
    rates = {
        f"lr of group {number}": torch.tensor(group["lr"])
        for number, group in enumerate(optimizer.param_groups)
    }
    return training.snapshot(optimizer, parameters) | rates
