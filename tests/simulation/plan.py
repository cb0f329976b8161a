"""A training run small enough to be repeated a hundred thousand times, and its arithmetic.

Every value is a whole number, so that plain tensor arithmetic gives exactly what a store
must hold after any sequence of actions: that is the oracle of the simulation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.kept import kept_by
from tierstore.layout.parameters import PagedGroup, PagedParameter
from tierstore.run.committer import Committer
from tierstore.store import TierStore

PAGE_BYTES = 8192

RANKS_MAX = 3

# Name, shape, dtype, whether it may be cut over pages, how replicas share it; for each group.
_Spec = tuple[str, tuple[int, ...], torch.dtype, bool, str | None]
_Groups = tuple[tuple[_Spec, ...], ...]
_LONE_GROUPS: _Groups = (
    (
        ("matrix", (20, 33), torch.bfloat16, False, None),
        ("vector", (30,), torch.float32, False, None),
        ("factored", (14, 4), torch.float32, False, None),
    ),
    (("table", (34, 40), torch.float32, True, None),),
)
# Some ranks own more pages than others. No number of elements is a multiple of three.
_SHARED_GROUPS: _Groups = (
    (
        ("matrix", (20, 34), torch.bfloat16, False, None),
        ("tall", (41, 20), torch.float32, False, None),
        ("half", (11, 7), torch.bfloat16, True, None),
        ("bias", (50,), torch.bfloat16, True, "by_parameter"),
        ("factored", (14, 4), torch.float32, False, None),
    ),
    (("table", (101, 40), torch.float32, True, None),),
)


def _groups(world_size: int) -> _Groups:
    return _LONE_GROUPS if world_size == 1 else _SHARED_GROUPS


def _states(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's states besides the master; "factor" is free."""
    return {"factor": (shape[0], shape[0])} if name == "factored" else {"momentum": shape}


KINDS: tuple[str, ...] = (
    "synchronize",
    "checkpoint",
    "checkpoint",
    "replace",
    "reopen",
    "overwrite",
)
"""Actions of a run besides steps and commits."""

SINGLE_COPY_KINDS: tuple[str, ...] = (*KINDS, "replace", *["synchronize"] * 5)
"""The same for a run that commits on synchronize() only."""

PUBLISHING_KINDS: tuple[str, ...] = ("checkpoint",)
"""The same for a run that is about little else."""

MOVING_KINDS: tuple[str, ...] = ("move", "move", "prefetch")
"""Further actions of a run whose pages rest in memory."""

REWINDING_KINDS: tuple[str, ...] = ("rewind",) * 12
"""Further actions of a run that often goes back to its checkpoints."""

