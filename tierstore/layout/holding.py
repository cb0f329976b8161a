"""Which ranks hold a parameter, and which of its elements each of them holds and owns."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.layout.sharding import HeldChunk, Replicated, Sharding, local_shape, owned_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The ranks that hold a parameter, and how it lies on them."""

    ranks: tuple[int, ...]
    """In row-major order of the mesh."""

    sharding: Sharding
    """How the parameter lies on that mesh."""

    @property
    def is_whole(self) -> bool:
        """Whether each of the ranks holds all of the parameter."""
        meshes = zip(self.sharding.mesh_shape, self.sharding.placements, strict=True)
        return all(size == 1 or isinstance(placement, Replicated) for size, placement in meshes)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of what one of the ranks holds of a parameter of some shape."""
        return local_shape(shape, self.sharding, self._coordinate(rank))

    def owned(self, shape: tuple[int, ...], rank: int) -> Sequence[HeldChunk]:
        """Return what a rank owns of it, see owned_chunks(); another rank owns nothing."""
        if rank not in self.ranks:
            return ()
        return _owned(shape, self.sharding, self._coordinate(rank))

    def replicas(self) -> Iterator[tuple[int, ...]]:
        """Yield each set of several ranks that hold the same elements."""
        dimensions = [
            dimension
            for dimension, placement in enumerate(self.sharding.placements)
            if isinstance(placement, Replicated)
        ]
        count = math.prod(self.sharding.mesh_shape[dimension] for dimension in dimensions)
        if count > 1:
            ranks = np.array(self.ranks).reshape(self.sharding.mesh_shape)
            ranks = np.moveaxis(ranks, dimensions, range(-len(dimensions), 0))
            yield from map(tuple, ranks.reshape(-1, count).tolist())

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        position = self.ranks.index(rank)
        return tuple(int(i) for i in np.unravel_index(position, self.sharding.mesh_shape))


@functools.lru_cache(maxsize=2**16)  # The layers of a model have the same shapes.
def _owned(
    shape: tuple[int, ...], sharding: Sharding, coordinate: tuple[int, ...]
) -> Sequence[HeldChunk]:
    return owned_chunks(shape, sharding, coordinate)


def whole_on(ranks: Sequence[int]) -> Holding:
    """Return the holding of a parameter that each of some ranks holds whole."""
    sharding = Sharding(mesh_shape=(len(ranks),), placements=(Replicated(),))
    return Holding(ranks=tuple(ranks), sharding=sharding)


def stacked(holdings: Sequence[Holding]) -> Holding:
    """Return the holding of a parameter that each of several meshes holds in the same way.

    Raises:
        ValueError: it lies in different ways on them, or they have ranks in common.
    """
    first, *others = holdings
    if not others:
        return first
    ranks = [rank for holding in holdings for rank in holding.ranks]
    if len(set(ranks)) < len(ranks) or any(each.sharding != first.sharding for each in others):
        raise ValueError(f"neither one mesh nor copies on several: {list(holdings)}")
    return Holding(
        ranks=tuple(ranks),
        sharding=Sharding(
            mesh_shape=(len(holdings), *first.sharding.mesh_shape),
            placements=(Replicated(), *first.sharding.placements),
        ),
    )
