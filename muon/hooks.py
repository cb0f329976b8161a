"""Hooks around the update of each matrix, and Hyperball, a hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The update of one matrix, with this rank's parts of the matrix and of the update."""

    name: str
    """Name of the parameter that holds the matrix."""
    starts: tuple[int, ...]
    """Indices of the first element of the matrix in the parameter."""
    shape: tuple[int, int]
    """(rows, columns) of the whole matrix; in a step of blocks, of the block."""
    group: Mapping[str, Any]
    """Hyperparameters of the param group, including keys for a hook."""
    lr: float | torch.Tensor
    """Learning rate after ``adjust_lr_fn``. The updates are multiplied by it."""
    weights: Sequence[torch.Tensor]
    """Parts of the matrix that this rank steps: the masters, in float32 or wider."""
    updates: Sequence[torch.Tensor]
    """The orthogonalized update of each part, in the dtype of the part, not yet multiplied by
    ``lr``. In before(), a hook may change the updates in place."""
    _sum: Callable[[torch.Tensor], torch.Tensor]

    def norm(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the Frobenius norm of ``weights`` or ``updates`` over the parts of all ranks.

        Ranks that share the matrix exchange their sums, so all of them must call this. The sums are
        in float64, and differ between partitions only by rounding.

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
    that share the matrix, even if a rank has no part of it. An exception fails the store:
    ``restore()`` returns to the last commit. Commits do not include data that a hook keeps.
    """

    def before_orthogonalization(
        self, name: str, starts: tuple[int, ...], matrix: torch.Tensor
    ) -> None:
        """Called with a whole matrix, only on the rank that orthogonalizes it.

        Args:
            name: name of the parameter that holds the matrix.
            starts: indices of the first element of the matrix in the parameter.
            matrix: the input of Newton-Schulz, shape (outputs, inputs), in ``ns_dtype``. Read it
                during the call: it is overwritten afterwards.
        """

    def before(self, update: WeightUpdate) -> None:
        """Called with the update, before weight decay and update change the weights."""

    def after(self, update: WeightUpdate) -> None:
        """Called with the changed weights."""


class Hyperball(UpdateHook):
    """Keep the Frobenius norm of each matrix, and give the update the same norm.

    W' = R normalize(W - lr R normalize(U)) with R = ||W||. ``lr`` is then the relative size of a
    step for any scale of the matrix (https://arxiv.org/abs/2606.16899). Hyperball replaces weight
    decay: use ``weight_decay=0`` and ``adjust_lr_fn="unit"``. A step keeps the norm to the
    precision of the master.

    Raises:
        ValueError: (from the first step) the norm of a matrix is zero and would stay zero.
    """

    def __init__(self) -> None:
        self._known = set[tuple[str, tuple[int, ...]]]()
        self._norm = torch.tensor(0.0)

    def before(self, update: WeightUpdate) -> None:
        """Scale the update to the norm of the weights."""
        self._norm = update.norm(update.weights)
        place = update.name, update.starts
        if place not in self._known:  # Check once, because it waits for the device.
            if not self._norm > 0:
                raise ValueError(
                    f"a matrix of parameter {update.name!r} has the norm {self._norm.item():g}, "
                    "which Hyperball would keep: initialize it, or step it without the hook"
                )
            self._known.add(place)
        _scale_(update.updates, self._norm, update.norm(update.updates))

    def after(self, update: WeightUpdate) -> None:
        """Scale the weights back to their norm."""
        _scale_(update.weights, self._norm, update.norm(update.weights))


def _scale_(parts: Sequence[torch.Tensor], norm: torch.Tensor, present: torch.Tensor) -> None:
    """Scale parts from one norm to another. Parts of norm zero do not change."""
    factor = torch.where(present > 0, norm / present, 1.0)
    for part in parts:
        part.mul_(factor.to(part.dtype))
