"""The formula of a step, against schedules worked out by hand and bounds that none beats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import PlanError
from tierstore.tools.plan.formula import (
    LANES,
    DiskRates,
    PageWork,
    RankWork,
    StepFormula,
    StepRules,
    StepTime,
)

MB = 10**6
FAIR = DiskRates(read=100 * MB, write=50 * MB, mixed_read=50 * MB, mixed_write=25 * MB)
"""Each direction gets half of the disk's time while both are busy."""

PAGE = PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=0.01)
"""Takes 0.1 s to read and 0.2 s to write."""
RESTING = PageWork(read_bytes=0, write_bytes=1, compute_s=1.0, rests=True)


def alone(
    pages: list[PageWork],
    *,
    buffers: int,
    model_s: float = 0.0,
    commit_every: int | None = None,
    **rules: Any,
) -> StepTime:
    rank = RankWork(pages=pages, rates=FAIR, buffers=buffers)
    return StepFormula([rank], StepRules(commit_every=commit_every, **rules)).step(model_s)


def together(ranks: list[RankWork], **rules: Any) -> float:
    """Return the seconds of a step without a commit."""
    return StepFormula(ranks, StepRules(commit_every=None, **rules)).step(0.0).seconds


def test_disk_bound() -> None:
    """12 pages of 10 MB: each takes 0.1 s to read and 0.2 s to write, whatever is in between."""
    step = alone([PAGE] * 12, buffers=4)
    assert step.seconds == pytest.approx(12 * 0.3, rel=0.05)
    assert step.resident_s == pytest.approx(12 * 0.01)
    assert step.lanes["read"] == pytest.approx(2 * 12 * 0.1)  # At half speed.
    assert step.lanes["write"] == pytest.approx(12 * 0.3)


def test_compute_bound() -> None:
    step = alone([replace(PAGE, compute_s=1.0)] * 12, buffers=4)
    # The first page is waited for.
    assert step.seconds == pytest.approx(12 * 1.0 + 0.1)
    assert step.exposed_s == pytest.approx(0.1)


def test_two_buffers_alternate() -> None:
    """A read begins when the thread asks for it: while it computes, a free buffer stays free."""
    pages = [replace(PAGE, compute_s=0.2)] * 12
    # Read at half speed beside the write of the page before, then stepped.
    assert alone(pages, buffers=2).seconds == pytest.approx(12 * (0.2 + 0.2), rel=0.05)
    # With one buffer nothing overlaps.
    one = RankWork(pages=pages, rates=FAIR, buffers=1)
    assert together([one]) >= 12 * (0.1 + 0.2 + 0.2)


def test_resting_pages_move_no_byte() -> None:
    step = alone([replace(RESTING, compute_s=0.1)] * 5, buffers=0)
    assert step.seconds == step.resident_s == pytest.approx(0.5)
    assert set(step.lanes) == {"compute"}


def test_free_behind_a_long_backward() -> None:
    """Reads of the first pages and writes of the last ones hide behind the model."""
    step = alone([PAGE] * 4, buffers=4, model_s=10.0)
    assert step.seconds == pytest.approx(10.04)
    assert step.lanes["model"] == 10.0


@pytest.mark.parametrize("buffers", range(3, 7))
def test_as_many_pages_hide_behind_the_model_as_there_are_buffers(buffers: int) -> None:
    """The closed form of docs/guide/planning.md: 0.1 s to read a page, 0.2 s to write it."""
    alone_s = alone([PAGE] * 12, buffers=buffers).seconds
    beside_s = alone([PAGE] * 12, buffers=buffers, model_s=10.0).seconds - 10.0
    assert alone_s - beside_s == pytest.approx(buffers * 0.3, abs=0.15)


def test_groups_of_pages_follow_each_other() -> None:
    """Computation of one group hides of the next group what the buffers hold."""
    slow = [replace(PAGE, compute_s=1.0)] * 10
    fast = [replace(PAGE, phase=1, compute_s=0.0)] * 20
    step = alone([*slow, *fast], buffers=4)
    # 3 pages of the second group are read early, and 4 are written in the next step.
    assert step.seconds == pytest.approx(10 * 1.0 + 20 * 0.3 - 3 * 0.1 - 4 * 0.2, abs=0.2)
    mixed = [
        replace(one, phase=0) for pair in zip(slow, fast, fast[10:], strict=False) for one in pair
    ]
    assert alone(mixed, buffers=4).seconds == pytest.approx(10 * 1.0, rel=0.05)


