"""Optimizers that measure themselves, found by the entry point group ``tierstore.optimizers``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from tierstore.errors import PlanError
from tierstore.probe.result import OptimizerRate
from tierstore.probe.rounds import rate_of

GROUP = "tierstore.optimizers"


class OptimizerPlan(Protocol):
    """What an entry point of the group names: a class without arguments."""

    def rates(
        self, device: torch.device
    ) -> Iterable[tuple[tuple[int, int, int], str, Sequence[float]]]:
        """Measure updates of matrices on a device.

        Yields:
            The shape (matrices, rows, columns), the dtype of the computation, and the seconds of
            each round.
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
        OptimizerRate(name, str(device), tuple(shape), dtype, rate_of(seconds))
        for name, optimizer in load_optimizers().items()
        for shape, dtype, seconds in optimizer.rates(device)
    )