States = Mapping[str, Mapping[str, torch.Tensor]]
"""Parameter name -> state name, "master" among them -> its values, all float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Everything that a commit of all ranks holds."""

    world_size: int
    epoch: int = 0
    """Number of times that the run was rewound."""
    step: int
    extra: Any
    """The state that was registered for it."""
    rates: tuple[int, ...]
    """The hyperparameter of each group."""
    counts: Mapping[str, float]
    """Parameter name -> the scalar that counts its steps."""
    states: States

    @property
    def order(self) -> tuple[int, int]:
        """The order of commits and checkpoints."""
        return self.epoch, self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that the program does, and the version that is there to be committed then."""

    kind: str
    """step, rates, replace, commit, synchronize, checkpoint, rewind, move, prefetch, intrude,
    reopen or overwrite."""
    value: Any = None
    version: int
    """Index of the version that this may commit, among the versions of the plan."""


def beginning(world_size: int) -> Version:
    """Return what there is before the first step."""
    groups = _groups(world_size)
    states = {
        name: {
            "master": _pattern(shape),
            **{state: torch.zeros(sizes) for state, sizes in _states(name, shape).items()},
        }
        for group in groups
        for name, shape, *_ in group
    }
    return Version(
        world_size=world_size,
        step=0,
        extra=None,
        rates=(1,) * len(groups),
        counts={},
        states=states,
    )


class Model:
    """The parameters on one rank and an optimizer that changes all of a page in every step.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.groups: list[PagedGroup] = []
        for group in _groups(world_size):
            parameters = [
                PagedParameter(
                    name=name,
                    tensor=torch.nn.Parameter(_pattern(shape).to(dtype)),
                    states=dict.fromkeys(_states(name, shape), torch.float32),
                    shapes=_states(name, shape),
                    elementwise=elementwise,
                    partition=partition,
                )
                for name, shape, dtype, elementwise, partition in group
            ]
            self.groups.append(PagedGroup(parameters=parameters, hyperparameters={"rate": 1}))

    @property
    def rates(self) -> tuple[int, ...]:
        """The hyperparameter of each group."""
        return tuple(group.hyperparameters["rate"] for group in self.groups)

    def set_rates(self, rates: Sequence[int]) -> None:
        """Do what a scheduler does."""
        for group, rate in zip(self.groups, rates, strict=True):
            group.hyperparameters["rate"] = rate

    @torch.no_grad()
    def step(self, store: TierStore, gradients: Sequence[int | None]) -> None:
        """Step each group by a gradient made of its number; one without has no gradient."""
        for group, number in zip(self.groups, gradients, strict=True):
            for parameter in group.parameters:
                tensor = parameter.tensor
                tensor.grad = None
                if number is not None:
                    tensor.grad = _gradient(tensor.shape, number).to(tensor.dtype)
        with store.pages.sweep() as pages:
            for page in pages:
                rate = self.groups[page.group].hyperparameters["rate"]
                for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                    assert chunk.grad is not None
                    if "factor" in chunk.states:
                        chunk.states["factor"].add_(chunk.grad @ chunk.grad.T)
                        chunk.master.sub_(chunk.grad * rate)
                    else:
                        chunk.states["momentum"].add_(chunk.grad)
                        chunk.master.sub_(chunk.states["momentum"] * rate)
            for group, number in zip(self.groups, gradients, strict=True):
                for parameter in group.parameters if number is not None else ():
                    count = store.pages.scalars.get(parameter.name, {}).get("count", 0)
                    store.pages.scalars[parameter.name] = {"count": count + 1}

    def replace(self, store: TierStore, states: States) -> None:
        """Do what load_state_dict() does."""
        values: dict[str, dict[str, torch.Tensor]] = {}
        for parameter in (parameter for group in self.groups for parameter in group.parameters):
            values[parameter.name] = dict(states[parameter.name])
            if parameter.tensor.dtype == torch.float32:
                del values[parameter.name]["master"]
        store.pages.write_states(values)

    def difference(self, store: TierStore, version: Version, *, restored: bool = True) -> str:
        """Return what in a store is not as in a version, or nothing.

        Args:
            store: the store of the model.
            version: the expected version.
            restored: whether the last commit of the store is of the version.
        """
        found = store.pages.read_states()  # Before this rank returns: all ranks read together.
        if found.keys() != version.states.keys():
            return f"parameters {sorted(found)}, not {sorted(version.states)}"
        if store.step != version.step:
            return f"step {store.step}, not {version.step}"
        committed = (
            store._session.committer.committed
            if isinstance(store._session.committer, Committer)
            else None
        )
        if committed is not None and committed.epoch != version.epoch:
            return f"epoch {committed.epoch}, not {version.epoch}"
        if version.step == 0:
            return self._parameter_difference(version)
        if restored and kept_by(store) != version.extra:
            return f"registered state {kept_by(store)}, not {version.extra}"
        if self.rates != version.rates:
            return f"rates {self.rates}, not {version.rates}"
        counts = {name: {"count": count} for name, count in version.counts.items()}
        if store.pages.scalars != counts:
            return f"scalars {store.pages.scalars}, not {counts}"
        for name, states in version.states.items():
            if {"master", *found[name]} != states.keys():
                return f"states {sorted(found[name])} of {name}, not {sorted(states)}"
            for state, values in found[name].items():
                if not torch.equal(values, states[state]):
                    return f"{state} of {name} {_sample(values)}, not {_sample(states[state])}"
        return self._parameter_difference(version)

    def _parameter_difference(self, version: Version) -> str:
        for parameter in (parameter for group in self.groups for parameter in group.parameters):
            name = parameter.name
            expected = version.states[name]["master"].to(parameter.tensor.dtype)
            if not torch.equal(parameter.tensor, expected):
                return f"{name} {_sample(parameter.tensor)}, not {_sample(expected)}"
        return ""


