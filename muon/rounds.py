"""Which rank orthogonalizes each matrix that lies on several, and which are exchanged together.

All of it follows from shapes and chunks, so every rank finds the same without asking.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tierstore
from muon import newton_schulz

UNEVEN_MAX = 1.1
"""What a rank may have to do, of the mean, before ranks that have no part of a matrix help out.

It is sent whole to these and back, which takes less time than its Newton-Schulz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMatrix:
    """A matrix whose elements lie on several ranks.

    Of equal ones one object may stand for all: each takes time and memory for every rank.

    Raises:
        ValueError: a chunk does not lie within the matrix, or they do not have as many
            elements together.
    """

    shape: tuple[int, int]
    """(rows, columns)."""

    chunks: Sequence[Sequence[tierstore.Chunk]]
    """For each rank what it has, in its order. Each element is in one chunk of one rank."""

    numels: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each rank how many elements it has."""

    def __post_init__(self) -> None:
        numels = tuple(sum(chunk.numel for chunk in chunks) for chunks in self.chunks)
        if sum(numels) != self.numel:
            raise ValueError(
                f"the chunks of a matrix of shape {list(self.shape)} must have its {self.numel} "
                f"elements together, got {sum(numels)}"
            )
        for chunk in (chunk for chunks in self.chunks for chunk in chunks):
            stops = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            if len(stops) != 2 or stops[0] > self.shape[0] or stops[1] > self.shape[1]:
                raise ValueError(
                    f"{chunk} does not lie within a matrix of shape {list(self.shape)}"
                )
        object.__setattr__(self, "numels", numels)

    @property
    def numel(self) -> int:
        """How many elements the whole matrix has."""
        return self.shape[0] * self.shape[1]

    @property
    def whole_rank(self) -> int | None:
        """The first rank that has all elements, or None: the matrix is exchanged."""
        return self.numels.index(self.numel) if self.numel in self.numels else None


def assign_owners(
    matrices: Sequence[SharedMatrix], loads: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return which rank orthogonalizes each matrix, and how much the ranks then have to do.

    A matrix that is whole on a rank is that rank's. Of the others the costliest come first,
    each to the rank with the least to do among those that have a part of it, or among all where
    that rank would have more than UNEVEN_MAX: of equal matrices the earlier one first, of equal
    ranks the one with the largest part, then the lowest. Give it all matrices of a step at once:
    what comes bit by bit is balanced less well.

    Args:
        matrices: over the same ranks.
        loads: what each rank has to do already, in the unit of ``newton_schulz.cost``.

    Raises:
        ValueError: a matrix is not over as many ranks as there are loads.
    """
    sums = list(loads)
    for index, matrix in enumerate(matrices):
        if len(matrix.chunks) != len(sums):
            raise ValueError(
                f"matrix {index} lies on {len(matrix.chunks)} ranks, but there are "
                f"{len(sums)} loads"
            )
    owners: dict[int, int] = {}
    for index, matrix in enumerate(matrices):
        rank = matrix.whole_rank
        if rank is not None:
            owners[index] = rank
            sums[rank] += newton_schulz.cost(matrix.shape)
    shared = [index for index in range(len(matrices)) if index not in owners]
    costs = {index: newton_schulz.cost(matrices[index].shape) for index in shared}
    most = UNEVEN_MAX * (sum(sums) + sum(costs.values())) / len(sums)
    for index in sorted(shared, key=lambda index: -costs[index]):
        ranks = [(sums[rank], -numel, rank) for rank, numel in enumerate(matrices[index].numels)]
        least, _, rank = min((load, part, rank) for load, part, rank in ranks if part < 0)
        if least + costs[index] > most:
            _, _, rank = min(ranks)
        owners[index] = rank
        sums[rank] += costs[index]
    return [owners[index] for index in range(len(matrices))], sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Some matrices that are exchanged together: sent to their owners, and the updates back.

    Both are named by their position in the list that was planned.
    """

    matrices: Mapping[int, SharedMatrix]
    owners: Mapping[int, int]

    def owned(self, rank: int) -> list[int]:
        """Return the matrices of which a rank is the owner."""
        return [index for index, owner in self.owners.items() if owner == rank]

    def sent(self, rank: int) -> list[list[tuple[int, tierstore.Chunk]]]:
        """Return what a rank sends to each: matrix and chunk, in the order on the wire."""
        sent: list[list[tuple[int, tierstore.Chunk]]] = [[] for _ in range(self._world_size)]
        for index, matrix in self.matrices.items():
            sent[self.owners[index]] += [(index, chunk) for chunk in matrix.chunks[rank]]
        return sent

    def received(self, rank: int) -> list[list[tuple[int, tierstore.Chunk]]]:
        """Return what a rank receives from each, likewise."""
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
    """Cut the matrices that are whole on no rank into rounds, as long ones as memory allows.

    Args:
        matrices: over the same ranks, in the order in which they are exchanged.
        owners: the rank that orthogonalizes each.
        bytes_max: the most that a rank may need in one round for what it sends and receives
            and for the whole matrices that it puts together.
            A matrix that needs more has a round for itself.
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
    """Return for how many elements each rank needs memory in a round of this matrix alone."""
    if matrix.whole_rank is not None:
        return [0] * len(matrix.chunks)
    needs = list(matrix.numels)  # What each rank sends.
    needs[owner] += 2 * matrix.numel  # What the owner receives, and the matrix made of it.
    return needs
