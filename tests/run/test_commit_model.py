"""Any sequence of calls, against a model of a store that is a few lines long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tierstore
from tests.support.kept import commit_with, kept_by
from tests.support.toy import MODEL, Toy
from tierstore.storage.memory import MemoryFiles, MemoryStorage

NAMES = [[spec[0] for spec in group] for group in MODEL]


@dataclass(frozen=True)
class Moment:
    """Everything that a commit holds."""

    step: int = 0
    masters: dict[str, float] = field(
        default_factory=lambda: {name: 1.0 for group in NAMES for name in group}
    )
    counts: dict[str, int] = field(
        default_factory=lambda: {name: 0 for group in NAMES for name in group}
    )
    rates: tuple[float, ...] = (0.25, 0.25)
    scalars: dict[str, float] = field(default_factory=dict)
    extra: Any = None


class StoreMachine(RuleBasedStateMachine):
    """A store beside two moments: the present one, and the one that a restart finds."""

    @initialize(commit_every=st.sampled_from([1, 2, 3, None]))
    def begin(self, commit_every: int | None) -> None:
        self.commit_every = commit_every
        self.files = MemoryFiles()
        self.present = Moment()
        self.committed: Moment | None = None
        self.given: tuple[int, Any] = (0, None)  # A step, and the state that was registered.
        self.written = False  # Since the last commit.
        self.open()

    def open(self) -> None:
        storage = MemoryStorage(self.files)
        self.toy = Toy(storage, resume=True, commit_every=self.commit_every, buffers=2)

    def commit_now(self) -> None:
        step, extra = self.given
        extra = extra if step == self.present.step else None
        self.committed = replace(self.present, extra=extra)
        self.given, self.written = (self.present.step, extra), False

    def commit_if_due(self) -> None:
        last = self.committed.step if self.committed else 0
        if self.commit_every and self.present.step - last >= self.commit_every:
            self.commit_now()

    @rule(groups=st.sets(st.sampled_from([0, 1])))
    def step(self, groups: set[int]) -> None:
        """A step in which only these groups have gradients."""
        self.commit_if_due()
        now = self.present
        masters, counts = dict(now.masters), dict(now.counts)
        names = {name: group for group in groups for name in NAMES[group]}
        for name, group in names.items():
            masters[name] -= now.rates[group]
            counts[name] += 1
        # The first step writes every page, whether it has a gradient or not.
        self.written = self.written or bool(names) or now.step == 0
        self.present = replace(now, step=now.step + 1, masters=masters, counts=counts)
        self.toy.step(names)

    @rule(extra=st.one_of(st.none(), st.integers(), st.tuples(st.floats(allow_nan=False))))
    def commit(self, extra: Any) -> None:
        self.given = (self.present.step, extra)
        if self.committed is None or self.present.step != self.committed.step:
            self.commit_if_due()
        elif extra != self.committed.extra:  # The same step again, with something new.
            self.commit_now()
        if extra is None:
            self.toy.store.commit()
        else:
            commit_with(self.toy.store, extra)

    def catch_up(self) -> None:
        """Commit as synchronize() does: only a step that is in no commit yet."""
        if self.present.step > (self.committed.step if self.committed else 0):
            self.commit_now()

    @rule()
    def synchronize(self) -> None:
        self.catch_up()
        self.toy.store.synchronize()
        assert self.toy.store.committed.step == self.present.step

    @rule()
    def restart(self) -> None:
        self.catch_up()
        self.toy.store.close()
        self.open()
        self.present = self.committed or Moment()
        assert self.toy.store.restore() == self.present.step
        assert kept_by(self.toy.store) == self.present.extra
        self.given = (self.present.step, self.present.extra)

    @precondition(lambda self: self.committed or not self.present.step)
    @rule()
    def restore(self) -> None:
        if self.commit_every is None and self.written and self.committed:
            with pytest.raises(tierstore.RunDirectoryError, match="overwriting"):
                self.toy.store.restore()
            return
        if self.committed:
            self.present = self.committed
            self.given = (self.present.step, self.present.extra)
        assert self.toy.store.restore() == self.present.step
        assert kept_by(self.toy.store) == self.present.extra

    @precondition(lambda self: self.present.step and not self.committed)
    @rule()
    def restore_too_early(self) -> None:
        with pytest.raises(tierstore.RunDirectoryError, match="no step was committed"):
            self.toy.store.restore()

    @rule(group=st.sampled_from([0, 1]), eighths=st.integers(-8, 8))
    def change_lr(self, group: int, eighths: int) -> None:
        rates = list(self.present.rates)
        rates[group] = eighths / 8
        self.present = replace(self.present, rates=tuple(rates))
        self.toy.groups[group].hyperparameters["lr"] = eighths / 8

    @rule(name=st.sampled_from(["first", "third"]), value=st.floats(allow_nan=False))
    def change_scalar(self, name: str, value: float) -> None:
        self.present = replace(self.present, scalars={**self.present.scalars, name: value})
        self.toy.store.pages.scalars[name] = {"value": value}

    @invariant()
    def is_at_the_present(self) -> None:
        now, toy = self.present, self.toy
        assert toy.store.step == now.step
        assert tuple(group.hyperparameters["lr"] for group in toy.groups) == now.rates
        assert {name: s["value"] for name, s in toy.store.pages.scalars.items()} == now.scalars
        for name, parameter in toy.parameters.items():
            assert torch.equal(parameter, torch.full_like(parameter, now.masters[name]))
        for name, states in toy.store.pages.read_states().items():
            for state, tensor in states.items():
                value = now.masters[name] if state == "master" else now.counts[name]
                assert torch.equal(tensor, torch.full_like(tensor, value))

    def teardown(self) -> None:
        if hasattr(self, "toy"):
            self.toy.store.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
