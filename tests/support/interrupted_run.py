"""A training that may be interrupted at any call, what it told, and what must be left of it.

The model and its gradients are whole numbers of quarters, so that plain sums say what every tensor
must be, bit for bit. A gradient depends on the step and on the attempt, which is different in each
process: steps of an earlier and a later process are not confused.
"""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tierstore
from tests.support.kept import commit_with, wanted
from tests.support.killed_processes import places
from tests.support.published import assert_nothing_left, names_in, tensors_in
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import FOURTH, MODEL, Toy
from tierstore.tools.inspect.verify import verify

GROUPS = [*MODEL, [FOURTH]]
KEEP_LAST = 2

Tell = Callable[[Any], None]
History = list[int]
"""The attempt of each step."""


def gradient(shape: Sequence[int], step: int, attempt: int) -> torch.Tensor:
    """Return quarters from -5 to 5."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + step * 3 + attempt * 5) % 11 - 5).view(*shape) / 4


def expected(history: History) -> dict[str, torch.Tensor]:
    """Name -> value of every parameter and state after these steps, by plain sums."""
    found = {}
    for name, shape, dtype, states, _ in (spec for group in GROUPS for spec in group):
        gradients = [gradient(shape, step, a) for step, a in enumerate(history, start=1)]
        total = sum(gradients, torch.zeros(shape))
        found[name] = (1 - total).to(dtype)
        if dtype not in (torch.float32, torch.float64):
            found[f"master of {name}"] = 1 - total
        found |= {f"{state} of {name}": total.to(kind) for state, kind in states.items()}
    return found


class Interrupted(Toy):
    """A run whose commits remember the attempt of each step."""

    def __init__(self, directories: Sequence[Path], attempt: int, **options: Any) -> None:
        self.attempt = attempt
        self.history: History = []
        self.is_restored = False
        try:
            super().__init__(directories, GROUPS, resume=True, **options)
        except BaseException:
            if hasattr(self, "store"):
                self.store.close()
            raise

    def step(self, names: object = None) -> None:
        step = self.store.step + 1
        for parameter in self.parameters.values():
            given = gradient(parameter.shape, step, self.attempt)
            parameter.grad = given.to(parameter.dtype)
        with self.store.pages.sweep() as pages:
            for page in pages:
                for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                    chunk.master.sub_(chunk.grad.to(chunk.master.dtype))
                    for state in chunk.states.values():
                        state.add_(chunk.grad.to(state.dtype))
        self.history = [*self.history[: step - 1], self.attempt]

    def commit(self) -> None:
        commit_with(self.store, self.history)

    def restore(self) -> int:
        with wanted(self.store) as kept:
            step = self.store.restore()
        self.history = kept["state"][:step] if step else []
        self.is_restored = True
        return step

    def state(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {
            name: parameter.detach().clone() for name, parameter in self.parameters.items()
        }
        for name, states in self.store.pages.read_states().items():
            found |= {f"{state} of {name}": tensor for state, tensor in states.items()}
        return found

    def require_right(self) -> None:
        """Raise AssertionError if any tensor is not what its history says."""
        require_equal(self.state(), expected(self.history))


def require_equal(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(actual[name], wanted[name])]
    assert not different, f"{different} are not what the steps lead to"


# ------------------------------------------------------------------------- the program

TRAIN = (
    *("open", "step", "commit", "step", "commit", "publish", "move host", "step", "commit"),
    *("publish", "move nvme", "step", "restore", "step", "commit", "publish", "step", "close"),
    *("open", "step", "publish", "close"),
)
"""Begins or resumes a run."""

RESHARD = ("open", "step", "commit", "publish", "close", "open", "step", "close")
"""Resumes a run of two ranks, or what this has made of it."""


AFTER_ERROR = ("end", "restore", "reopen")
"""Actions of a program after an error: close the store and end; or go back to the last commit in
the same store, or in one that is opened anew, and go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The run of a program."""

    directory: Path
    directories: int = 1
    """Number of directories over which pages are striped, in ``directory``."""
    folder: Path
    """The directory in which checkpoints are published."""
    engine: str = "auto"
    attempt: int = 0
    after_error: str = "end"
    """One of AFTER_ERROR."""

    @property
    def places(self) -> list[Path]:
        """The directories of the run."""
        return places(self.directory, self.directories)


def run_program(tell: Tell, actions: Sequence[str], settings: Settings, log: Path) -> None:
    """Do the actions, and tell of each what it made durable.

    Tells ("found", history), ("durable", history), ("publishing", name, history), ("published",
    name), ("error", action, text), ("wrong", text), and at the end ("end",).
    """
    torch.set_num_threads(1)
    with log.open("w") as traces:
        faulthandler.dump_traceback_later(100, file=traces)
        try:
            _Program(tell, settings).run(actions)
        except BaseException:
            tell(("wrong", traceback.format_exc()))
            os._exit(1)  # Whatever still runs.
        faulthandler.cancel_dump_traceback_later()
    tell(("end",))


class _Program:
    def __init__(self, tell: Tell, settings: Settings) -> None:
        self._tell = tell
        self._settings = settings
        self._run: Interrupted | None = None
        self._published = 0

    def run(self, actions: Sequence[str]) -> None:
        for action in actions:
            if not self._tried(action) and not self._recovered():
                self._tried("close")
                return

    def _recovered(self) -> bool:
        wanted = self._settings.after_error
        if wanted == "restore" and self._run is not None and self._tried("restore"):
            return True
        return wanted != "end" and self._tried("reopen")

    def _tried(self, action: str) -> bool:
        try:
            self._do(action)
        except tierstore.TierstoreError as error:
            self._tell(("error", action, f"{type(error).__name__}: {error}"))
            return False
        return True

    def _do(self, action: str) -> None:
        name, *arguments = action.split()
        if name in ("open", "reopen"):
            if self._run is not None:
                self._tried("close")
            self._open()
            return
        run = self._run
        if run is None:  # It could not be opened.
            return
        if name == "step":
            run.step()
        elif name == "commit":
            run.commit()
            self._tell(("durable", run.history[: run.store.committed.step]))
        elif name == "publish":
            self._publish(run)
        elif name == "move":
            run.store.move(arguments[0])
        elif name == "restore":
            self._restore(run)
        elif name == "close":
            self._close(run)
        else:
            raise ValueError(action)

    def _open(self) -> None:
        settings = self._settings
        self._run = Interrupted(settings.places, settings.attempt, engine=settings.engine)
        self._restore(self._run)

    def _restore(self, run: Interrupted) -> None:
        run.restore()
        run.require_right()
        self._tell(("found", run.history))

    def _publish(self, run: Interrupted) -> None:
        run.commit()
        self._published += 1
        name = f"step-{run.store.step}-{self._settings.attempt}-{self._published}"
        self._tell(("publishing", name, run.history))
        run.store.checkpoint(self._settings.folder / name, keep_last=KEEP_LAST).wait()
        self._tell(("published", name))
        self._tell(("durable", run.history))

    def _close(self, run: Interrupted) -> None:
        self._run = None
        try:
            if run.store.step and run.is_restored:
                run.commit()
        finally:
            run.store.close()
        if run.is_restored:
            self._tell(("durable", run.history))


def make_run_of_two_ranks(directory: Path, steps: int) -> History:
    """Leave a run of two ranks behind; return its history."""

    def train(ranks: Any) -> History:
        run = Interrupted([directory], 0, process_group=ranks)
        for _ in range(steps):
            run.step()
            run.commit()
        run.store.close()
        return run.history

    first, second = ThreadJob(2).run(train)
    assert first == second == [0] * steps
    return list(first)


# ------------------------------------------------------------------ what must be there


@dataclass(slots=True)
class Promises:
    """Commits that a run has told of in all processes so far, and that must therefore be there."""

    durable: History = field(default_factory=list)
    """The newest step that was acknowledged."""
    histories: dict[str, History] = field(default_factory=dict)
    """Every checkpoint that was begun, in order, and what is in it."""
    published: set[str] = field(default_factory=set)
    """Those that were acknowledged."""
    errors: list[tuple[str, str]] = field(default_factory=list)
    """Action and text of all errors."""

    def note(self, told: Iterable[Any]) -> None:
        """Take in what a process told, and check what it found."""
        for kind, *values in told:
            if kind == "found":
                self.require_kept(values[0])
            elif kind == "durable":
                self.durable = values[0]
            elif kind == "publishing":
                self.histories[values[0]] = values[1]
            elif kind == "published":
                self.published.add(values[0])
            elif kind == "error":
                self.errors.append((values[0], values[1]))
            else:
                assert kind == "end", values

    def require_kept(self, history: History) -> None:
        """Check that a restart found the newest acknowledged step, or a later one."""
        durable = self.durable
        assert history[: len(durable)] == durable, f"{durable} was durable, {history} was found"
        self.durable = history

    def require_checkpoints(self, folder: Path) -> None:
        """Check that every checkpoint is whole and right, and that none is missing."""
        present = [name for name in names_in(folder) if not name.startswith(".")]
        for name in present:
            report = verify(folder / name)
            assert report.good, (name, report.faults)
            require_equal(_model(tensors_in(folder / name)), _model_of(self.histories[name]))
        known = [name for name in self.histories if name in self.published or name in present]
        required = self.published.intersection(known[-KEEP_LAST:])
        # Of two with the same content either may be removed as the older one.
        there = [self.histories[name] for name in present]
        missing = [name for name in required if self.histories[name] not in there]
        assert not missing, f"{missing} are missing, there are {present}"

    def check(self, settings: Settings) -> None:
        """Check a run that no process uses, go on with it to a clean end, and check again."""
        self.require_checkpoints(settings.folder)
        told: list[Any] = []
        _Program(told.append, settings).run(("open", "step", "publish", "close"))
        self.note(told)
        assert self.errors == []
        self.require_checkpoints(settings.folder)
        published = names_in(settings.folder)
        assert 1 <= len(published) <= KEEP_LAST + 1
        for place in settings.places:
            assert_nothing_left(place, settings.folder, published)
        assert [name for name in published if name.startswith(".")] == []
        assert verify(settings.places[0]).good


def _model(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "model."
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}


def _model_of(history: History) -> dict[str, torch.Tensor]:
    wanted = expected(history)
    return {name: wanted[name] for group in GROUPS for name, *_ in group}
