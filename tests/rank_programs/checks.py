"""Comparison of ranks after a training with a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muon import normuon
from tests.rank_programs.collective_order import assert_one_order
from tests.rank_programs.training import Shapes, States, Tensors, Trained


def wholes(of_ranks: Sequence[Trained], name: str, state: str, shape: tuple[int, ...]) -> Any:
    """A state put together from what each rank owns; each element is one rank's.

    A state of rows belongs to all ranks that cut the row.
    """
    pieces = [piece for trained in of_ranks for piece in trained.states.get((name, state), [])]
    whole = torch.zeros(shape, dtype=torch.float64)
    owners = torch.zeros(shape, dtype=torch.int64)
    for chunk, values in pieces:
        is_copy = chunk.select(owners) > 0
        assert torch.equal(chunk.select(whole)[is_copy], values.double()[is_copy]), name
        chunk.select(whole).copy_(values)
        chunk.select(owners).add_(1)
    assert owners.ge(1).all(), name
    assert owners.eq(1).all() or state == normuon.STATE, name
    return whole


def assert_as_one_process(
    of_ranks: Sequence[Trained],
    shapes: Shapes,
    expected: tuple[Tensors, States],
    *,
    order: bool = True,
) -> None:
    parameters, states = expected
    for trained in of_ranks:
        different = [
            name
            for name, values in trained.values.items()
            if not torch.equal(values, parameters[name].flatten()[trained.positions[name]])
        ]
        assert different == []
    assert_states(of_ranks, states)
    if order:  # Or they are not all ranks.
        assert_one_order([trained.issued for trained in of_ranks])


def assert_states(of_ranks: Sequence[Trained], states: States) -> None:
    for (name, state), values in states.items():
        found = wholes(of_ranks, name, state, tuple(values.shape))
        assert torch.equal(found, values.double()), (name, state)
