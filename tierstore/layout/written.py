"""Subgroups of all ranks, found in the pages that each rank has written.

A run that has lost parameters keeps its pages, which the remaining parameters alone would fill in
another way. No page says to which page of another rank it belongs: pages that hold parts of what
the rule needs together do, a unit of a parameter or all of it, and the order of pages is that of
each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from tierstore.errors import RunMismatchError
from tierstore.layout.chunks import Chunk
from tierstore.layout.ownership import SharedParameter, SharedShard, SharedSubgroup
from tierstore.layout.sharding import HeldChunk
from tierstore.layout.subgroups import ParameterShard, Subgroup


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShard(SharedShard):
    """A shard whose chunks were read from layout files. A range counts owned elements."""

    written: tuple[tuple[HeldChunk, ...], ...]
    """Rank -> the chunks that it owns."""

    @override
    def owned(self, rank: int) -> tuple[HeldChunk, ...]:
        return self.written[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSubgroup:
    """A subgroup, and the page of each rank that holds its part."""

    shared: SharedSubgroup
    pages: Sequence[int | None]
    """Rank -> number of its page; None for a rank that owns nothing of the subgroup."""


_Places = dict[tuple[str, int], dict[int, int]]
"""Name and number of a unit -> rank -> position of its page."""

RankPages = Sequence[tuple[int, Subgroup]]
"""The pages of one rank in order, each with its number."""


def written_subgroups(
    parameters: Mapping[str, SharedParameter], rank_pages: Sequence[RankPages]
) -> list[WrittenSubgroup]:
    """Return subgroups in which every rank has its pages, in their order.

    Example: rank 0 has the pages [a, b] and [c], and rank 1 has [b, d] and [e]. The parts of b are
    stepped together, if it is not elementwise, so the subgroups are [a, b, d] and [c, e].

    Args:
        parameters: the parameters by name, in the order of the groups. Pages may have shards of
            others, which are left out.
        rank_pages: rank -> its pages.

    Raises:
        RunMismatchError: a rank does not own what it has written, or the pages of the ranks are in
            orders that do not fit together.
    """
    places: _Places = {}
    for rank, pages in enumerate(rank_pages):
        for position, (_, subgroup) in enumerate(pages):
            for shard in subgroup.shards:
                parameter = parameters.get(shard.parameter.name)
                if parameter is not None and not parameter.spec.elementwise:
                    for unit in _units(shard):
                        places.setdefault(unit, {})[rank] = position
    heads = [0] * len(rank_pages)
    found = []
    while waiting := [rank for rank, pages in enumerate(rank_pages) if heads[rank] < len(pages)]:
        group = min(rank_pages[rank][heads[rank]][1].group for rank in waiting)
        ranks: set[int] = set()
        for rank in waiting:
            if rank not in ranks and rank_pages[rank][heads[rank]][1].group == group:
                ranks |= _stepped_with(rank, heads, rank_pages, places)
        if not ranks:
            raise _other_pages("the pages of the ranks are in orders that do not fit together")
        chosen = {rank: rank_pages[rank][heads[rank]] for rank in sorted(ranks)}
        found.append(_merged(group, parameters, chosen, len(rank_pages)))
        for rank in ranks:
            heads[rank] += 1
    return found


def _stepped_with(
    first: int,
    heads: Sequence[int],
    rank_pages: Sequence[RankPages],
    places: _Places,
) -> set[int]:
    """Return the ranks whose next pages must be in one subgroup with the next page of a rank.

    Empty if an earlier page of another rank has to come first.
    """
    ranks, new = {first}, [first]
    while new:
        rank = new.pop()
        _, subgroup = rank_pages[rank][heads[rank]]
        for unit in itertools.chain.from_iterable(map(_units, subgroup.shards)):
            for other, position in places.get(unit, {}).items():
                if position != heads[other]:
                    return set()
                if other not in ranks:
                    ranks.add(other)
                    new.append(other)
    return ranks


def _units(shard: ParameterShard) -> set[tuple[str, int]]:
    """Return the name and number of each unit that a shard has a part of."""
    spec = shard.parameter
    if spec.unit is None:
        return {(spec.name, 0)} if shard.chunks else set()
    return {
        (spec.name, row // spec.unit)
        for chunk in shard.chunks
        for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
    }


def _merged(
    group: int,
    parameters: Mapping[str, SharedParameter],
    pages: Mapping[int, tuple[int, Subgroup]],
    world_size: int,
) -> WrittenSubgroup:
    """Return the subgroup of these pages, one page of some ranks each."""
    chunks = {
        (shard.parameter.name, rank): shard.chunks
        for rank, (_, subgroup) in pages.items()
        for shard in subgroup.shards
    }
    names = {name for name, _ in chunks}
    shards = []
    for parameter in (parameter for name, parameter in parameters.items() if name in names):
        written = tuple(
            tuple(
                _held(parameter, rank, chunk)
                for chunk in chunks.get((parameter.spec.name, rank), ())
            )
            for rank in range(world_size)
        )
        ranges = tuple((0, sum(held.whole.numel for held in owned)) for owned in written)
        shards.append(WrittenShard(parameter=parameter, ranges=ranges, written=written))
    numbers = [pages[rank][0] if rank in pages else None for rank in range(world_size)]
    return WrittenSubgroup(shared=SharedSubgroup(group=group, shards=tuple(shards)), pages=numbers)


def _held(parameter: SharedParameter, rank: int, chunk: Chunk) -> HeldChunk:
    """Return a chunk that a rank owns with its place in the local tensor."""
    spec, holding = parameter.spec, parameter.holding
    if holding.is_whole and rank in holding.ranks:
        return HeldChunk(whole=chunk, local=chunk)
    for owned in [] if holding.is_whole else holding.owned(spec.shape, rank, spec.column_block):
        starts = [a - b for a, b in zip(chunk.offsets, owned.whole.offsets, strict=True)]
        ends = [start + size for start, size in zip(starts, chunk.sizes, strict=True)]
        if all(start >= 0 for start in starts) and all(
            end <= size for end, size in zip(ends, owned.whole.sizes, strict=True)
        ):
            offsets = (a + b for a, b in zip(starts, owned.local.offsets, strict=True))
            return HeldChunk(whole=chunk, local=Chunk(tuple(offsets), chunk.sizes))
    raise _other_pages(f"rank {rank} does not own what it has written of {spec.name!r}")


def _other_pages(what: str) -> RunMismatchError:
    return RunMismatchError(
        f"{what}: restore the former placements, cuts and partition, or begin a new run with "
        "restore(checkpoint=OUT) after `tierstore checkpoint RUN OUT`"
    )
