from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.layout.ownership import balanced_owners, flat_ranges
from tierstore.layout.sharding import share

costs = st.lists(st.integers(0, 20), max_size=12)
loads = st.lists(st.integers(0, 30), min_size=1, max_size=5)


def test_owners_by_hand() -> None:
    # 9 to rank 0; 7 to rank 1; both 4s to rank 2, which then has more than rank 1; 2 to rank 1.
    assert balanced_owners([4, 9, 4, 2, 7], [0, 0, 0]) == ([2, 0, 2, 1, 1], [9, 9, 8])


def test_equal_parameters_go_round() -> None:
    assert balanced_owners([1] * 5, [0, 0, 0]) == ([0, 1, 2, 0, 1], [2, 2, 1])


def test_earlier_loads_count() -> None:
    owners, sums = balanced_owners([5, 5], [3, 0])
    assert (owners, sums) == ([1, 0], [8, 5])
    assert balanced_owners([1], sums) == ([1], [8, 6])


@given(costs, loads)
def test_each_parameter_goes_to_the_rank_with_the_least_load(
    costs: list[int], loads: list[int]
) -> None:
    before = list(loads)
    owners, sums = balanced_owners(costs, loads)
    assert loads == before
    # Undone from the last to the first: what was given last went to the lowest of the least.
    for cost, minus in sorted(((cost, -i) for i, cost in enumerate(costs))):
        sums[owners[-minus]] -= cost
        assert owners[-minus] == sums.index(min(sums))
    assert sums == before


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 8))
def test_flat_ranges_take_each_element_in_turn(numels: list[int], world_size: int) -> None:
    elements = [(i, position) for i, numel in enumerate(numels) for position in range(numel)]
    ranges = flat_ranges(numels, world_size)
    assert [len(rank_ranges) for rank_ranges in ranges] == [world_size] * len(numels)
    found = [
        [(i, position) for i in range(len(numels)) for position in range(*ranges[i][rank])]
        for rank in range(world_size)
    ]
    assert list(itertools.chain.from_iterable(found)) == elements
    assert [len(part) for part in found] == [
        len(elements) * (rank + 1) // world_size - len(elements) * rank // world_size
        for rank in range(world_size)
    ]
    for numel, rank_ranges in zip(numels, ranges, strict=True):
        assert all(0 <= start <= stop <= numel for start, stop in rank_ranges)


def test_flat_ranges_by_hand() -> None:
    assert flat_ranges([4, 0, 5, 1], 3) == [
        [(0, 3), (3, 4), (4, 4)],
        [(0, 0), (0, 0), (0, 0)],
        [(0, 0), (0, 2), (2, 5)],
        [(0, 0), (0, 0), (0, 1)],
    ]


def test_shares_beyond_32_bits() -> None:
    assert share(2**40 + 1, 2, 3) == (733007751851, 2**40 + 1)


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="loads must have a number for each rank"):
        balanced_owners([1], [])
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        flat_ranges([1], 0)
