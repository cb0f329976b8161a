"""Subgroups found in written pages: those of the run, without the parameters that it has lost."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.test_ownership import PAGE_BYTES, groups, make_parameter
from tierstore.errors import RunMismatchError
from tierstore.layout.chunks import Chunk
from tierstore.layout.ownership import SharedParameter, SharedSubgroup, partition_ranks
from tierstore.layout.sharding import whole_on
from tierstore.layout.subgroups import ParameterShard, Subgroup
from tierstore.layout.written import RankPages, written_subgroups


def pages_of(subgroups: list[SharedSubgroup], rank: int, lost: Collection[str]) -> RankPages:
    """Return the pages of a rank as its layout file has them, but for those of lost parameters."""
    parts = [subgroup.of(rank) for subgroup in subgroups]
    pages = [
        Subgroup(part.group, tuple(shard for shard in part.shards if shard.chunks))
        for part in parts
    ]
    return [
        (number, page)
        for number, page in enumerate(page for page in pages if page.shards)
        if not {shard.parameter.name for shard in page.shards} <= set(lost)
    ]


@settings(max_examples=200)
@given(groups(), st.sets(st.integers(0, 7)))
def test_every_rank_keeps_its_pages(
    drawn: tuple[int, list[SharedParameter]], lost_numbers: set[int]
) -> None:
    world_size, parameters = drawn
    lost = {f"layers.{number}" for number in lost_numbers}
    subgroups = partition_ranks(3, parameters, PAGE_BYTES, world_size)
    rank_pages = [pages_of(subgroups, rank, lost) for rank in range(world_size)]
    kept = {p.spec.name: p for p in parameters if p.spec.name not in lost}
    found = written_subgroups(kept, rank_pages)
    for rank, pages in enumerate(rank_pages):
        numbers = [each.pages[rank] for each in found if each.pages[rank] is not None]
        assert numbers == [number for number, _ in pages]
        by_number = dict(pages)
        for each in found:
            part = [shard for shard in each.shared.of(rank).shards if shard.chunks]
            number = each.pages[rank]
            written = [] if number is None else by_number[number].shards
            assert part == [shard for shard in written if shard.parameter.name in kept]
    # The parts of what a rule needs together are stepped together.
    whole = [p.spec for p in kept.values() if not p.spec.elementwise]
    parts = {
        (spec.name, row // (spec.unit or spec.shape[0]), number)
        for number, each in enumerate(found)
        for rank in range(world_size)
        for shard in each.shared.of(rank).shards
        for chunk in shard.chunks
        for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        if (spec := shard.parameter) in whole
    }
    assert len(parts) == len({(name, unit) for name, unit, _ in parts})
    # The places in the local tensors are those of the run.
    for rank in range(world_size):
        before = dict(itertools.chain(*(s.places(rank).items() for s in subgroups)))
        after = dict(itertools.chain(*(e.shared.places(rank).items() for e in found)))
        assert after == {key: place for key, place in before.items() if key[0] in kept}


def test_pages_that_share_a_parameter_are_one_subgroup() -> None:
    """The example of the docstring."""
    everyone = whole_on([0, 1])
    names = {name: make_parameter(name, (4, 4), everyone) for name in "abcde"}

    def page(*members: tuple[str, int]) -> Subgroup:
        shards = (
            ParameterShard(names[name].spec, (Chunk((row, 0), (2, 4)),)) for name, row in members
        )
        return Subgroup(0, tuple(shards))

    rank_pages: list[RankPages] = [
        [(0, page(("a", 0), ("b", 0))), (2, page(("c", 0)))],
        [(0, page(("b", 2), ("d", 0))), (1, page(("e", 0)))],
    ]
    found = written_subgroups(names, rank_pages)
    assert [each.pages for each in found] == [[0, 0], [2, 1]]
    assert ["".join(s.spec.name for s in each.shared.shards) for each in found] == ["abd", "ce"]
    # b is in the second page of one rank and the first of the other, c the other way round.
    crossed: list[RankPages] = [
        [(0, page(("b", 0))), (1, page(("c", 0)))],
        [(0, page(("c", 2))), (1, page(("b", 2)))],
    ]
    with pytest.raises(RunMismatchError, match="orders that do not fit"):
        written_subgroups(names, crossed)
    other = {"b": make_parameter("b", (4, 4), whole_on([1]))}
    with pytest.raises(RunMismatchError, match="rank 0 does not own"):
        written_subgroups(other, [rank_pages[0][:1], []])
