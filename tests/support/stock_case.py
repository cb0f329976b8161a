"""Reference optimizers and ours with the same arguments, with a store in each place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import muon
import tierstore
from tests.support.adamw import AdamW

ALGORITHMS = ("muon", "adamw")
PLACES = ("none", "memory", "disk")

Make = Callable[[], Iterable[Any]]


def in_each_place(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return values of parameters with a place: the first in each place, all others in memory.

    Where the store is and what the values are do not depend on each other.
    """
    first, *others = rows
    return [*((*first, place) for place in PLACES), *((*row, "none") for row in others)]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return values.to(dtype)


def parameter(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(random(seed, *shape, dtype=dtype))


def two() -> list[nn.Parameter]:
    """Return the parameters of most tests."""
    return [parameter(1, 3, 4), parameter(2, 5, 2)]


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def set_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give the parameters gradients that depend on the step and their position."""
    for index, tensor in enumerate(tensors(optimizer)):
        tensor.grad = random(1000 * step + index, *tensor.shape, dtype=tensor.dtype)


class Twins:
    """Our optimizer and its reference, over two copies of the same parameters."""

    def __init__(self, ours: muon.Muon, stock: torch.optim.Optimizer) -> None:
        self.ours, self.stock = ours, stock
        self._step = 0

    @property
    def both(self) -> tuple[muon.Muon, torch.optim.Optimizer]:
        return self.ours, self.stock

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._step += 1
            for optimizer in self.both:
                set_gradients(optimizer, self._step)
                optimizer.step()

    def assert_equal(self) -> None:
        """Assert that parameters are equal bit for bit."""
        for mine, other in zip(tensors(self.ours), tensors(self.stock), strict=True):
            assert torch.equal(mine, other)

    def assert_close(self) -> None:
        for mine, other in zip(tensors(self.ours), tensors(self.stock), strict=True):
            torch.testing.assert_close(mine, other)


class StockCase:
    """One algorithm with a store in one place.

    Args:
        algorithm: one of ALGORITHMS.
        place: one of PLACES.
        folder: for run directories.
        stack: closes the stores.
    """

    def __init__(self, algorithm: str, place: str, folder: Path, stack: ExitStack) -> None:
        self.algorithm, self.place = algorithm, place
        self._folder, self._stack = folder, stack
        self._runs = 0

    @property
    def is_muon(self) -> bool:
        return self.algorithm == "muon"

    def store(self) -> tierstore.TierStore | None:
        """Open a store that no optimizer has."""
        self._runs += 1
        if self.place == "none":
            return None
        folder = self._folder / str(self._runs) if self.place == "disk" else None
        return self._stack.enter_context(tierstore.TierStore(folder))

    def ours(self, params: Any, **options: Any) -> muon.Muon:
        """Make our optimizer; AdamW has its options in the groups."""
        if self.is_muon:
            return muon.Muon(params, store=self.store(), **options)
        params = [*params]
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        return muon.Muon(
            [{"algorithm": "adamw", **options, **group} for group in groups], store=self.store()
        )

    def stock(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        if self.is_muon:
            return torch.optim.Muon(params, **options)
        return AdamW(params, **options)

    def group(self, params: Any, **options: Any) -> dict[str, Any]:
        """Return a group for add_param_group() of our optimizer."""
        return {"params": params, "algorithm": self.algorithm, **options}

    def twins(self, make: Make = two, **options: Any) -> Twins:
        return Twins(
            self.ours(make(), **deepcopy(options)), self.stock(make(), **deepcopy(options))
        )
