"""Hooks around the update of each matrix, and Hyperball, which is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The update of one matrix, and this rank's parts of both."""

    name: str
    """Name of the parameter that holds the matrix."""
    starts: tuple[int, ...]
    """Indices of the first element of the matrix in the parameter."""
    shape: tuple[int, int]
    """(rows, columns) of the whole matrix; in a step of blocks, of the block."""
    group: Mapping[str, Any]
    """Hyperparameters of the param group, also those that it has for a hook."""
    lr: float | torch.Tensor
    """Learning rate after ``adjust_lr_fn``, which the updates are multiplied by."""
    weights: Sequence[torch.Tensor]
    """Parts of the matrix that this rank steps: the masters, in float32 or wider."""
    updates: Sequence[torch.Tensor]
    """The orthogonalized update of each part, in the dtype of the part. Before the update, a hook
    may change them in place; they are not yet multiplied by ``lr``."""
    _sum: Callable[[torch.Tensor], torch.Tensor]

    def norm(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the Frobenius norm of ``weights`` or ``updates`` over the parts of all ranks.

        Where ranks share the matrix, they send their sums, so all of them must call this. The sums
        are of float64, and differ between partitions by their rounding alone.

        Returns:
            float64 of shape (), on the device of the parts.
        """
        square = torch.zeros((), dtype=torch.float64, device=parts[0].device if parts else None)
        for part in parts:
            square += torch.linalg.vector_norm(part, dtype=torch.float64) ** 2
        return self._sum(square).sqrt()


class UpdateHook:
    """Calls around the update of each matrix of the Muon groups.

    before() and after() are called for every matrix with a gradient, in the same order on all ranks
    that share it, also where a rank has no part of it. An exception fails the store: ``restore()``
    returns to the last commit. No commit has what a hook remembers.
    """

    def before_orthogonalization(
        self, name: str, starts: tuple[int, ...], matrix: torch.Tensor
    ) -> None:
        """Called with a whole matrix, on the rank that orthogonalizes it alone.

        Args:
            name: name of the parameter that holds the matrix.
            starts: indices of the first element of the matrix in the parameter.
            matrix: the input of Newton-Schulz, shape (outputs, inputs), in ``ns_dtype``. Read it
                now: it is overwritten.
        """

    def before(self, update: WeightUpdate) -> None:
        """Called with the update, before weight decay and update change the weights."""

    def after(self, update: WeightUpdate) -> None:
        """Called with the changed weights."""


class Hyperball(UpdateHook):
    """Keep the Frobenius norm of each matrix, and give the update the same norm.

    W' = R normalize(W - lr R normalize(U)) with R = ||W||, so that ``lr`` is the relative size of a
    step, whatever the scale of the matrix (https://arxiv.org/abs/2606.16899). It takes the place of
    weight decay: use ``weight_decay=0`` and ``adjust_lr_fn="unit"``. A step keeps the norm to the
    precision of the master.

    Raises:
        ValueError: (from the first step) the norm of a matrix is zero, which would keep it zero.
    """

    def __init__(self) -> None:
        self._known = set[tuple[str, tuple[int, ...]]]()
        self._norm = torch.tensor(0.0)

    def before(self, update: WeightUpdate) -> None:
        """Scale the update to the norm of the weights."""
        self._norm = update.norm(update.weights)
        place = update.name, update.starts
        if place not in self._known:  # Once, because the answer of a device has to be waited for.
            if not self._norm > 0:
                raise ValueError(
                    f"a matrix of parameter {update.name!r} has the norm {self._norm.item():g}, "
                    "which Hyperball would keep: initialize it, or step it without the hook"
                )
            self._known.add(place)
        _scale_(update.updates, self._norm, update.norm(update.updates))

    def after(self, update: WeightUpdate) -> None:
        """Bring the weights back to their norm."""
        _scale_(update.weights, self._norm, update.norm(update.weights))


def _scale_(parts: Sequence[torch.Tensor], norm: torch.Tensor, present: torch.Tensor) -> None:
    """Scale parts from one norm to another; parts of norm zero stay."""
    factor = torch.where(present > 0, norm / present, 1.0)
    for part in parts:
        part.mul_(factor.to(part.dtype))
