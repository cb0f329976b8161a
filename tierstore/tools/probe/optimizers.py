"""Optimizers that measure and describe themselves, by the entry points ``tierstore.optimizers``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.errors import PlanError
from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.parameters import PagedGroup
from tierstore.tools.probe.result import OptimizerRate
from tierstore.tools.probe.rounds import rate_of

GROUP = "tierstore.optimizers"

Work = tuple[str, tuple[int, int, int], str]
"""A computation that an optimizer knows: its name, shape (count, rows, columns) and dtype."""

PageWorks = tuple[Mapping[Work, int], int, int]
"""Of one page: how often each computation is done; the bytes of matrices that the rank sends, and
those that it receives, before the computation. Updates then go the other way."""


class PlannedOptimizer(Protocol):
    """An optimizer of a model without values."""

    groups: Sequence[PagedGroup]
    """The param groups, as the store would page them."""

    call: str
    """Python code that makes the optimizer of ``model`` on ``store``."""

    whole: bool
    """True if ranks must hold whole parameters, as in DDP."""

    def works(
        self, subgroups: Sequence[SharedSubgroup], ranks: Sequence[int], world_size: int
    ) -> tuple[list[list[PageWorks]], int]:
        """Return the works of each subgroup, for each rank that is asked for.

        Then the most bytes that a rank holds besides pages, such as matrices in flight.
        """


class OptimizerPlan(Protocol):
    """A class without arguments, named by an entry point of the group."""

    algorithms: Sequence[str]
    """Names of the ways in which a model can be optimized, the usual one first. Their works are
    measured; the works of other algorithms that ``plan()`` takes are not known."""

    narrower: Sequence[tuple[str, Mapping[str, Any], bool]]
    """Options that may keep states in fewer bytes: a description, the options, and whether the
    states keep all their bits."""

    def rates(self, device: torch.device) -> Iterable[tuple[Work, Sequence[float]]]:
        """Measure works on a device.

        Yields:
            The work, and the seconds of each round.
        """

    def problem(self, device: torch.device) -> str | None:
        """Return why steps on a device are slower than they could be; None: they are not."""

    def operations(self, work: Work) -> tuple[float, float]:
        """Return the floating-point operations of a work, and the bytes of memory it moves."""

    def plan(
        self, model: nn.Module, algorithm: str, *, on_gpu: bool, options: Mapping[str, Any]
    ) -> PlannedOptimizer:
        """Return the optimizer of a model on the meta device.

        Args:
            model: the model.
            algorithm: one of ``algorithms``.
            on_gpu: whether steps are computed on a GPU.
            options: arguments of the optimizer.

        Raises:
            ValueError, TypeError: the optimizer refuses the model or an option.
        """


def load_optimizers() -> dict[str, OptimizerPlan]:
    """Return the installed optimizers by the names of their entry points, sorted.

    Raises:
        PlanError: an entry point cannot be loaded.
    """
    found: dict[str, OptimizerPlan] = {}
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        try:
            found[entry.name] = entry.load()()
        except Exception as error:  # The package may raise anything while it is imported.
            raise PlanError(
                f"the optimizer {entry.name!r} ({entry.value}, entry point group {GROUP}) cannot "
                f"be loaded: {type(error).__name__}: {error}. Repair or uninstall its package"
            ) from error
    return found


def optimizer_rates(device: torch.device) -> tuple[OptimizerRate, ...]:
    """Return the rates of all installed optimizers on a device."""
    return tuple(
        OptimizerRate(name, str(device), work, tuple(shape), dtype, rate_of(seconds))
        for name, optimizer in load_optimizers().items()
        for (work, shape, dtype), seconds in optimizer.rates(device)
    )