def test_a_commit_is_durable_before_the_next_step_writes() -> None:
    page = PageWork(read_bytes=0, write_bytes=50 * MB, compute_s=0.1, rests=True)
    # 1 s to write, 0.5 s to commit; the thread computes 0.1 s meanwhile.
    assert alone([page], buffers=0, commit_every=1, commit_s=0.5).seconds == pytest.approx(1.5)
    # The two steps from one commit to the next take as long.
    two = alone([page], buffers=0, commit_every=2, commit_s=0.5)
    assert two.seconds == pytest.approx(1.5 / 2)
    # With more steps in between, only the first waits, for the writes of pages that it changes.
    ten = alone([page] * 10, buffers=0, commit_every=10, commit_s=0.5)
    assert ten.seconds == pytest.approx((10 * 1.0 + (10 * 1.0 - 2 * 1.0)) / 10, abs=0.06)
    # Behind a long model all of it hides.
    hidden = alone([page], buffers=0, commit_every=1, commit_s=0.5, model_s=5.0)
    assert hidden.seconds == hidden.resident_s == pytest.approx(5.1)


@pytest.mark.parametrize("model_s", [0.0, 0.1, 0.2])
def test_what_is_written_beside_the_model_is_not_durable_before_it(model_s: float) -> None:
    """A page takes 0.1 s to read and 0.1 s to write; the next step waits for its commit."""
    rates = DiskRates(read=100 * MB, write=100 * MB, mixed_read=100 * MB, mixed_write=100 * MB)
    rank = RankWork(pages=[replace(PAGE, compute_s=0.0)], rates=rates, buffers=3)
    step = StepFormula([rank], StepRules(commit_every=1)).step(model_s)
    assert step.seconds == pytest.approx(0.2)


def test_a_commit_adds_parameters() -> None:
    page = replace(PAGE, compute_s=1.0, added_bytes=5 * MB, add_s=0.25)
    pages = [page] * 4
    without = alone(pages, buffers=4)
    every_second = alone(pages, buffers=4, commit_every=2)
    assert every_second.seconds - without.seconds == pytest.approx(4 * 0.25 / 2, rel=0.2)
    assert every_second.lanes["copy out"] == pytest.approx(4 * 0.25 / 2)


SECONDS = st.floats(0, 2)
WORK = st.builds(
    PageWork,
    phase=st.just(0),
    read_bytes=st.integers(0, 100 * MB),
    write_bytes=st.integers(1, 100 * MB),
    compute_s=SECONDS,
    check_s=SECONDS,
    seal_s=SECONDS,
    copy_in_s=SECONDS,
    copy_out_s=SECONDS,
    exchange_s=SECONDS,
    spread_s=SECONDS,
) | st.builds(
    PageWork,
    phase=st.just(1),
    read_bytes=st.just(0),
    write_bytes=st.integers(1, 100 * MB),
    compute_s=SECONDS,
    rests=st.just(True),
)


@settings(deadline=None)
@given(
    pages=st.lists(WORK, min_size=1, max_size=12),
    buffers=st.integers(3, 6),
    commit_every=st.none() | st.integers(1, 3),
    model_s=st.floats(0, 5),
    window=st.sampled_from([1, 3]),
    threads=st.integers(1, 4),
)
def test_no_step_beats_its_lanes(
    pages: list[PageWork],
    buffers: int,
    commit_every: int | None,
    model_s: float,
    window: int,
    threads: int,
) -> None:
    rules = {"commit_every": commit_every, "window": window, "checksum_threads": threads}
    step = alone(pages, buffers=buffers, model_s=model_s, **rules)
    assert list(step.lanes) == [lane for lane in LANES if lane in step.lanes]
    busy = dict.fromkeys(LANES, 0.0) | dict(step.lanes)
    network = busy["gather"] + busy["scatter"] + busy["spread"]
    one_at_a_time = [busy["model"] + busy["compute"], network]
    one_at_a_time += [busy[lane] for lane in ("check", "copy in", "copy out")]
    assert step.seconds >= max(one_at_a_time) - 1e-6
    # No more bytes than the disk can move.
    share = 1 / commit_every if commit_every else 0.0
    moved = sum(
        page.read_bytes / FAIR.read + (share if page.rests else 1) * page.write_bytes / FAIR.write
        for page in pages
    )
    assert step.seconds >= moved - 1e-6
    assert step.seconds >= step.resident_s - 1e-6 >= model_s - 1e-6


@settings(deadline=None)
@given(st.lists(WORK, min_size=2, max_size=10), st.integers(2, 5), st.floats(0, 5))
def test_more_of_anything_does_not_hurt(
    pages: list[PageWork], buffers: int, model_s: float
) -> None:
    fewer = alone(pages, buffers=buffers, model_s=model_s)
    assert alone(pages, buffers=buffers + 1, model_s=model_s).seconds <= fewer.seconds + 1e-9
    threads = alone(pages, buffers=buffers, model_s=model_s, checksum_threads=2)
    assert threads.seconds <= fewer.seconds + 1e-9
    twice = RankWork(pages=pages, rates=FAIR.scaled(2), buffers=buffers)
    faster = StepFormula([twice], StepRules(commit_every=None)).step(model_s)
    assert faster.seconds <= fewer.seconds + 1e-9
    # A longer model makes the step longer, and hides no less.
    later = alone(pages, buffers=buffers, model_s=model_s + 1)
    assert fewer.seconds <= later.seconds + 1e-9
    assert later.exposed_s <= fewer.exposed_s + 1e-9


