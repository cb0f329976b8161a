"""States that pages keep in fewer bytes, and the values that a step computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

import tierstore

AnyState: TypeAlias = torch.Tensor | tierstore.EncodedState


def encodings_of(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, str]:
    """Return the encodings of the states of a parameter, by state."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    master = group.get("master")
    return {} if master is None or parameter.dtype == wide else {"master": master}


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
