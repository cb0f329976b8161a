"""Sharding of a parameter over a mesh of ranks: held and owned elements of each rank.

Along each dimension of the mesh a DTensor is replicated, or one dimension of the tensor is cut.
Replicas share the work: exactly one rank owns each element. The owner follows from shapes and
placements, so all ranks compute the same owner.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tierstore.layout.chunks import Chunk, flat_range_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Ranks along a dimension of the mesh hold consecutive parts of one dimension of the tensor.

    Without ``bounds``, the tensor is cut as by ``torch.chunk``: the last ranks may hold less than
    the others, or nothing.
    """

    dim: int
    """The dimension of the tensor that is cut, counted from the first."""

    split_factor: int = 1
    """1 for ``Shard(dim)``. It is applied after the earlier dimensions of the mesh.

    Above 1 for ``_StridedShard(dim, split_factor=...)``. It is applied after the later dimensions
    of the mesh, which cut ``dim`` into ``split_factor`` shards. FSDP2 places tensor parallel
    parameters like this.
    """

    bounds: tuple[int, ...] | None = None
    """Rank r holds the indices [bounds[r], bounds[r + 1]). No other cut of the dimension is then
    allowed. None: cut as by ``torch.chunk``."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"dim must be counted from the first dimension, got {self}")
        if self.split_factor < 1:
            raise ValueError(f"split_factor must be at least 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Placements of a tensor on a mesh of ranks.

    Raises:
        ValueError: the mesh has not one placement per dimension, a size is not positive, or the
            split factor of a dimension that is cut several times is not the number of shards that
            later dimensions of the mesh make.
    """

    mesh_shape: tuple[int, ...]
    """Number of ranks along each dimension of the mesh."""

    placements: tuple[Sharded | None, ...]
    """Placement along each dimension of the mesh. None: the ranks along the dimension hold the same
    elements, as with ``Replicate()``."""

    def __post_init__(self) -> None:
        if len(self.mesh_shape) != len(self.placements):
            raise ValueError(f"every dimension of the mesh needs one placement, got {self}")
        if min(self.mesh_shape, default=1) < 1:
            raise ValueError(f"every dimension of the mesh needs a rank, got {self}")
        for dim in sorted({placement.dim for placement in self.placements if placement}):
            if _cut_order(self, dim) is None and len(_cuts(self, dim)) > 1:
                raise ValueError(
                    f"the indices of dimension {dim} that a rank holds are ambiguous: the split "
                    f"factor of a strided shard must be the number of shards that later dimensions "
                    f"of the mesh make. Redistribute the tensor to Shard and Replicate. "
                    f"Got {self}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChunk:
    """A rectangle of a parameter that a rank holds, in two coordinate systems."""

    whole: Chunk
    """Coordinates in the whole tensor."""

    local: Chunk
    """Coordinates in the local tensor of the rank. The sizes are equal."""


def local_shape(
    shape: Sequence[int], sharding: Sharding, coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the local tensor of the rank at a coordinate of the mesh.

    Raises:
        ValueError: as in ``held_chunks``.
    """
    return tuple(sum(map(len, runs)) for runs in _runs(shape, sharding, coordinate))


def held_chunks(
    shape: Sequence[int], sharding: Sharding, coordinate: Sequence[int]
) -> list[HeldChunk]:
    """Return the chunks that the rank at a coordinate of the mesh holds of a tensor.

    Chunks are in row-major order of the local tensor. An empty shard has no chunk. A shard has
    several if consecutive indices of the local tensor are not consecutive in the whole tensor.

    Raises:
        ValueError: the coordinate is not in the mesh, or a placement cuts a dimension that the
            tensor does not have.
    """
    dimensions = []  # The runs of every dimension, with their offsets in the local tensor.
    for runs in _runs(shape, sharding, coordinate):
        offsets = itertools.accumulate(map(len, runs), initial=0)
        dimensions.append(list(zip(runs, offsets, strict=False)))
    held = []
    for rectangle in itertools.product(*dimensions):
        sizes = tuple(len(run) for run, _ in rectangle)
        whole = Chunk(tuple(run.start for run, _ in rectangle), sizes)
        local = Chunk(tuple(offset for _, offset in rectangle), sizes)
        held.append(HeldChunk(whole=whole, local=local))
    return held


def owned_chunks(
    shape: Sequence[int], sharding: Sharding, coordinate: Sequence[int], columns: int = 1
) -> list[HeldChunk]:
    """Return the chunks that the rank at a coordinate of the mesh owns.

    R ranks whose coordinates differ only along replicated dimensions of the mesh hold the same n
    elements. The r-th of these ranks, in row-major order, owns the elements
    [n * r // R, n * (r + 1) // R) of the local tensor. Both ends are moved back to multiples of
    ``columns`` within their row. Each element has one owner. Each chunk lies in one of
    ``held_chunks``. Chunks are in the order of their offsets in the local tensor.

    Raises:
        ValueError: as ``held_chunks``.
    """
    local = local_shape(shape, sharding, coordinate)
    start, stop = _owned_range(local, sharding, coordinate, columns)
    held = held_chunks(shape, sharding, coordinate)
    if stop - start == math.prod(local):
        return held
    owned = []
    for part in flat_range_chunks(local, start, stop):
        owned += [overlap for chunk in held if (overlap := _overlap(chunk, part)) is not None]
    return owned


def on_grid(shape: Sequence[int], index: int, columns: int) -> int:
    """Return the last place, at or before an index, where a multiple of ``columns`` cuts a row.

    Example: in rows of 10 columns, index 28 is column 8 of row 2; with 3 columns in a block the
    place is 26, column 6.

    Args:
        shape: shape of a tensor.
        index: index of an element in row-major order, or the number of elements.
        columns: number of columns in a block.
    """
    if not shape or shape[-1] == 0:
        return index
    return index - index % shape[-1] % columns


def _owned_range(
    local: Sequence[int], sharding: Sharding, coordinate: Sequence[int], columns: int
) -> tuple[int, int]:
    """Return the range that a rank owns of the row-major order of its local tensor."""
    replica, replicas = 0, 1
    for size, placement, index in zip(
        sharding.mesh_shape, sharding.placements, coordinate, strict=True
    ):
        if placement is None:
            replica, replicas = replica * size + index, replicas * size
    start, stop = share(math.prod(local), replica, replicas)
    return on_grid(local, start, columns), on_grid(local, stop, columns)


def _runs(shape: Sequence[int], sharding: Sharding, coordinate: Sequence[int]) -> list[list[range]]:
    """Return the runs of indices that a rank holds, for each dimension of the tensor."""
    if len(coordinate) != len(sharding.mesh_shape) or any(
        not 0 <= index < size for index, size in zip(coordinate, sharding.mesh_shape, strict=True)
    ):
        raise ValueError(
            f"coordinate {list(coordinate)} does not lie within a mesh of shape "
            f"{list(sharding.mesh_shape)}"
        )
    for placement in sharding.placements:
        if placement and placement.dim >= len(shape):
            raise ValueError(f"a tensor of shape {list(shape)} has no dimension for {placement}")
    return [_dimension_runs(sharding, coordinate, dim, extent) for dim, extent in enumerate(shape)]


def _dimension_runs(
    sharding: Sharding, coordinate: Sequence[int], dim: int, extent: int
) -> list[range]:
    """Return the runs of consecutive indices of one dimension, in the order of the local tensor.

    No run is empty, and no run continues the previous run.
    """
    order = _cut_order(sharding, dim)
    if order is not None:
        run = range(extent)
        for mesh_dim in order:
            index, placement = coordinate[mesh_dim], sharding.placements[mesh_dim]
            if placement and placement.bounds:
                run = run[placement.bounds[index] : placement.bounds[index + 1]]
            else:
                run = _shard(run, index, sharding.mesh_shape[mesh_dim])
        return [run] if run else []
    ((mesh_dim, split_factor),) = _cuts(sharding, dim)
    runs: list[range] = []
    for number in range(split_factor):
        piece = _shard(range(extent), number, split_factor)
        run = _shard(piece, coordinate[mesh_dim], sharding.mesh_shape[mesh_dim])
        if run and runs and runs[-1].stop == run.start:
            runs[-1] = range(runs[-1].start, run.stop)
        elif run:
            runs.append(run)
    return runs


def _cut_order(sharding: Sharding, dim: int) -> list[int] | None:
    """Return the dimensions of the mesh that cut a dimension of the tensor, in order of the cuts.

    None if a split factor does not match the shards of the other dimensions of the mesh.
    """
    order: list[int] = []
    for mesh_dim, split_factor in reversed(_cuts(sharding, dim)):
        position, shards = 0, 1
        while shards < split_factor and position < len(order):
            shards *= sharding.mesh_shape[order[position]]
            position += 1
        if shards != split_factor:
            return None
        order.insert(position, mesh_dim)
    return order


def _cuts(sharding: Sharding, dim: int) -> list[tuple[int, int]]:
    """Return the (dimension of the mesh, split factor) pairs that cut a dimension of the tensor."""
    return [
        (mesh_dim, placement.split_factor)
        for mesh_dim, placement in enumerate(sharding.placements)
        if placement and placement.dim == dim and sharding.mesh_shape[mesh_dim] > 1
    ]


def _shard(run: range, index: int, count: int) -> range:
    """Return one of ``count`` shards of a run, cut as by ``torch.chunk``; it may be empty."""
    step = -(-len(run) // count)
    return run[step * index : step * (index + 1)]


def _overlap(held: HeldChunk, part: Chunk) -> HeldChunk | None:
    """Return the intersection of a chunk with a part of the local tensor, or None."""
    local = held.local
    starts = tuple(map(max, local.offsets, part.offsets))
    stops = map(min, _stops(local), _stops(part))
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    if min(sizes, default=1) < 1:
        return None
    moved = zip(held.whole.offsets, starts, local.offsets, strict=True)
    whole = tuple(offset + start - first for offset, start, first in moved)
    return HeldChunk(whole=Chunk(whole, sizes), local=Chunk(starts, sizes))


def _stops(chunk: Chunk) -> list[int]:
    return [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The ranks that hold a parameter, and its sharding over them."""

    ranks: tuple[int, ...]
    """Ranks in row-major order of the mesh."""

    sharding: Sharding
    """Sharding of the parameter over that mesh."""

    is_whole: bool = field(init=False, repr=False, compare=False)
    """True if every rank holds the whole parameter."""

    def __post_init__(self) -> None:
        meshes = zip(self.sharding.mesh_shape, self.sharding.placements, strict=True)
        is_whole = all(size == 1 or placement is None for size, placement in meshes)
        object.__setattr__(self, "is_whole", is_whole)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of the local tensor of a rank, given the shape of the parameter."""
        return local_shape(shape, self.sharding, self._coordinate(rank))

    def local_shapes(self, shape: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        """Return the shape of the local tensor of each of ``ranks``, in their order."""
        return _local_shapes(shape, self.sharding)

    def held(self, shape: tuple[int, ...], rank: int) -> Sequence[HeldChunk]:
        """Return the chunks that a rank holds; see held_chunks()."""
        return held_chunks(shape, self.sharding, self._coordinate(rank))

    def uneven_part(self, shape: tuple[int, ...], rank: int) -> Chunk | None:
        """Return the chunk of a rank if ranks hold uneven parts; else None."""
        if not any(placement and placement.bounds for placement in self.sharding.placements):
            return None
        runs = _runs(shape, self.sharding, self._coordinate(rank))  # At most one per dimension.
        firsts = tuple(of_dim[0].start if of_dim else 0 for of_dim in runs)
        return Chunk(firsts, tuple(sum(map(len, of_dim)) for of_dim in runs))

    def owned(self, shape: tuple[int, ...], rank: int, columns: int = 1) -> Sequence[HeldChunk]:
        """Return the chunks that a rank owns; see owned_chunks(). () outside of the mesh."""
        if rank not in self.ranks:
            return ()
        return _owned(shape, self.sharding, self._coordinate(rank), columns)

    def owned_ranges(self, shape: tuple[int, ...], columns: int = 1) -> Sequence[tuple[int, int]]:
        """Return the range that each of ``ranks`` owns of its local tensor, in their order."""
        return _owned_ranges(shape, self.sharding, columns)

    def fullest(self, shape: tuple[int, ...], columns: int = 1) -> tuple[int, int]:
        """Return the first position in ``ranks`` with the most owned elements, and their number."""
        return _fullest(shape, self.sharding, columns)

    def keeps_rows_together(self, shape: tuple[int, ...], count: int) -> bool:
        """Return whether each rank owns whole units of ``count`` rows of its local tensor.

        Ranks may cut the other dimensions. Each rank then owns its part of every row.
        """
        return _keeps_rows_together(shape, self.sharding, count)

    def replicas(self) -> Iterator[tuple[int, ...]]:
        """Yield every set of two or more ranks that hold the same elements."""
        mesh_shape, placements = self.sharding.mesh_shape, self.sharding.placements
        replicated = [dimension for dimension, p in enumerate(placements) if p is None]
        count = math.prod(mesh_shape[dimension] for dimension in replicated)
        if count > 1:
            ranks = np.array(self.ranks).reshape(mesh_shape)
            ranks = np.moveaxis(ranks, replicated, range(-len(replicated), 0))
            yield from map(tuple, ranks.reshape(-1, count).tolist())

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        position = self.ranks.index(rank)
        return tuple(int(i) for i in np.unravel_index(position, self.sharding.mesh_shape))


@functools.lru_cache(maxsize=2**16)  # The layers of a model have the same shapes.
def _owned(
    shape: tuple[int, ...], sharding: Sharding, coordinate: tuple[int, ...], columns: int
) -> Sequence[HeldChunk]:
    return owned_chunks(shape, sharding, coordinate, columns)


@functools.lru_cache(maxsize=2**10)
def _local_shapes(shape: tuple[int, ...], sharding: Sharding) -> Sequence[tuple[int, ...]]:
    return [
        local_shape(shape, sharding, coordinate) for coordinate in np.ndindex(sharding.mesh_shape)
    ]


@functools.lru_cache(maxsize=2**10)
def _owned_ranges(
    shape: tuple[int, ...], sharding: Sharding, columns: int
) -> Sequence[tuple[int, int]]:
    pairs = zip(_local_shapes(shape, sharding), np.ndindex(sharding.mesh_shape), strict=True)
    return [_owned_range(local, sharding, coordinate, columns) for local, coordinate in pairs]


@functools.lru_cache(maxsize=2**10)
def _fullest(shape: tuple[int, ...], sharding: Sharding, columns: int) -> tuple[int, int]:
    numels = [stop - start for start, stop in _owned_ranges(shape, sharding, columns)]
    return numels.index(max(numels)), max(numels)


@functools.lru_cache(maxsize=2**10)
def _keeps_rows_together(shape: tuple[int, ...], sharding: Sharding, count: int) -> bool:
    meshes = zip(sharding.mesh_shape, sharding.placements, strict=True)
    if any(size > 1 and placement is None for size, placement in meshes):
        return False  # Replicas own parts of the local tensor.
    runs = [
        run
        for coordinate in np.ndindex(sharding.mesh_shape)
        for run in _dimension_runs(sharding, coordinate, 0, shape[0])
    ]
    return all(run.start % count == run.stop % count == 0 for run in runs)


def with_bounds(
    sharding: Sharding, shape: Sequence[int], local_shapes: Sequence[Sequence[int]]
) -> Sharding:
    """Return the sharding whose parts have these shapes and are in the order of the ranks.

    Example: three ranks hold 5, 0 and 7 rows of 12. Then the bounds are (0, 5, 5, 12).

    Args:
        sharding: the dimensions that are cut.
        shape: shape of the tensor.
        local_shapes: shape of the local tensor of each rank, in row-major order of the mesh.

    Raises:
        ValueError: no such sharding exists.
    """
    if any(math.prod(local) and len(local) != len(shape) for local in local_shapes):
        raise ValueError(f"local tensors do not have the dimensions of the shape {list(shape)}")
    positions = np.arange(len(local_shapes)).reshape(sharding.mesh_shape)
    placements: list[Sharded | None] = []
    for mesh_dim, placement in enumerate(sharding.placements):
        if placement is None:
            placements.append(None)
            continue
        dim = placement.dim
        if len(_cuts(sharding, dim)) > 1 or placement.split_factor > 1:
            raise ValueError(
                "the shapes of its local tensors differ from its placements, and dimension "
                f"{dim} is cut several times or strided: redistribute it to one Shard of the "
                "dimension"
            )
        bounds = [0]
        for index in range(sharding.mesh_shape[mesh_dim]):
            parts = [local_shapes[int(at)] for at in positions.take(index, mesh_dim).flat]
            sizes = {part[dim] for part in parts if math.prod(part)} or {0}
            if len(sizes) > 1:
                raise ValueError(
                    f"ranks with index {index} of dimension {mesh_dim} of the mesh have "
                    f"{sorted(sizes)} elements along dimension {dim}, expected equally many"
                )
            bounds.append(bounds[-1] + sizes.pop())
        if math.prod(shape) and bounds[-1] != shape[dim]:
            raise ValueError(
                f"along dimension {dim} its ranks have {bounds[-1]} elements together, but it has "
                f"{shape[dim]}"
            )
        placements.append(replace(placement, bounds=tuple(bounds)))
    return replace(sharding, placements=tuple(placements))


def whole_on(ranks: Sequence[int]) -> Holding:
    """Return the holding of a parameter that all of these ranks hold whole."""
    sharding = Sharding(mesh_shape=(len(ranks),), placements=(None,))
    return Holding(ranks=tuple(ranks), sharding=sharding)


def stacked(holdings: Sequence[Holding]) -> Holding:
    """Return the holding of a parameter that is replicated over several meshes of ranks.

    Raises:
        ValueError: the meshes shard it differently, or have ranks in common.
    """
    first, *others = holdings
    if not others:
        return first
    ranks = [rank for holding in holdings for rank in holding.ranks]
    if len(set(ranks)) < len(ranks) or any(other.sharding != first.sharding for other in others):
        raise ValueError(f"neither one mesh nor replicas on several meshes: {list(holdings)}")
    sharding = Sharding(
        mesh_shape=(len(holdings), *first.sharding.mesh_shape),
        placements=(None, *first.sharding.placements),
    )
    return Holding(ranks=tuple(ranks), sharding=sharding)


def share(numel: int, index: int, count: int) -> tuple[int, int]:
    """Return the bounds of one of ``count`` flat ranges whose lengths differ by at most 1.

    Range ``index`` is [numel * index // count, numel * (index + 1) // count).
    """
    return numel * index // count, numel * (index + 1) // count