def test_nonsense() -> None:
    page = PageWork(read_bytes=1, write_bytes=1, compute_s=0)
    with pytest.raises(PlanError, match="need 1 buffers or more, got 0"):
        alone([page], buffers=0)
    with pytest.raises(PlanError, match="need 3 buffers or more, got 2"):
        alone([page], buffers=2, window=3)
    ranks = [RankWork(pages=[page] * count, rates=FAIR, buffers=1) for count in (1, 2)]
    with pytest.raises(PlanError, match="same number of pages"):
        together(ranks)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="must be above 0"):
            DiskRates(read=rate, write=1, mixed_read=1, mixed_write=1)


def test_pages_pass_the_gpu_in_a_pipeline() -> None:
    """Copies in, computation and copies out overlap; the slowest of them decides."""
    pages = [replace(RESTING, copy_in_s=0.4, copy_out_s=0.3)] * 10
    step = alone(pages, buffers=0, on_gpu=True)
    # The first copy in is not hidden. The last copy out hides in the next step.
    assert step.seconds == pytest.approx(0.4 + 10 * 1.0)
    slow = [replace(one, copy_in_s=2.0) for one in pages]
    assert alone(slow, buffers=0, on_gpu=True).seconds == pytest.approx(10 * 2.0 + 1.0)
    back = [replace(one, copy_out_s=2.0) for one in pages]
    assert alone(back, buffers=0, on_gpu=True).seconds == pytest.approx(10 * 2.0, rel=0.05)


def test_threads_check_and_seal_beside_the_computation() -> None:
    """Checksums of the next page are compared while this one is stepped."""
    page = PageWork(read_bytes=MB, write_bytes=MB, compute_s=1.0, check_s=0.5, seal_s=0.25)
    assert alone([page] * 10, buffers=4).seconds == pytest.approx(0.5 + 10 * 1.0, rel=0.01)
    slow = replace(page, check_s=2.0)
    assert alone([slow] * 10, buffers=4).seconds == pytest.approx(10 * 2.0 + 1.0, rel=0.06)
    # As many at once as there are threads.
    halved = alone([replace(page, check_s=3.0)] * 10, buffers=9, checksum_threads=2)
    assert halved.seconds == pytest.approx(10 * 1.5 + 3.0, rel=0.01)
    assert halved.lanes["check"] == pytest.approx(10 * 1.5)


def test_matrices_are_exchanged_beside_the_computation() -> None:
    pages = [replace(RESTING, exchange_s=0.2)] * 10
    rank = RankWork(pages=pages, rates=FAIR, buffers=0)
    # Only the first gather and the last scatter are not hidden.
    assert together([rank, rank], window=3) == pytest.approx(0.2 + 10 * 1.0 + 0.2)
    # A network slower than the computation carries gathers and scatters in turn.
    slow = replace(rank, pages=[replace(page, exchange_s=2.0) for page in pages])
    assert together([slow, slow], window=3) == pytest.approx(20 * 2.0 + 1.0)
    # One page at a time: nothing overlaps.
    assert together([rank, rank], window=1) == pytest.approx(10 * (0.2 + 1.0 + 0.2))


def test_all_ranks_wait_for_the_slowest() -> None:
    fair = RankWork(pages=[replace(PAGE, exchange_s=0.001)] * 12, rates=FAIR, buffers=4)
    slow = replace(fair, rates=FAIR.scaled(0.5))
    assert together([fair, fair], window=3) == pytest.approx(12 * 0.3, rel=0.05)
    assert together([fair, slow], window=3) == pytest.approx(12 * 0.6, rel=0.05)
    # Each page is computed by another rank, while the other one waits for it.
    here, there = replace(RESTING, exchange_s=0.01), replace(RESTING, compute_s=0.1)
    turns = [
        RankWork(pages=pages * 5, rates=FAIR, buffers=0)
        for pages in ([here, there], [replace(there, exchange_s=0.01), here])
    ]
    assert together(turns, window=3) == pytest.approx(5 * (1.0 + 1.0), rel=0.05)


def test_replicas_get_parameters_behind_the_computation() -> None:
    rank = RankWork(pages=[replace(RESTING, spread_s=0.5)] * 10, rates=FAIR, buffers=0)
    assert together([rank, rank], window=3, on_gpu=True) == pytest.approx(10 * 1.0 + 3 * 0.5)


def test_a_rank_that_owns_nothing_of_a_page_meets_the_others() -> None:
    empty = PageWork(read_bytes=0, write_bytes=0, compute_s=0.0)
    page = PageWork(read_bytes=MB, write_bytes=MB, compute_s=1.0, exchange_s=0.1)
    ranks = [
        RankWork(pages=[page, empty, page], rates=FAIR, buffers=4),
        RankWork(pages=[empty, page, empty], rates=FAIR, buffers=4),
    ]
    assert together(ranks, window=3) == pytest.approx(3 * 1.0 + 0.2, abs=0.15)