class Plan:
    """Some actions drawn by chance, and every version that they may commit.

    Args:
        versions: what may have been committed before this part of the run, oldest first;
            the run goes on from the last.
        generator: decides what is done.
        name: of this part of the run; gradients and registered states depend on it.
        length: about how many actions.
        kinds: which there may be besides steps and commits, each as often as it is named.
        keep_last: how many checkpoints are kept; None: all.
    """

    def __init__(
        self,
        versions: Sequence[Version],
        generator: random.Random,
        name: str,
        length: int,
        kinds: Sequence[str],
        keep_last: int | None = None,
    ) -> None:
        self.versions = list(versions)
        self.found = len(versions) - 1
        """Index of the version that the run goes on from."""
        self.actions: list[Action] = []
        self._generator = generator
        self._name = name
        self._keep_last = keep_last
        self._published: list[tuple[str, Version]] = []  # Since this run began, in this part of it.
        while len(self.actions) < length:
            if self._now.step == 0 or generator.random() < 0.55:
                self._train()
            else:
                getattr(self, f"_{generator.choice(kinds)}")()

    @property
    def _now(self) -> Version:
        return self.versions[-1]

    def _train(self) -> None:
        """A step, mostly of all groups; then the scheduler's, then a commit, each mostly."""
        numbers: list[int | None] = [self._generator.randrange(1, 100) for _ in self._now.rates]
        if self._now.step and self._generator.random() < 0.2:
            numbers[self._generator.randrange(len(numbers))] = None
        self._act("step", numbers, _stepped(self._now, numbers))
        if self._generator.random() < 0.3:
            rates = tuple(self._generator.randrange(1, 4) for _ in self._now.rates)
            self._act("rates", rates, replace(self._now, rates=rates))
        if self._generator.random() < 0.7:
            self._commit()

    def _commit(self) -> None:
        extra = {"run": self._name, "number": len(self.actions), "step": (self._now.step, 0.5)}
        self._act("commit", extra, replace(self._now, extra=extra))

    def _synchronize(self) -> None:
        self._act("synchronize")

    def _checkpoint(self) -> None:
        if self.actions and self.actions[-1].kind == "checkpoint":
            return
        token = self._generator.randbytes(2).hex()
        epoch = f"epoch-{self._now.epoch}-" if self._now.epoch else ""
        name = f"{epoch}step-{self._now.step}-{token}"
        self._published.append((name, self._now))
        self._act("checkpoint", name)

    def _rewind(self) -> None:
        """Back to a checkpoint that is there for sure; one is published if there is none."""
        kept = [
            (name, version)
            for name, version in self._published
            if self._keep_last is None
            # Of two with the same step either may be removed first.
            or (
                version.order > self.versions[self.found].order
                and sum(other.order >= version.order for _, other in self._published)
                <= self._keep_last
            )
        ]
        if not kept:
            self._checkpoint()
            return
        name, version = self._generator.choice(kept)
        self._act("rewind", name, replace(version, epoch=self._now.epoch + 1))

    def _move(self) -> None:
        """Each rank to a tier of its own."""
        tiers = ("nvme", "nvme", "host", "device")
        self._act("move", tuple(self._generator.choice(tiers) for _ in range(RANKS_MAX)))

    def _prefetch(self) -> None:
        self._act("prefetch")

    def _intrude(self) -> None:
        """A second process, which resumes or overwrites the run."""
        self._act("intrude", self._generator.choice(("resume", "overwrite")))

    def _reopen(self) -> None:
        self._act("reopen")

    def _overwrite(self) -> None:
        """Rarely: what comes before it is lost for what follows."""
        if self._generator.random() < 0.3:
            self._published.clear()
            self._act("overwrite", None, beginning(self._now.world_size))

    def _replace(self) -> None:
        """New states for the same step, and the commit that is to hold them."""
        states = {
            name: {state: of if state == "master" else 1 - of for state, of in states.items()}
            for name, states in self._now.states.items()
        }
        self.actions.append(Action(kind="replace", value=states, version=len(self.versions) - 1))
        self.versions[-1:] = [self._now, replace(self._now, states=states)]
        self._commit()

    def _act(self, kind: str, value: Any = None, version: Version | None = None) -> None:
        if version is not None:
            self.versions.append(version)
        self.actions.append(Action(kind=kind, value=value, version=len(self.versions) - 1))


def _stepped(version: Version, numbers: Sequence[int | None]) -> Version:
    states, counts = dict(version.states), dict(version.counts)
    groups = _groups(version.world_size)
    for group, number, rate in zip(groups, numbers, version.rates, strict=True):
        for name, shape, *_ in group:
            if number is None or name not in states:
                continue
            before, gradient = states[name], _gradient(shape, number)
            if "factor" in before:
                factor = before["factor"] + gradient @ gradient.T
                states[name] = {"master": before["master"] - gradient * rate, "factor": factor}
            else:
                momentum = before["momentum"] + gradient
                states[name] = {"master": before["master"] - momentum * rate, "momentum": momentum}
            counts[name] = counts.get(name, 0) + 1
    return replace(version, step=version.step + 1, extra=None, states=states, counts=counts)


def _pattern(shape: Sequence[int]) -> torch.Tensor:
    """Return whole numbers that differ from one row to the next."""
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float32) % 13).reshape(tuple(shape))


def _gradient(shape: Sequence[int], number: int) -> torch.Tensor:
    """Return a gradient that bfloat16 holds exactly: below 256."""
    return _pattern(shape) + number


def _sample(tensor: torch.Tensor) -> list[float]:
    values: list[float] = tensor.flatten()[:3].tolist()
    return values
