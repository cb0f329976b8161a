"""Owners and rounds of matrices that are on several ranks.

The owner of a matrix orthogonalizes it. The matrices of a round are exchanged together. Owners and
rounds follow from shapes and chunks, so every rank computes the same plan without communication.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

import tierstore
from muon import newton_schulz, normuon

UNEVEN_MAX = 1.1
"""Limit of the load of a rank over the mean. Above it, a rank without a part may be the owner.

The whole matrix is then sent to its owner and back. This takes less time than orthogonalizing it on
a busy rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMatrix:
    """A matrix whose elements are on several ranks.

    Equal matrices may share one object. This saves time and memory proportional to the ranks.

    Raises:
        ValueError: a chunk lies outside of the matrix, or the chunks have more or fewer elements
            than the matrix.
    """

    shape: tuple[int, int]
    """(rows, columns)."""

    chunks: Sequence[Sequence[tierstore.pages.Chunk]]
    """The chunks of each rank. Each element of the matrix lies in one chunk of one rank."""

    sizes: tuple[int, ...] = ()
    """The shape in which chunks are rectangles and the matrix is row-major; (): ``shape``."""

    numels: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Number of elements on each rank."""

    def __post_init__(self) -> None:
        numels = tuple(sum(chunk.numel for chunk in chunks) for chunks in self.chunks)
        if sum(numels) != self.numel:
            raise ValueError(
                f"the chunks of a matrix of shape {list(self.shape)} must have {self.numel} "
                f"elements in total, got {sum(numels)}"
            )
        for chunk in chain.from_iterable(self.chunks):
            if not chunk.lies_within(self.sizes or self.shape):
                raise ValueError(
                    f"{chunk} does not lie within a matrix of shape {list(self.shape)}"
                )
        object.__setattr__(self, "numels", numels)

    def select(self, matrix: torch.Tensor, chunk: tierstore.pages.Chunk) -> torch.Tensor:
        """Return the view of a chunk of a tensor of shape (rows, columns)."""
        return chunk.select(matrix.view(self.sizes) if self.sizes else matrix)

    def select_rows(self, averages: torch.Tensor, chunk: tierstore.pages.Chunk) -> torch.Tensor:
        """Return the averages of NorMuon of a chunk's rows; see ``muon.normuon.rows_of``."""
        return normuon.rows_of(self.sizes or self.shape, chunk, averages)

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def whole_rank(self) -> int | None:
        """The first rank that has all elements; None if the matrix must be exchanged."""
        return self.numels.index(self.numel) if self.numel in self.numels else None


def assign_owners(
    matrices: Sequence[SharedMatrix], loads: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the owner of each matrix, and the load of each rank with these matrices.

    If a matrix is whole on a rank, that rank owns it. The other matrices are assigned by decreasing
    cost (ties: earlier first). Each goes to the least loaded rank that holds a part of it. If that
    rank would exceed UNEVEN_MAX, it goes to the least loaded of all ranks. Ties go to the rank with
    the largest part, then to the lowest rank. Pass all matrices of a step at once: several calls
    balance less well.

    Args:
        matrices: all matrices, over the same ranks.
        loads: load that each rank already has, in the unit of ``newton_schulz.cost``.

    Raises:
        ValueError: the number of ranks of a matrix differs from the number of loads.
    """
    sums = list(loads)
    owners: dict[int, int] = {}
    costs = [newton_schulz.cost(matrix.shape) for matrix in matrices]
    most = UNEVEN_MAX * (sum(sums) + sum(costs)) / len(sums)
    for index, matrix in enumerate(matrices):
        if len(matrix.chunks) != len(sums):
            raise ValueError(
                f"matrix {index} lies on {len(matrix.chunks)} ranks, but there are "
                f"{len(sums)} loads"
            )
        rank = matrix.whole_rank
        if rank is not None:
            owners[index] = rank
            sums[rank] += costs[index]
    shared = [index for index in range(len(matrices)) if index not in owners]
    for index in sorted(shared, key=lambda index: -costs[index]):
        numels = matrices[index].numels
        rank = _least_loaded([rank for rank, numel in enumerate(numels) if numel], sums, numels)
        if sums[rank] + costs[index] > most:
            rank = _least_loaded(range(len(sums)), sums, numels)
        owners[index] = rank
        sums[rank] += costs[index]
    return [owners[index] for index in range(len(matrices))], sums


def _least_loaded(ranks: Sequence[int], loads: Sequence[int], numels: Sequence[int]) -> int:
    """Return the rank with the least load, then the one with the largest part, then the lowest."""
    least = min(map(loads.__getitem__, ranks))
    return max((rank for rank in ranks if loads[rank] == least), key=numels.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Matrices that are exchanged together.

    The key of matrices and owners is the position of the matrix in the planned list.
    """

    matrices: Mapping[int, SharedMatrix]
    owners: Mapping[int, int]

    def owned(self, rank: int) -> list[int]:
        """Return the positions of the matrices that a rank owns."""
        return [index for index, owner in self.owners.items() if owner == rank]

    def sent(self, rank: int) -> list[list[tuple[int, tierstore.pages.Chunk]]]:
        """Return each (position, chunk) that a rank sends to each receiver, in wire order."""
        sent: list[list[tuple[int, tierstore.pages.Chunk]]] = [[] for _ in range(self._world_size)]
        for index, matrix in self.matrices.items():
            sent[self.owners[index]] += [(index, chunk) for chunk in matrix.chunks[rank]]
        return sent

    def received(self, rank: int) -> list[list[tuple[int, tierstore.pages.Chunk]]]:
        """Return each (position, chunk) that a rank receives from each sender, in wire order."""
        owned = self.owned(rank)
        return [
            [(index, chunk) for index in owned for chunk in self.matrices[index].chunks[sender]]
            for sender in range(self._world_size)
        ]

    @property
    def _world_size(self) -> int:
        return len(next(iter(self.matrices.values())).chunks)


def plan_rounds(
    matrices: Sequence[SharedMatrix], owners: Sequence[int], *, bytes_max: int, itemsize: int
) -> list[Round]:
    """Divide the matrices that no rank has whole into rounds as large as memory allows.

    Args:
        matrices: all matrices, over the same ranks, in the order of their exchange.
        owners: the owner of each matrix.
        bytes_max: the most bytes that a rank may need in one round: for messages that it sends
            and receives, and for the whole matrices that it owns. A matrix that alone needs more
            gets its own round.
        itemsize: bytes of an element on the wire.
    """
    rounds: list[list[int]] = []
    sums: list[int] = []
    for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        if matrix.whole_rank is not None:
            continue
        needs = memory_needed(matrix, owner)
        sums = list(map(operator.add, sums, needs))
        if not rounds or itemsize * max(sums) > bytes_max:
            rounds.append([])
            sums = needs
        rounds[-1].append(index)
    return [
        Round(
            matrices={index: matrices[index] for index in members},
            owners={index: owners[index] for index in members},
        )
        for members in rounds
    ]


def memory_needed(matrix: SharedMatrix, owner: int) -> list[int]:
    """Return the number of elements in memory on each rank in a round of only this matrix."""
    if matrix.whole_rank is not None:
        return [0] * len(matrix.chunks)
    needs = list(matrix.numels)  # The elements that each rank sends.
    needs[owner] += 2 * matrix.numel  # Received elements, and the whole matrix.
    return needs
