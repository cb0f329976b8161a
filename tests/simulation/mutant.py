"""A protocol with one thing wrong, and the runs that find it: see docs/internals/simulation.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.simulation.session import Memory, Protocol, Settings
from tests.simulation.simulator import Simulation
from tierstore.checkpoint import retention


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A protocol that is wrong in one point."""

    name: str
    protocol: Protocol = field(default_factory=Protocol)
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    simulated_by: type[Simulation] = Simulation
    settings: Settings | None = None
    """Settings of its simulations; None for those that a seed draws."""

    def simulation(self, seed: int) -> Simulation:
        if self.simulated_by is Simulation:
            return Simulation(seed, protocol=self.protocol, settings=self.settings)
        return self.simulated_by(seed, settings=self.settings)

    @property
    def unchanged(self) -> Mutant:
        """The protocol as it is, in the same kind of simulation."""
        return dataclasses.replace(
            self, name="nothing wrong", protocol=Protocol(), patched=nullcontext
        )


BEGINNING = Settings(
    world_size=3, commit_every=1, keep_last=None, actions=1, kinds=("synchronize",)
)
"""A run that is hardly more than its first commit."""

SYNCHRONIZING = Settings(
    world_size=1, commit_every=1, keep_last=None, actions=6, kinds=("synchronize",)
)
"""A run that does little else than commit."""

SHARING = Settings(world_size=3, commit_every=1, keep_last=None, actions=8, kinds=("synchronize",))
"""A run of several ranks that does little else than commit."""

REOPENING = Settings(world_size=1, commit_every=1, keep_last=None, actions=8, kinds=("reopen",))
"""A run that is closed often."""

REPLACING = Settings(
    world_size=1,
    commit_every=None,
    keep_last=None,
    actions=12,
    kinds=("replace", "synchronize"),
)
"""A run that keeps one copy and commits a step more than once."""

PUBLISHING = Settings(world_size=1, commit_every=1, keep_last=1, actions=8, kinds=("checkpoint",))
"""A run that removes old checkpoints often."""

RETAINING = dataclasses.replace(PUBLISHING, actions=18)
"""The same for a run that has removed some before it is crashed."""

PUBLISHING_TOGETHER = dataclasses.replace(PUBLISHING, world_size=3)
"""The same for a run of several ranks."""

FEW_FILES = Settings(
    world_size=1,
    commit_every=1,
    keep_last=None,
    actions=4,
    kinds=("synchronize",),
    page_bytes=2**20,
)
"""A run whose manifests are many of its files."""

REWINDING = Settings(
    world_size=1, commit_every=1, keep_last=None, actions=20, kinds=("synchronize", "rewind")
)
"""A run that does little else than commit and go back to its checkpoints."""

RETAINING_REWOUND = dataclasses.replace(REWINDING, keep_last=2, kinds=("checkpoint", "rewind"))
"""The same for a run that removes old checkpoints."""

MOVING = Settings(
    world_size=1,
    commit_every=3,
    keep_last=None,
    actions=12,
    kinds=("move",),
    memories=(Memory(host_memory=2**20, device_memory=2**20),),
)
"""A run that moves pages from memory to memory."""


def patch(place: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return a call that replaces an attribute of a class or module in a block."""
    return lambda: mock.patch.object(place, name, value)


_retain = retention.retain


def without_one_more(folder: Any, run_id: str, newest: str, keep_last: int, marked: Any) -> None:
    """Remove old checkpoints, but do not keep one more that is whole."""
    with mock.patch.object(retention, "compress", return_value=iter([()])):
        _retain(folder, run_id, newest, keep_last, marked)
