"""A small model of any parameters, its run, and what a directory held before and after."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import muon
import tierstore
from tests.support import killed_processes, training
from tests.support.faults import FaultyStorage
from tests.support.kept import unwanted
from tests.support.thread_ranks import ThreadJob
from tierstore.ranks.peers import Ranks
from tierstore.storage.base import Storage
from tierstore.storage.select import open_storage

RANK = "rank-00000"

# One param group after the other: (name, shape, dtype, states, elementwise).
Spec = tuple[str, tuple[int, ...], torch.dtype, dict[str, torch.dtype], bool]
FIRST: Spec = ("first", (5, 7), torch.bfloat16, {"momentum": torch.bfloat16}, False)
SECOND: Spec = ("second", (9,), torch.float32, {"average": torch.float32}, True)
THIRD: Spec = ("third", (3, 4), torch.float16, {}, False)
FOURTH: Spec = ("fourth", (2,), torch.float64, {"average": torch.float64}, True)
MODEL = [[FIRST, SECOND], [THIRD]]


class Toy:
    """A model as a list of groups, and the simplest optimizer that changes all of it.

    All parameters are 1 and all states 0 in the beginning. A step subtracts the learning
    rate of a group, 0.25 at first, and adds 1 to the states. Unless told otherwise no page
    rests in memory.
    """

    def __init__(
        self,
        directory: Path | Sequence[Path] | Storage | None,
        groups: list[list[Spec]] = MODEL,
        **options: Any,
    ) -> None:
        self.store = tierstore.TierStore(directory, **{"buffers": 3, **options})
        if directory is not None:
            unwanted(self.store)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.groups: list[tierstore.pages.PagedGroup] = []
        for group in groups:
            self.attach(group)

    def attach(self, group: list[Spec]) -> None:
        parameters = []
        for name, shape, dtype, states, elementwise in group:
            tensor = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
            self.parameters[name] = tensor
            parameters.append(
                tierstore.pages.PagedParameter(
                    name=name, tensor=tensor, states=states, elementwise=elementwise
                )
            )
        self.groups.append(
            tierstore.pages.PagedGroup(parameters=parameters, hyperparameters={"lr": 0.25})
        )
        self.store.pages.attach(self.groups[-1:])

    def step(self, names: Collection[str] | None = None) -> None:
        """Step the parameters of these names, or all."""
        for name, parameter in self.parameters.items():
            stepped = names is None or name in names
            parameter.grad = torch.ones_like(parameter) if stepped else None
        with self.store.pages.sweep() as pages:
            for page in pages:
                lr = self.groups[page.group].hyperparameters["lr"]
                for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                    if chunk.grad is not None:
                        chunk.master.sub_(lr)
                        for state in chunk.states.values():
                            state.add_(1)

    def assert_at(self, step: int) -> None:
        """Check that this is what so many steps of everything lead to."""
        assert self.store.step == step
        for parameter in self.parameters.values():
            assert torch.equal(parameter, torch.full_like(parameter, 1 - step / 4))
        for states in self.store.pages.read_states().values():
            for name, tensor in states.items():
                value = 1 - step / 4 if name == "master" else step
                assert torch.equal(tensor, torch.full_like(tensor, value))


def verified(store: tierstore.TierStore) -> None:
    """Wait until the last checkpoint was read, whatever was found."""
    verification = store._checkpoints._verifier._verification
    if verification is not None:  # No call has raised what it found.
        verification.wait()


def contents(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory but the locks: path -> content, None for a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if path.name != "lock"
    }


@contextlib.contextmanager
def unchanged(directory: Path) -> Iterator[None]:
    before = contents(directory)
    yield
    assert contents(directory) == before


def make_run(directory: Path, steps: int = 3) -> None:
    """Leave a committed run of MODEL behind."""
    toy = Toy(directory)
    for _ in range(steps):
        toy.step()
    toy.store.close()


@contextlib.contextmanager
def unchanged_parameters(toy: Toy) -> Iterator[Toy]:
    before = {name: tensor.detach().clone() for name, tensor in toy.parameters.items()}
    yield toy
    for name, tensor in toy.parameters.items():
        assert torch.equal(tensor, before[name])


def open_muon(
    directory: Path, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> tuple[tierstore.TierStore, muon.Muon, dict[str, torch.nn.Parameter]]:
    momentum_dtype = options.pop("momentum_dtype", None)
    parameters = training.make_parameters(dtype)
    store = tierstore.TierStore(directory, page_bytes=10000, **options)
    groups = training.make_groups(parameters)
    return store, muon.Muon(groups, store=store, momentum_dtype=momentum_dtype), parameters


def resumed(directory: Path, step: int, **options: Any) -> Toy:
    """The run as a restart finds it, which is whole and at this step."""
    toy = Toy(directory, resume=True, **options)
    assert toy.store.restore() == step
    toy.assert_at(step)
    return toy


def train_and_die(
    directory: Path, calls: Sequence[str], before: tuple[str, str] | None = None, **options: Any
) -> None:
    """Go on with the run in a process that is then killed.

    Args:
        directory: the run directory.
        calls: "step", or the name of a method of the store, one after the other.
        before: kill it before this operation on this file of the storage, instead of at
            the end of the calls.
        options: arguments of TierStore.
    """
    child = killed_processes._processes.Process(
        target=_train_and_die, args=(directory, calls, before, options)
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def _train_and_die(
    directory: Path,
    calls: Sequence[str],
    before: tuple[str, str] | None,
    options: dict[str, Any],
) -> None:
    def watch(operation: str, name: str, when: str) -> None:
        if (operation, name) == before and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)

    storage = FaultyStorage(open_storage(directory / RANK), on_operation=watch)
    toy = Toy(storage, resume=True, **options)
    toy.store.restore()
    for call in calls:
        (toy.step if call == "step" else getattr(toy.store, call))()
    if before is None:
        os.kill(os.getpid(), signal.SIGKILL)


def step_on_two_ranks(directory: Path) -> None:
    """Leave a run of two ranks with one step."""

    def step(ranks: Ranks) -> None:
        toy = Toy(directory, process_group=ranks)
        toy.step()
        toy.store.close()

    assert ThreadJob(2).run(step) == [None, None]
