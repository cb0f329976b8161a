"""States that pages keep in fewer bytes, and the dtypes that a step sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tierstore
from muon.matrices import Declaration, matrices_of

COLUMNS_MIN = 128
"""Fewest columns of a parameter with states in 8 bits."""


def has_blocks(shape: Sequence[int]) -> bool:
    """Return whether a parameter has states in 8 bits: not with short rows or one dimension.

    In these cases a scale would cover only a few elements.
    """
    return len(shape) > 1 and shape[-1] >= COLUMNS_MIN


def encodings_of(parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, str]:
    """Return the encodings of the states of a parameter, by state."""
    found = {}
    if group.get("master") is not None and parameter.dtype != _wide(parameter):
        found["master"] = group["master"]
    if has_blocks(parameter.shape):
        if group.get("momentum_dtype") == torch.int8:
            found["momentum_buffer"] = "int8_root"
        if group.get("moments_dtype") == torch.int8 and _wide(parameter) == torch.float32:
            found |= {"exp_avg": "int8_root", "exp_avg_sq": "uint8_root"}
    return found


def momentum_dtype(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the momentum in a step: bfloat16 for int8 without blocks."""
    dtype: torch.dtype = group["momentum_dtype"] or parameter.dtype
    if dtype != torch.int8:
        return dtype
    return torch.float32 if has_blocks(parameter.shape) else torch.bfloat16


def moments_dtype(parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the moments of AdamW in a step."""
    wide = _wide(parameter)
    narrow = group.get("moments_dtype") == torch.bfloat16 and wide == torch.float32
    return torch.bfloat16 if narrow else wide


def _wide(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def check_blocks(
    shape: Sequence[int], group: Mapping[str, Any], declarations: Sequence[Declaration]
) -> None:
    """Check that matrices of a parameter do not cut the blocks of its int8 momentum.

    Raises:
        ValueError: a matrix cuts a block.
    """
    if group.get("momentum_dtype") != torch.int8 or not has_blocks(shape):
        return
    block = tierstore.pages.EncodedState.BLOCK_COLUMNS
    whole = tierstore.pages.Chunk((0,) * len(shape), tuple(shape))
    for declaration in declarations:
        for matrix in matrices_of(shape, declaration):
            part = matrix.part(whole)
            assert part is not None
            start, stop, step = part.index[-1].indices(shape[-1])
            if step > 1 or start % block or (stop % block and stop < shape[-1]):
                raise ValueError(
                    f"a matrix has its columns {start} to {stop} in steps of {step}, but "
                    f"momentum_dtype=torch.int8 has a scale for each {block} columns of the "
                    "parameter: use another momentum_dtype for its group"
                )
