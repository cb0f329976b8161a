"""Interrupts at random times: ``python -m tests.support.random_interrupts DIRECTORY SEED COUNT``.

A call of a store is interrupted by a signal, as by Ctrl-C. Then the program goes on: it makes the
same call again or restore(), steps, commits and closes, and a second store finds the commit. Prints
how often each call was interrupted. Ends with a traceback of all threads if a call blocks.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import muon
import tierstore

CALLS = ("step", "commit", "synchronize", "checkpoint", "restore", "close")
BLOCKED_S = 120


class Training:
    """A small model, its optimizer and its store."""

    def __init__(self, run: Path, checkpoints: Path, engine: str, commit_every: int) -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(3)))
        self.parameters = list(model.parameters())
        self.checkpoints = checkpoints
        self.store = tierstore.TierStore(
            *(run,),
            page_bytes=4096,
            buffers=2,
            resume=True,
            engine=engine,
            commit_every=commit_every,
        )
        groups = muon.param_groups(model, head=())
        self.optimizer = muon.Muon(groups, store=self.store, ns_dtype=torch.float32)
        self.restored = self.optimizer.restore()

    def call(self, name: str) -> None:
        """Make a call of the store; after a step, unless it is restore()."""
        if name == "restore":
            self.optimizer.restore()
            return
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        if name == "checkpoint":
            self.store.checkpoint(self.checkpoints / f"step-{self.store.step}")
        elif name != "step":
            getattr(self.store, name)()


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt what runs after so many seconds, unless it has ended."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt(*_: object) -> None:
    """Do what Python does at Ctrl-C."""
    raise KeyboardInterrupt


def go_on(training: Training, name: str, repeats: bool) -> str:
    """Do what a program may do after an interrupt; return what the same call did."""
    found = ""
    if repeats and name != "close":
        try:
            training.call("commit" if name == "checkpoint" else name)
            found = "works"
        except tierstore.StoreFailedError:
            found = "is refused"
    if name != "close":
        training.call("restore")
        training.call("commit")
    training.store.close()
    return found


def one(directory: Path, chance: random.Random, durations: dict[str, float]) -> str:
    """Interrupt one call; return what happened."""
    engine, every = chance.choice(("auto", "aiofiles", "libaio")), chance.choice((1, 1, 2))
    name, repeats = chance.choice(CALLS), chance.random() < 0.5

    def open_again() -> Training:
        return Training(directory / "run", directory / "checkpoints", engine, every)

    training = open_again()
    training.call("commit")
    training.call("checkpoint")
    began, result = time.monotonic(), "ended before"
    longest = durations.get(name, 0.05)
    try:
        with interrupted_after(chance.uniform(1e-5, longest)):
            training.call(name)
        durations[name] = max(0.002, time.monotonic() - began)
    except KeyboardInterrupt:
        result = f"interrupted {go_on(training, name, repeats)}"
    training.store.close()
    again = open_again()
    assert again.restored >= 2
    again.call("step")
    again.store.close()
    return f"{name}: {result}"


def main(directory: Path, seed: int, count: int) -> None:
    torch.set_num_threads(1)
    chance, durations = random.Random(seed), dict[str, float]()
    found = collections.Counter[str]()
    signal.signal(signal.SIGALRM, interrupt)
    for number in range(count):
        faulthandler.dump_traceback_later(BLOCKED_S, exit=True)
        if number % 4 == 0:
            for name in ("run", "checkpoints"):
                shutil.rmtree(directory / name, ignore_errors=True)
        found[one(directory, chance, durations)] += 1
    faulthandler.cancel_dump_traceback_later()
    for text, times in sorted(found.items()):
        print(f"{times:6d}  {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
