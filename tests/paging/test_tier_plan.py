"""The tier plan: within the budget, no page left out that fits, spread over the sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy import Spec, Toy
from tierstore.errors import BudgetError
from tierstore.paging.tier_plan import Budget, Placement, Tier, place, place_all, sweep_order
from tierstore.units import SECTOR_BYTES, align_up

SIZES = st.lists(st.integers(1, 40 * SECTOR_BYTES), min_size=1, max_size=30)
BUDGETS = st.integers(0, 2**21)


def bytes_in(tier: Tier, sizes: list[int], placement: Placement) -> int:
    return sum(
        align_up(size, SECTOR_BYTES)
        for size, of_page in zip(sizes, placement.tiers, strict=True)
        if of_page is tier
    )


def host_bytes(sizes: list[int], placement: Placement) -> int:
    return bytes_in(Tier.HOST, sizes, placement) + placement.buffers * placement.buffer_bytes


@given(SIZES, BUDGETS, BUDGETS, st.none() | st.integers(2, 9))
def test_within_the_budget(sizes: list[int], host: int, device: int, buffers: int | None) -> None:
    budget = Budget(host_memory=host, device_memory=device, buffers=buffers)
    try:
        placement = place(sizes, budget)
    except BudgetError:
        largest = align_up(max(sizes), SECTOR_BYTES)
        assert host < (buffers or 2) * largest
        return
    assert bytes_in(Tier.DEVICE, sizes, placement) <= device
    assert host_bytes(sizes, placement) <= host
    moving = [s for s, t in zip(sizes, placement.tiers, strict=True) if t is not Tier.HOST]
    if moving:
        assert placement.buffers >= 2
        assert placement.buffer_bytes >= max(moving)
    if buffers is not None:
        assert (placement.buffers, Tier.HOST in placement.tiers) == (buffers, False)


@given(SIZES, BUDGETS, BUDGETS)
def test_every_page_that_fits_stays_in_memory(sizes: list[int], host: int, device: int) -> None:
    budget = Budget(host_memory=host, device_memory=device, buffers=None)
    try:
        placement = place(sizes, budget)
    except BudgetError:
        return
    streamed = [
        align_up(size, SECTOR_BYTES)
        for size, tier in zip(sizes, placement.tiers, strict=True)
        if tier is Tier.NVME
    ]
    if streamed:
        assert bytes_in(Tier.DEVICE, sizes, placement) + min(streamed) > device
        # Four buffers of the largest page keep a disk busy; the rest of the memory keeps pages.
        in_pool = 4 * align_up(max(sizes), SECTOR_BYTES)
        assert bytes_in(Tier.HOST, sizes, placement) + min(streamed) + in_pool > host or (
            placement.buffers == len(streamed)
        )


def test_the_smallest_budget_is_named() -> None:
    sizes = [5 * SECTOR_BYTES, 3 * SECTOR_BYTES, 4 * SECTOR_BYTES]
    with pytest.raises(BudgetError, match=f"host_memory={10 * SECTOR_BYTES} or more"):
        place(sizes, Budget(host_memory=10 * SECTOR_BYTES - 1, device_memory=0, buffers=None))
    smallest = place(sizes, Budget(host_memory=10 * SECTOR_BYTES, device_memory=0, buffers=None))
    assert smallest.buffers == 2
    # Pages that are streamed need buffers, which may take more than the pages.
    sizes = [5 * SECTOR_BYTES, SECTOR_BYTES]
    budget = Budget(host_memory=6 * SECTOR_BYTES, device_memory=0, buffers=None)
    with pytest.raises(BudgetError, match=f"host_memory={10 * SECTOR_BYTES} or more"):
        place_all(sizes, budget, Tier.NVME)
    assert set(place(sizes, budget).tiers) == {Tier.HOST}
    expected = f"host_memory={6 * SECTOR_BYTES} or more, which holds all pages"
    with pytest.raises(BudgetError, match=expected):
        place(sizes, Budget(host_memory=6 * SECTOR_BYTES - 1, device_memory=0, buffers=None))


def test_pages_that_rest_are_spread_over_the_sweep() -> None:
    """Reads of the other pages then overlap with steps of these."""
    page = 2**28
    budget = Budget(host_memory=24 * page, device_memory=0, buffers=None)
    tiers = place([page] * 40, budget).tiers
    assert tiers.count(Tier.HOST) == 20
    for first in range(0, 40, 4):
        assert 1 <= tiers[first : first + 4].count(Tier.HOST) <= 3


@given(SIZES, BUDGETS)
def test_all_pages_in_one_tier_or_an_error(sizes: list[int], memory: int) -> None:
    total = sum(align_up(size, SECTOR_BYTES) for size in sizes)
    for tier in (Tier.HOST, Tier.DEVICE):
        pool = 2 * align_up(max(sizes), SECTOR_BYTES)
        budget = Budget(
            host_memory=memory if tier is Tier.HOST else pool,
            device_memory=memory,
            buffers=None,
        )
        if memory < total:
            with pytest.raises(BudgetError, match=f"{tier.value}_memory={total} or more"):
                place_all(sizes, budget, tier)
        else:
            assert set(place_all(sizes, budget, tier).tiers) == {tier}


@given(st.lists(st.booleans(), max_size=60))
def test_both_kinds_of_pages_are_spread_over_the_sweep(elementwise: list[bool]) -> None:
    order = sweep_order(elementwise)
    for kind in (False, True):
        own = [page for page in order if elementwise[page] is kind]
        assert own == [page for page, found in enumerate(elementwise) if found is kind]
        for passed in range(len(order) + 1):
            steady = passed * len(own) / len(order) if order else 0
            assert abs(sum(elementwise[page] is kind for page in order[:passed]) - steady) <= 1


def test_a_sweep_steps_pages_of_both_kinds_in_turn(tmp_path: Path) -> None:
    """A step without some gradients keeps the order, and so does a resumed run."""
    momentum = {"momentum": torch.float32}
    groups: list[list[Spec]] = [
        [(f"matrix{n}", (32, 32), torch.float32, momentum, False) for n in range(4)],
        *([(f"vector{n}", (512,), torch.float32, momentum, True)] for n in range(2)),
    ]
    names = ["matrix0", "vector0", "matrix1", "matrix2", "vector1", "matrix3"]
    without = [name for name in names if name not in ("vector0", "matrix2")]
    for step, present in ((1, names), (2, without), (3, names)):
        toy = Toy(tmp_path, groups, page_bytes=8192, resume=step > 1)
        if step > 1:
            toy.store.restore()
        for name in present:
            toy.parameters[name].grad = torch.ones_like(toy.parameters[name])
        with toy.store.pages.sweep() as pages:
            assert [[shard.parameter.name for shard in page.shards] for page in pages] == [
                [name] for name in present
            ]
        toy.store.close()
