"""Data of loops: epochs whose last step has one batch instead of two, read by several loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

ROWS = 20
BATCH = 4  # Five batches in an epoch; with two to a step, the last of them is a step of its own.


class StoppedError(Exception):
    """Ends a loop in the middle of a batch."""


def dataset() -> TensorDataset:
    """Rows of a number, inputs (8,) and a target (1,), the same each time."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, 8, generator=generator)
    return TensorDataset(torch.arange(ROWS), inputs, inputs.sum(dim=1, keepdim=True))


def own_generator() -> DataLoader[Any]:
    data = dataset()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, batch_size=BATCH, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(dataset(), batch_size=BATCH, shuffle=True),
    "in order": lambda: DataLoader(dataset(), batch_size=BATCH),
    "own generator": own_generator,
    "workers": lambda: DataLoader(dataset(), batch_size=BATCH, shuffle=True, num_workers=2),
}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
