"""Which rank owns which part of what several ranks hold whole.

Either each parameter belongs to one rank, so that the ranks have about as much to do, or all
elements are cut into equal ranges. Both follow from sizes alone, so every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def share(numel: int, index: int, count: int) -> tuple[int, int]:
    """Return the bounds of one of ``count`` flat ranges that differ by one element at most.

    Range ``index`` is [numel * index // count, numel * (index + 1) // count).
    """
    return numel * index // count, numel * (index + 1) // count


def balanced_owners(costs: Sequence[int], loads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return which rank owns each of some whole parameters, and what the ranks then have.

    The costliest first, each to the rank that has least: of equal parameters the earlier one
    first, of equal ranks the lower one. ``loads`` has what each rank has already, in the unit
    of the costs; that of the answer has the new ones added.

    Raises:
        ValueError: there is no rank.
    """
    if not loads:
        raise ValueError("loads must have a number for each rank, got none")
    owners, sums = [0] * len(costs), list(loads)
    for parameter in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(len(sums)), key=sums.__getitem__)
        owners[parameter] = owner
        sums[owner] += costs[parameter]
    return owners, sums


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPiece:
    """The elements [start, stop) of the row-major order of one of several parameters."""

    parameter: int
    """Its position among them."""

    start: int
    stop: int


def flat_owners(numels: Sequence[int], world_size: int) -> list[list[FlatPiece]]:
    """Return for each rank its pieces of parameters that have these numbers of elements.

    One after the other they make a row of n elements, of which rank r owns
    [n * r // world_size, n * (r + 1) // world_size). No piece is empty.

    Raises:
        ValueError: there is no rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    owned = []
    for rank in range(world_size):
        first, last = share(sum(numels), rank, world_size)
        pieces, begin = [], 0
        for parameter, numel in enumerate(numels):
            start, stop = max(first - begin, 0), min(last - begin, numel)
            if start < stop:
                pieces.append(FlatPiece(parameter=parameter, start=start, stop=stop))
            begin += numel
        owned.append(pieces)
    return owned
