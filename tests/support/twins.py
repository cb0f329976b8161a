"""Our optimizer and its reference, over two copies of the same parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.adamw import AdamW

SHAPE = (3, 4)
PLACE_NAMES = ["memory", "disk"]
PLACES = pytest.mark.parametrize("place", PLACE_NAMES)


def open_store(place: str, directory: Path, **options: Any) -> tierstore.TierStore:
    """Open the store of one of PLACE_NAMES."""
    return tierstore.TierStore(directory if place == "disk" else None, **options)


def parameter(seed: int = 0, shape: Sequence[int] = SHAPE) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


class Twins:
    """Two optimizers of the same groups, which get the same gradients.

    Args:
        names: the names of the parameters of each group; None for groups without names.
        algorithm: "adamw" or "muon", of all groups.
        store: argument of our optimizer.
        rates: the learning rate of each group.
        nonfinite: argument of our optimizer.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]] = (("first", "second"),),
        *,
        algorithm: str = "muon",
        store: tierstore.TierStore | None = None,
        rates: Sequence[float] = (0.5,),
        named: bool = True,
        nonfinite: str = "raise",
        **options: Any,
    ) -> None:
        flat = [name for group in names for name in group]
        self.ours = {name: parameter(seed) for seed, name in enumerate(flat)}
        self.theirs = {name: parameter(seed) for seed, name in enumerate(flat)}
        mine, others = (
            [
                {
                    "params": [(name, of[name]) if named else of[name] for name in group],
                    "lr": rate,
                    **options,
                }
                for group, rate in zip(names, rates, strict=True)
            ]
            for of in (self.ours, self.theirs)
        )
        self.optimizer = muon.Muon(
            [{**group, "algorithm": algorithm} for group in mine], store=store, nonfinite=nonfinite
        )
        self.stock: torch.optim.Optimizer = (
            torch.optim.Muon(others) if algorithm == "muon" else AdamW(others)
        )
        self._steps = 0

    @property
    def both(self) -> list[tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]]:
        """Each optimizer, and its parameters by name."""
        return [(self.optimizer, self.ours), (self.stock, self.theirs)]

    def add(self, name: str) -> None:
        """Make a further parameter, which no group has yet."""
        self.ours[name], self.theirs[name] = parameter(9), parameter(9)

    def set_gradients(self) -> None:
        self._steps += 1
        for of in (self.ours, self.theirs):
            for index, each in enumerate(of.values()):
                each.grad = parameter(100 * self._steps + index).detach()

    def step(self) -> None:
        self.set_gradients()
        self.optimizer.step()
        self.stock.step()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Assert that our parameters are afterwards as they were before."""
        before = {name: values.detach().clone() for name, values in self.ours.items()}
        yield
        for name, values in self.ours.items():
            assert torch.equal(values, before[name]), name

    def assert_identical(self) -> None:
        for name, values in self.ours.items():
            assert torch.equal(values, self.theirs[name]), name
