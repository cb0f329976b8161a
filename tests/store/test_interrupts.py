"""Calls and interrupts in the middle of a step: never a commit of two steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import kernel
from tests.support.faults import FaultyStorage
from tests.support.interrupts import PACKAGE, InterruptedAfter
from tests.support.kept import commit_with, kept_by
from tests.support.toy import FIRST, RANK, SECOND, THIRD, Toy, resumed
from tierstore.run.committer import Committer
from tierstore.run.layout_file import RankLayout
from tierstore.storage.select import open_storage
from tierstore.threads import Threads

CALLS: list[Callable[[tierstore.TierStore], Any]] = [
    lambda store: store.commit(),
    lambda store: store.synchronize(),
    lambda store: store.restore(),
    lambda store: store.pages.read_states(),
    lambda store: store.pages.write_states({}),
    lambda store: store.pages.attach([]),
    lambda store: store.pages.sweep().__enter__(),
]


def in_mid_sweep(toy: Toy, call: Callable[[], None]) -> None:
    with toy.store.pages.sweep() as pages:
        next(pages)
        call()


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_the_middle_of_a_step_is_refused(
    call: Callable[[tierstore.TierStore], Any], tmp_path: Path
) -> None:
    toy = Toy(tmp_path, page_bytes=4096, buffers=2, commit_every=2)
    toy.step()
    for parameter in toy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with toy.store.pages.sweep() as pages:
        for page in pages:
            with pytest.raises(tierstore.SweepError, match="step is in progress"):
                call(toy.store)
            for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                chunk.master.sub_(0.25)
                for state in chunk.states.values():
                    state.add_(1)
    toy.assert_at(2)  # The step itself was not disturbed.
    toy.store.close()
    resumed(tmp_path, 2).store.close()


def test_a_signal_handler_that_commits_in_the_middle_of_a_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path, page_bytes=4096)
    toy.step()
    toy.store.synchronize()

    def preempted(number: int, frame: object) -> None:
        toy.store.commit()
        toy.store.synchronize()

    previous = signal.signal(signal.SIGUSR1, preempted)
    try:
        for parameter in toy.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(tierstore.SweepError):
            in_mid_sweep(toy, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, previous)
    toy.store.close()
    resumed(tmp_path, 1).store.close()


def test_closing_in_the_middle_of_a_step_commits_nothing(tmp_path: Path) -> None:
    toy = Toy(tmp_path, page_bytes=4096)
    toy.step()
    toy.store.synchronize()
    for parameter in toy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(tierstore.SweepError):
        in_mid_sweep(toy, toy.store.close)
    resumed(tmp_path, 1).store.close()


def test_an_exception_between_step_and_commit_commits_nothing_new(tmp_path: Path) -> None:
    """A restart finds the commit of the program, with its state."""

    def train() -> None:
        with toy.store:
            for step in (1, 2, 3):
                toy.step()
                if step == 3:
                    raise KeyboardInterrupt
                commit_with(toy.store, step)

    toy = Toy(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train()
    again = resumed(tmp_path, 2)
    assert kept_by(again.store) == 2
    again.store.close()


@pytest.mark.parametrize("call", ["step", "synchronize", "commit", "checkpoint", "close"])
def test_an_interrupt_when_a_commit_begins(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that the last commit needs is overwritten, whatever the program does next."""
    toy = Toy(tmp_path, page_bytes=4096)
    toy.step()
    toy.store.synchronize()
    toy.step()

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            toy.store.commit()
    with pytest.raises(tierstore.StoreFailedError, match="was not made"):
        {
            "step": toy.step,
            "commit": toy.store.commit,
            "checkpoint": lambda: toy.store.checkpoint(tmp_path / "checkpoint"),
        }.get(call, getattr(toy.store, call, None))()
    if call == "close":
        toy = resumed(tmp_path, 1)
    else:
        assert toy.store.restore() == 1
        toy.assert_at(1)
    toy.step()
    toy.store.close()
    resumed(tmp_path, 2).store.close()


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_while_a_commit_describes_its_pages(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next commit describes them itself: of all groups, or of groups attached late."""
    groups = [[FIRST, SECOND], [THIRD]]
    toy = Toy(tmp_path, groups[: 1 if late else 2])
    if late:
        toy.step()
        toy.store.synchronize()
        toy.attach(groups[1])
    toy.step()

    def interrupted(layout: RankLayout) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RankLayout, "to_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            toy.store.commit()
    toy.store.close()
    step = toy.store.step
    again = Toy(tmp_path, groups, resume=True)
    assert again.store.restore() == step
    for name, parameter in toy.parameters.items():
        assert torch.equal(parameter, again.parameters[name])
    again.store.close()


def test_the_layout_of_a_commit_in_flight_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group without pages is attached and committed while the commit before is flushed."""
    may_flush = threading.Event()

    def wait_to_flush(operation: str, name: str, when: str) -> None:
        if (operation, when) == ("flush", "before"):
            assert may_flush.wait(30)

    storage = FaultyStorage(open_storage(tmp_path / RANK), on_operation=wait_to_flush)
    toy = Toy(storage, commit_every=2)
    toy.step()
    toy.step()
    toy.store.commit()
    begin = Committer.begin

    def begin_next(committer: Committer, *arguments: Any) -> None:
        may_flush.set()
        begin(committer, *arguments)

    monkeypatch.setattr(Committer, "begin", begin_next)
    toy.attach([("empty", (0,), torch.float32, {}, True)])
    toy.step(names=[])
    toy.store.synchronize()
    layouts = list((tmp_path / RANK).glob("layout-*"))
    assert len(layouts) == 2
    for path in layouts:
        head = path.read_bytes().partition(b"\n")[0].decode()
        assert path.name == f"layout-{head.split()[-1]}"
    toy.store.close()


def test_close_frees_memory(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1024, 4096))
    parameter.grad = torch.ones_like(parameter)
    store = tierstore.TierStore(tmp_path, page_bytes="64MiB", buffers=4)
    muon.Muon([{"params": [parameter], "algorithm": "adamw"}], store=store).step()
    kernel.reset_peak()
    during = kernel.anonymous_peak()
    store.close()
    kernel.reset_peak()
    assert during - kernel.anonymous_peak() > 3 * 48 * 2**20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # As in Python.
