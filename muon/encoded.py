"""States that pages keep in fewer bytes, and the values that a step computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

import tierstore
from muon.matrices import Declaration, matrices_of

COLUMNS_MIN = 128
"""Fewest columns of a parameter whose momentum is int8."""

AnyState: TypeAlias = torch.Tensor | tierstore.EncodedState


def encodings_of(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, str]:
    """Return the encodings of the states of a parameter, by state."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    master = group.get("master")
    found = {} if master is None or parameter.dtype == wide else {"master": master}
    if group.get("momentum_dtype") == torch.int8 and parameter.shape[-1] >= COLUMNS_MIN:
        found["momentum_buffer"] = "int8"
    return found


def momentum_dtype(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the momentum as a step sees it.

    Short rows would have a scale for few columns: their momentum is bfloat16 instead of int8.
    """
    dtype = group["momentum_dtype"] or parameter.dtype
    if dtype != torch.int8:
        return dtype
    return torch.float32 if parameter.shape[-1] >= COLUMNS_MIN else torch.bfloat16


@contextlib.contextmanager
def opened(states: Sequence[AnyState]) -> Iterator[list[torch.Tensor]]:
    """Yield the values of states, to be changed in place: the tensors themselves, or decoded.

    Decoded values are encoded when the context ends without an error.
    """
    values = [
        state.read() if isinstance(state, tierstore.EncodedState) else state for state in states
    ]
    yield values
    for state, value in zip(states, values, strict=True):
        if isinstance(state, tierstore.EncodedState):
            state.write(value)


def check_blocks(
    shape: Sequence[int], group: Mapping[str, Any], declarations: Sequence[Declaration]
) -> None:
    """Check that matrices of a parameter do not cut the blocks of its int8 momentum.

    Raises:
        ValueError: one does.
    """
    if group.get("momentum_dtype") != torch.int8 or shape[-1] < COLUMNS_MIN:
        return
    block = tierstore.EncodedState.BLOCK_COLUMNS
    whole = tierstore.Chunk((0,) * len(shape), tuple(shape))
    for declaration in declarations:
        for matrix in matrices_of(shape, declaration):
            part = matrix.part(whole)
            assert part is not None
            start, stop, step = part.index[-1].indices(shape[-1])
            if step > 1 or start % block or (stop % block and stop < shape[-1]):
                raise ValueError(
                    f"a matrix has its columns {start} to {stop} in steps of {step}, and "
                    f"momentum_dtype=torch.int8 has a scale for each {block} columns of the "
                    "parameter: take another momentum_dtype for its group"
                )
