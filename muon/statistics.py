"""Statistics of the matrices of Muon groups, sampled in some steps."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

_DEAD = 1e-3
_PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Measures of one step of one parameter, over all of its matrices."""

    step: int
    stable_rank: float
    """||X||_F^2 / s^2 of the input X of Newton-Schulz, with an estimate s of its largest singular
    value. At least the stable rank, and near it where one singular value stands out; for a random
    matrix up to 1.6 times as much. The mean over the matrices but those of zeros."""
    update_ratio: float
    """Frobenius norm of the update, times its learning rate, over that of the weights before it."""
    dead_rows: float
    """Share of the rows of X, or of its columns if they are the outputs, whose norm is below a
    thousandth of their root mean square: outputs that no gradient reaches."""


@dataclass(slots=True)
class _Sums:
    """Sums of one parameter on this rank; tensors, so that nothing waits for a device."""

    ranks: list[torch.Tensor] = field(default_factory=list)
    """Of each matrix that this rank orthogonalized."""
    dead: list[torch.Tensor] = field(default_factory=list)
    rows: int = 0
    updates: list[torch.Tensor] = field(default_factory=list)
    """Squares of norms, of the parts that this rank stepped."""
    weights: list[torch.Tensor] = field(default_factory=list)


class Sample:
    """The statistics of one step, as a rank notes them."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._sums: dict[str, _Sums] = {}

    def note_input(self, name: str, matrix: torch.Tensor) -> None:
        """Note the input of Newton-Schulz of a whole matrix, of shape (outputs, inputs)."""
        if not matrix.numel():
            return
        sums = self._sums.setdefault(name, _Sums())
        squares = torch.cat([_squares(piece) for piece in _pieces(matrix)])  # (rows,)
        total = squares.sum()
        sums.ranks.append(total / _largest_square(matrix, squares.argmax()))
        sums.dead.append((squares <= _DEAD**2 * total / len(squares)).sum())
        sums.rows += len(squares)

    def note_update(
        self,
        name: str,
        adjusted_lr: float | torch.Tensor,
        updates: Sequence[torch.Tensor],
        masters: Sequence[torch.Tensor],
    ) -> None:
        """Note the parts of an update, before the masters change."""
        sums = self._sums.setdefault(name, _Sums())
        lr = float(adjusted_lr)
        for part in updates:
            sums.updates.append((lr * _norm(part)) ** 2)
        for part in masters:
            sums.weights.append(_norm(part) ** 2)

    def plain(self) -> dict[str, tuple[list[float], float, int, float, float]]:
        """Return the sums of this rank as numbers; waits for the device."""
        return {
            name: (
                [float(rank) for rank in sums.ranks],
                sum(map(float, sums.dead)),
                sums.rows,
                sum(map(float, sums.updates)),
                sum(map(float, sums.weights)),
            )
            for name, sums in self._sums.items()
        }

    def merged(self, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Statistics]:
        """Return the statistics of all parameters, given plain() of each rank."""
        found = {}
        for name in sorted({name for plain in of_ranks for name in plain}):
            parts = [plain[name] for plain in of_ranks if name in plain]
            ranks = [rank for part in parts for rank in part[0] if not math.isnan(rank)]
            dead, rows, updates, weights = (sum(part[i] for part in parts) for i in range(1, 5))
            found[name] = Statistics(
                step=self._step,
                stable_rank=sum(ranks) / len(ranks) if ranks else float("nan"),
                update_ratio=(updates / weights) ** 0.5 if weights else float("inf"),
                dead_rows=dead / rows if rows else 0.0,
            )
        return found


def append_lines(path: str | os.PathLike[str], statistics: dict[str, Statistics]) -> None:
    """Append one line of JSON for each parameter to a file; null is for NaN and infinity."""
    with Path(path).open("a", encoding="utf-8") as file:
        for name, one in statistics.items():
            values = {
                key: value if math.isfinite(value) else None for key, value in asdict(one).items()
            }
            file.write(json.dumps({"parameter": name, **values}) + "\n")


def _norm(part: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=torch.float64)
    return norm


def _squares(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms**2


def _largest_square(matrix: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Estimate the square of the largest singular value, from below.

    One power iteration of the Gram matrix A = X X^T, begun at its column of the row given, and the
    quotient v^T A v / v^T v.
    """
    wide = torch.promote_types(matrix.dtype, torch.float32)

    def times(vector: torch.Tensor) -> torch.Tensor:  # X u
        return torch.cat([piece @ vector for piece in _pieces(matrix)])

    def transposed_times(vector: torch.Tensor) -> torch.Tensor:  # X^T v
        product = vector.new_zeros(matrix.size(1))
        done = 0
        for piece in _pieces(matrix):
            product += piece.T @ vector[done : done + len(piece)]
            done += len(piece)
        return product

    def unit(vector: torch.Tensor) -> torch.Tensor:
        return (vector / _norm(vector)).to(wide)

    begin = times(unit(matrix.index_select(0, row.view(1))[0]))  # (rows,): A e
    vector = times(unit(transposed_times(unit(begin))))  # (rows,): A v
    return _norm(transposed_times(unit(vector))) ** 2


def _pieces(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield some rows at a time in float32 or wider, so that no whole matrix is converted."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    rows = max(1, _PIECE_ELEMENTS // max(1, matrix.size(1)))
    for start in range(0, len(matrix), rows):
        yield matrix[start : start + rows].to(wide)
