"""NorMuon: after Newton-Schulz, the rows of an update are divided by a running average.

A row of a weight matrix is an output neuron. Newton-Schulz leaves rows of unequal size. Each row is
divided by the root of the running average of its mean square, as Adam divides elements. Then the
matrix is scaled back to its Frobenius norm, and ``adjust_lr_fn`` applies as without NorMuon. The
authors' published code does the same. Their paper (https://arxiv.org/abs/2510.05491, algorithm 1)
scales to a root mean square of 0.2 instead. This equals "match_rms_adamw" if singular values are 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tierstore
from muon.matrices import declared, matrices_of

STATE = "second_momentum_buffer"
"""Name of the state: the running average of each row, float32."""

_EPS = 1e-10


def is_used(group: Mapping[str, Any]) -> bool:
    """Return whether a Muon group is stepped with NorMuon."""
    return group.get("normuon_beta") is not None


def check_rows(shape: Sequence[int], group: Mapping[str, Any]) -> None:
    """Check that the matrices of a parameter consist of whole rows of the parameter.

    Raises:
        ValueError: a matrix does not.
    """
    for matrix in matrices_of(shape, declared(group)) if is_used(group) else ():
        has_rows = matrix.row_dimensions == len(shape) - 1 and matrix.sizes[-1:] == shape[-1:]
        if matrix.is_transposed or not has_rows:
            raise ValueError(
                "normuon_beta needs matrices whose rows, one for each output of the layer, are "
                "whole rows of the parameter: convolutions, transposed matrices and matrices "
                "beside each other need a group without it"
            )


def shape_for(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the averages of a parameter. An empty parameter has no averages."""
    return (*shape[:-1], min((1, *shape[-1:])))


def rows_of(
    sizes: Sequence[int], part: tierstore.pages.Chunk, averages: torch.Tensor
) -> torch.Tensor:
    """Return the averages of the rows of a part, as a view of shape (..., 1).

    Args:
        sizes: sizes of the matrix: the last is its columns, the others make the rows.
        part: place in the matrix.
        averages: averages of all rows of the matrix, shape (rows, 1).
    """
    rows = tierstore.pages.Chunk((*part.offsets[:-1], 0), (*part.sizes[:-1], 1))
    return rows.select(averages.view(*sizes[:-1], 1))


def normalize_rows_(update: torch.Tensor, averages: torch.Tensor, beta: float) -> None:
    """Normalize the rows of an orthogonalized update, and scale it back to its norm.

    Example: rows of norms 3 and 4 and equal averages 0 become rows of equal norms, 5 / sqrt(2).

    Args:
        update: shape (rows, columns); changed in place.
        averages: shape (rows, 1), float32: running averages v of the mean square of each row;
            updated in place: v = beta v + (1 - beta) * mean square.
        beta: weight of the past, in [0, 1).
    """
    wide = torch.promote_types(update.dtype, torch.float32)
    norms = torch.linalg.vector_norm(update, dim=1, keepdim=True, dtype=wide)  # (rows, 1)
    averages.lerp_((norms.square() / update.shape[1]).to(averages.dtype), 1 - beta)
    factors = 1 / (averages.sqrt() + _EPS)  # (rows, 1)
    scale = torch.linalg.vector_norm(norms) / (torch.linalg.vector_norm(norms * factors) + _EPS)
    update.mul_(factors * scale)