@pytest.mark.parametrize("path", [contextlib.__file__, PACKAGE], ids=["contextlib", "tierstore"])
def test_restore_works_where_an_interrupted_step_is_handled(path: str, tmp_path: Path) -> None:
    """The traceback of the interrupt keeps the frames of the step."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.ones_like(parameter)
    store = tierstore.TierStore(tmp_path, page_bytes=4096, commit_every=100)
    optimizer = muon.Muon([{"params": [parameter], "algorithm": "adamw"}], store=store)
    optimizer.step()
    store.synchronize()
    committed = parameter.detach().clone()
    for calls in itertools.count(1):
        try:
            with InterruptedAfter(calls, path) as interrupt:
                optimizer.step()
        except KeyboardInterrupt:
            assert optimizer.restore() == 1
            assert torch.equal(parameter, committed)
        if interrupt.left > 0:
            break
    assert calls > 20
    assert store.step > 1
    store.close()


def test_a_store_without_a_directory_works_after_an_interrupt() -> None:
    """As with torch.optim, there is nothing to go back to."""
    toy = Toy(None, page_bytes=4096)  # type: ignore[arg-type]
    toy.step()
    for parameter in toy.parameters.values():
        parameter.grad = torch.ones_like(parameter)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_mid_sweep(toy, interrupt)
    toy.step()
    assert toy.store.pages.read_states()


AT_EXIT = """
import atexit, sys
from pathlib import Path
from tests.support.toy import Toy
toy = Toy(Path(sys.argv[1]) if sys.argv[1:] else None, page_bytes=4096)
atexit.register(toy.store.close)
toy.step()
if sys.argv[1:]:
    toy.store.synchronize()
"""


@pytest.mark.long
@pytest.mark.parametrize("directory", [True, False])
def test_closing_when_the_interpreter_exits(directory: bool, tmp_path: Path) -> None:
    """No thread can be started any more."""
    arguments = [str(tmp_path)] if directory else []
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT, *arguments], check=True, capture_output=True, text=True
    )
    assert not ended.stderr
    if directory:
        resumed(tmp_path, 1).store.close()
