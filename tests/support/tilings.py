"""Matrices whose elements lie on several ranks in all kinds of ways."""

from __future__ import annotations

import itertools
from random import Random

from muon.rounds import SharedMatrix
from tierstore.layout.chunks import Chunk, flat_range_chunks
from tierstore.layout.sharding import Sharded, Sharding, held_chunks


def by_rows(shape: tuple[int, int], world_size: int, dim: int = 0) -> SharedMatrix:
    """Cut as by FSDP2: the last ranks may have less than the others, or nothing."""
    sharding = Sharding(mesh_shape=(world_size,), placements=(Sharded(dim=dim),))
    held = [held_chunks(shape, sharding, (rank,)) for rank in range(world_size)]
    return SharedMatrix(shape=shape, chunks=[[chunk.whole for chunk in each] for each in held])


def by_flat_ranges(shape: tuple[int, int], cuts: list[int]) -> SharedMatrix:
    """One range of the row-major order after another, between these cuts."""
    ends = [0, *cuts, shape[0] * shape[1]]
    ranges = itertools.pairwise(ends)
    return SharedMatrix(shape=shape, chunks=[flat_range_chunks(shape, *each) for each in ranges])


def by_rectangles(shape: tuple[int, int], world_size: int, random: Random) -> SharedMatrix:
    """Cut in two, again and again, and dealt to ranks at random."""
    chunks: list[list[Chunk]] = [[] for _ in range(world_size)]

    def cut(offsets: tuple[int, int], sizes: tuple[int, int], depth: int) -> None:
        dim = random.randrange(2)
        if depth == 0 or sizes[dim] < 2:
            chunks[random.randrange(world_size)].append(Chunk(offsets, sizes))
            return
        at = random.randrange(1, sizes[dim])
        for start, size in ((0, at), (at, sizes[dim] - at)):
            if dim == 0:
                cut((offsets[0] + start, offsets[1]), (size, sizes[1]), depth - 1)
            else:
                cut((offsets[0], offsets[1] + start), (sizes[0], size), depth - 1)

    cut((0, 0), shape, random.randrange(5))
    return SharedMatrix(shape=shape, chunks=chunks)


def any_matrix(world_size: int, random: Random) -> SharedMatrix:
    """Of few shapes, so that some are equal; whole on one rank now and then."""
    shape = random.choice([(1, 9), (2, 3), (4, 4), (9, 4), (5, 12)])
    kind = random.randrange(4)
    if kind < 2:
        return by_rows(shape, world_size, dim=kind)
    if kind == 2:
        numel = shape[0] * shape[1]
        return by_flat_ranges(
            shape, sorted(random.randrange(numel + 1) for _ in range(world_size - 1))
        )
    return by_rectangles(shape, world_size, random)
