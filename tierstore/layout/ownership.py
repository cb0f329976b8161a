"""Ownership: the elements of every subgroup that each rank pages, steps and commits.

A subgroup has the same parameters on every rank. A rank owns a part of each parameter, together
about ``page_bytes``. Parts follow from specs and holdings, so every rank knows all parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from tierstore.layout.chunks import Chunk
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.sharding import HeldChunk, Holding, on_grid, share
from tierstore.layout.subgroups import (
    Elements,
    ParameterShard,
    Piece,
    Subgroup,
    cut_into_pages,
    record_chunks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParameter:
    """A parameter and the ranks that hold it, as parts or as replicas."""

    spec: ParameterSpec

    holding: Holding

    flat: bool
    """For a parameter that ranks hold whole: True if every rank owns an equal range of the
    subgroup's elements, False if one rank owns the parameter."""

    cost: int
    """Relative cost of owning the parameter. Comparable only among parameters with the same
    ``elementwise``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedShard:
    """The elements of one parameter in one subgroup, on all ranks."""

    parameter: SharedParameter

    ranges: tuple[tuple[int, int], ...]
    """Rank -> its elements [start, stop). The indices count the elements of the parameter that the
    rank owns or, if ranks hold the parameter whole, all its elements."""

    @property
    def spec(self) -> ParameterSpec:
        """The parameter."""
        return self.parameter.spec

    @property
    def chunks(self) -> list[list[Chunk]]:
        """Rank -> the chunks that the rank owns. Every element is in one chunk of one rank."""
        return [[owned.whole for owned in self.owned(rank)] for rank in range(len(self.ranges))]

    def owned(self, rank: int) -> tuple[HeldChunk, ...]:
        """Return the chunks that a rank owns, each small enough for one record of any state."""
        start, stop = self.ranges[rank]
        if start >= stop:
            return ()
        spec, holding = self.parameter.spec, self.parameter.holding
        if holding.is_whole:
            parts = record_chunks(spec, start, stop)
            return tuple(HeldChunk(whole=part, local=part) for part in parts)
        return tuple(_parts(spec, holding.owned(spec.shape, rank, spec.column_block), start, stop))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSubgroup:
    """The parameter shards of all ranks that are stepped at the same time."""

    group: int
    shards: tuple[SharedShard, ...]

    @property
    def elementwise(self) -> bool:
        """True if the rules of all parameters are elementwise."""
        return all(shard.spec.elementwise for shard in self.shards)

    def of(self, rank: int) -> Subgroup:
        """Return the subgroup of a rank. Its shards of some parameters may be empty."""
        shards = (
            ParameterShard(shard.spec, tuple(owned.whole for owned in shard.owned(rank)))
            for shard in self.shards
        )
        return Subgroup(self.group, tuple(shards))

    def places(self, rank: int) -> dict[tuple[str, Chunk], Chunk]:
        """Return (parameter name, owned chunk) -> its chunk in the local tensor, if they differ."""
        return {
            (shard.spec.name, owned.whole): owned.local
            for shard in self.shards
            for owned in shard.owned(rank)
            if owned.local != owned.whole
        }


def owned_costs(subgroups: Iterable[SharedSubgroup], world_size: int) -> dict[bool, list[int]]:
    """Return the cost of the parameters that each rank owns whole, by ``elementwise`` and rank.

    Costs for the two values of ``elementwise`` have different units.
    """
    loads = {elementwise: [0] * world_size for elementwise in (False, True)}
    for shard in chain.from_iterable(subgroup.shards for subgroup in subgroups):
        if _has_one_owner(shard.parameter):
            for rank, (start, stop) in enumerate(shard.ranges):
                loads[shard.spec.elementwise][rank] += _cost(shard.parameter, stop - start)
    return loads


def partition_ranks(
    group: int,
    parameters: Sequence[SharedParameter],
    page_bytes: int,
    world_size: int,
    loads: Mapping[bool, list[int]] | None = None,
    *,
    may_cut: bool = True,
) -> list[SharedSubgroup]:
    """Cut one param group into subgroups; a rank owns about ``page_bytes`` or less of each.

    Parameters without elements are in no subgroup. The records of a page take more than
    ``page_bytes`` only if a parameter that may not be cut takes more. The padding of sections is
    not counted.

    Args:
        group: number of the group.
        parameters: the parameters of the group.
        page_bytes: approximate number of bytes of a subgroup that a rank may own.
        world_size: number of ranks.
        loads: owned_costs() of earlier groups. The costs of this group are added.
        may_cut: whether a parameter that may be cut is cut where a page is full.
    """
    loads = owned_costs([], world_size) if loads is None else loads
    # Cut pages before choosing owners: every rank has a part of each subgroup, perhaps an empty
    # part. All ranks then step the same pages in the same order, as collectives require.
    sequences = [_elements(parameter) for parameter in parameters]
    pages = cut_into_pages(sequences, page_bytes, may_cut=may_cut)
    owners = _owners(parameters, pages, loads)
    subgroups = []
    for pieces in pages:
        ranges = _ranges(parameters, pieces, owners, world_size)
        shards = (
            SharedShard(parameter=parameters[piece.parameter], ranges=ranges[piece])
            for piece in pieces
        )
        subgroups.append(SharedSubgroup(group=group, shards=tuple(shards)))
    return subgroups


def _owners(
    parameters: Sequence[SharedParameter],
    pages: Sequence[Sequence[Piece]],
    loads: Mapping[bool, list[int]],
) -> dict[Piece, int]:
    """Return the owner of each piece that one rank owns whole.

    Assigns the pieces of all pages at once. Page by page, the loads of ranks would differ more.
    """
    members: dict[tuple[tuple[int, ...], bool], list[Piece]] = {}
    for piece in chain.from_iterable(pages):
        parameter = parameters[piece.parameter]
        if _has_one_owner(parameter):
            # Only ranks that hold a parameter can step it without another exchange.
            key = parameter.holding.ranks, parameter.spec.elementwise
            members.setdefault(key, []).append(piece)
    owners: dict[Piece, int] = {}
    for (ranks, elementwise), pieces in members.items():
        costs = [_cost(parameters[piece.parameter], piece.numel) for piece in pieces]
        before = [loads[elementwise][rank] for rank in ranks]
        chosen, after = balanced_owners(costs, before)
        owners.update((piece, ranks[owner]) for piece, owner in zip(pieces, chosen, strict=True))
        for rank, load in zip(ranks, after, strict=True):
            loads[elementwise][rank] = load
    return owners


def _has_one_owner(parameter: SharedParameter) -> bool:
    return parameter.holding.is_whole and not parameter.flat


def _elements(parameter: SharedParameter) -> Elements:
    """Return the elements that fill the pages of the rank that owns most of a parameter."""
    spec, holding = parameter.spec, parameter.holding
    if holding.is_whole:
        # Each rank owns some of the parameters that stay whole, and whole pieces of one with units.
        is_divided = parameter.flat or not (spec.elementwise or spec.unit)
        ranks = len(holding.ranks) if is_divided else 1
        return Elements(parameter=spec, numel=math.prod(spec.shape), ranks=ranks)
    # The rank with the most elements fills the pages: ``page_bytes`` then bounds all ranks' pages.
    position, most = holding.fullest(spec.shape, spec.column_block)
    unit = spec.unit if _has_whole_units(parameter) else None
    local = replace(spec.rectangle(holding.local_shapes(spec.shape)[position]), unit=unit)
    return Elements(parameter=local, numel=most)


def _has_whole_units(parameter: SharedParameter) -> bool:
    """Return whether every rank owns whole units of its local tensor, in order."""
    spec, holding = parameter.spec, parameter.holding
    return spec.unit is not None and holding.keeps_rows_together(spec.shape, spec.unit)


def _ranges(
    parameters: Sequence[SharedParameter],
    pieces: Sequence[Piece],
    owners: Mapping[Piece, int],
    world_size: int,
) -> dict[Piece, tuple[tuple[int, int], ...]]:
    """Return the range that each rank owns, for each piece of a subgroup.

    Args:
        parameters: the parameters of the group.
        pieces: the pieces of the subgroup.
        owners: the owner of each piece that one rank owns whole.
        world_size: number of ranks.
    """
    ranges: dict[Piece, tuple[tuple[int, int], ...]] = {}
    flat: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        parameter = parameters[piece.parameter]
        holding, start, stop = parameter.holding, piece.start, piece.stop
        if piece in owners:
            ranges[piece] = _rank_ranges([owners[piece]], [(start, stop)], world_size)
        elif holding.is_whole:
            flat.setdefault(holding.ranks, []).append(piece)
        else:
            spec, unit = parameter.spec, _has_whole_units(parameter)
            ranges[piece] = _sharded_ranges(
                *(holding, spec.shape, spec.column_block, start, stop, world_size), by_rows=unit
            )
    # decisions: Replicas own equal ranges. The ranges are equal over all pieces of the page
    # together: a small parameter alone would leave most ranks without a part.
    for ranks, members in flat.items():
        owned = flat_ranges([piece.numel for piece in members], len(ranks))
        for piece, parts in zip(members, owned, strict=True):
            spec = parameters[piece.parameter].spec
            # A block of columns has one scale. Two ranks cannot both write it.
            moved = [
                (
                    on_grid(spec.shape, piece.start + start, spec.column_block),
                    on_grid(spec.shape, piece.start + stop, spec.column_block),
                )
                for start, stop in parts
            ]
            ranges[piece] = _rank_ranges(ranks, moved, world_size)
    return ranges


@functools.lru_cache(maxsize=2**8)  # The layers of a model are cut alike.
def _sharded_ranges(
    holding: Holding,
    shape: tuple[int, ...],
    columns: int,
    start: int,
    stop: int,
    world_size: int,
    *,
    by_rows: bool,
) -> tuple[tuple[int, int], ...]:
    """Return the range of each rank for a range of the rank that owns most.

    Ranges have the same elements or, with ``by_rows``, the same rows of the local tensors. Local
    tensors may differ in size. With ``by_rows``, the parts of a unit on all ranks are in one page.
    Rows are cut at multiples of ``columns``.
    """
    owned = holding.owned_ranges(shape, columns)
    locals_ = holding.local_shapes(shape)
    sizes = [math.prod(local[1:]) if by_rows else 1 for local in locals_]
    most = sizes[holding.fullest(shape, columns)[0]]

    def cut_at(bounds: tuple[int, int], local: tuple[int, ...], size: int) -> tuple[int, int]:
        first, last = bounds
        cuts = [min(first + cut // most * size, last) for cut in (start, stop)]
        begin, end = (on_grid(local, cut, columns) - first for cut in cuts)
        return begin, end

    parts = list(zip(owned, locals_, sizes, strict=True))
    found = {part: cut_at(*part) for part in {*parts}}  # Hundreds of ranks have few distinct parts.
    return _rank_ranges(holding.ranks, [found[part] for part in parts], world_size)


def _rank_ranges(
    ranks: Sequence[int], ranges: Sequence[tuple[int, int]], world_size: int
) -> tuple[tuple[int, int], ...]:
    """Return the range of every rank; (0, 0) for a rank without one."""
    found = [(0, 0)] * world_size
    for rank, each in zip(ranks, ranges, strict=True):
        found[rank] = each
    return tuple(found)


def _cost(parameter: SharedParameter, numel: int) -> int:
    return parameter.cost * numel // math.prod(parameter.spec.shape)


def _parts(
    spec: ParameterSpec, held: Sequence[HeldChunk], start: int, stop: int
) -> Iterator[HeldChunk]:
    """Yield the elements [start, stop) of consecutive chunks as smaller chunks."""
    for chunk, end in zip(held, accumulate(chunk.whole.numel for chunk in held), strict=True):
        begin = end - chunk.whole.numel
        first, last = max(start, begin), min(stop, end)
        if first < last:
            sizes = chunk.whole.sizes
            for part in record_chunks(spec, first - begin, last - begin, sizes):
                if part.sizes == sizes:
                    yield chunk
                    continue
                yield HeldChunk(whole=_moved(part, chunk.whole), local=_moved(part, chunk.local))


def _moved(part: Chunk, outer: Chunk) -> Chunk:
    offsets = (a + b for a, b in zip(part.offsets, outer.offsets, strict=True))
    return Chunk(tuple(offsets), part.sizes)


def balanced_owners(costs: Sequence[int], loads: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the owner of each parameter, and the resulting load of each rank.

    Parameters are assigned in order of decreasing cost (ties: position), each to the rank with the
    smallest load (ties: lowest number).

    Example: costs (5, 3, 3) over loads (0, 0): rank 0 gets the 5, rank 1 both 3; the result is
    ([0, 1, 1], [5, 6]).

    Args:
        costs: cost of each parameter.
        loads: load of each rank before, in the same unit.

    Raises:
        ValueError: ``loads`` is empty.
    """
    if not loads:
        raise ValueError("loads must have a number for each rank, got none")
    # Break ties by position and number: every rank computes the owners by itself. With a different
    # result, a rank would wait for a collective that no other rank begins.
    owners, sums = [0] * len(costs), list(loads)
    for parameter in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = min(range(len(sums)), key=sums.__getitem__)
        owners[parameter] = owner
        sums[owner] += costs[parameter]
    return owners, sums


def flat_ranges(numels: Sequence[int], world_size: int) -> list[list[tuple[int, int]]]:
    """Return parameter -> rank -> the range [start, stop) of its elements that the rank owns.

    The parameters in order form a sequence of n elements. Rank r owns the elements
    [n * r // world_size, n * (r + 1) // world_size).

    Example: 4 and 5 elements on 3 ranks: [[(0, 3), (3, 4), (4, 4)], [(0, 0), (0, 2), (2, 5)]].

    Args:
        numels: number of elements of each parameter.
        world_size: number of ranks.

    Raises:
        ValueError: ``world_size`` is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    bounds = [share(sum(numels), rank, world_size) for rank in range(world_size)]
    begins = accumulate(numels, initial=0)
    return [
        [
            (min(max(first - begin, 0), numel), min(max(last - begin, 0), numel))
            for first, last in bounds
        ]
        for begin, numel in zip(begins, numels, strict=False)
    ]
