"""Simulated steps, against closed forms, bounds that no schedule beats, and a clock of our own."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import PlanError
from tierstore.tools.plan.simulator import (
    DiskRates,
    PageWork,
    RankWork,
    SimulatedStep,
    StepTimes,
    simulate,
)

MB = 10**6
FAIR = DiskRates(read=100 * MB, write=50 * MB, mixed_read=50 * MB, mixed_write=25 * MB)
"""Each direction gets half of the disk's time while both are busy."""


def alone(pages: list[PageWork], *, buffers: int, **times: Any) -> list[SimulatedStep]:
    (steps,) = simulate([RankWork(pages=pages, rates=FAIR, buffers=buffers)], StepTimes(**times))
    return steps


def last(pages: list[PageWork], *, buffers: int, steps: int = 8, **times: Any) -> SimulatedStep:
    return alone(pages, buffers=buffers, steps=steps, commit_every=None, **times)[-1]


def test_disk_bound() -> None:
    """12 pages of 10 MB: each takes 0.1 s to read and 0.2 s to write, whatever is in between."""
    pages = [PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=0.01)] * 12
    assert last(pages, buffers=4).seconds == pytest.approx(12 * 0.3, rel=0.01)


def test_compute_bound() -> None:
    pages = [PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=1.0)] * 12
    # The first page is read while the last one of the step before is written: at half speed.
    assert last(pages, buffers=4).seconds == pytest.approx(12 * 1.0 + 0.2)


def test_two_buffers_alternate() -> None:
    """A read begins when the thread asks for it: while it computes, a free buffer stays free."""
    pages = [PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=0.2)] * 12
    # Read at half speed beside the write of the page before, then stepped.
    assert last(pages, buffers=2).seconds == pytest.approx(12 * (0.2 + 0.2))
    # With one buffer nothing overlaps.
    assert last(pages, buffers=1).seconds == pytest.approx(12 * (0.1 + 0.2 + 0.2))


def test_resting_pages_move_no_byte() -> None:
    pages = [PageWork(read_bytes=0, write_bytes=10 * MB, compute_s=0.1, rests=True)] * 5
    step = last(pages, buffers=0)
    assert step.seconds == pytest.approx(0.5)
    assert step.stall_s == 0


def test_free_behind_a_long_backward() -> None:
    """Reads of the first pages and writes of the last ones hide behind the model."""
    pages = [PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=0.01)] * 4
    step = last(pages, buffers=4, model_s=10.0, prefetch_s=5.0)
    assert step.stall_s == 0
    assert step.seconds == pytest.approx(10.04)
    # The first page is read alone, the others at half speed beside the writes.
    late = last(pages, buffers=4, model_s=10.0)
    assert 0.1 + 3 * 0.1 < late.stall_s < 0.1 + 3 * 0.2


@pytest.mark.parametrize("buffers", range(2, 7))
def test_as_many_pages_hide_behind_the_model_as_there_are_buffers(buffers: int) -> None:
    """The closed form of docs/guide/planning.md: 0.1 s to read a page, 0.2 s to write it."""
    pages = [PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=0.01)] * 12
    alone_s = last(pages, buffers=buffers).seconds
    beside_s = last(pages, buffers=buffers, model_s=10.0).seconds - 10.0
    assert (buffers - 1) * 0.2 <= alone_s - beside_s <= buffers * 0.2
    earlier_s = last(pages, buffers=buffers, model_s=10.0, prefetch_s=5.0).seconds - 10.0
    assert (buffers - 1) * 0.1 - 0.02 <= beside_s - earlier_s <= buffers * 0.1


def test_a_commit_is_durable_before_the_next_step_writes() -> None:
    pages = [PageWork(read_bytes=0, write_bytes=50 * MB, compute_s=0.1, rests=True)]
    steps = alone(pages, buffers=0, steps=4, commit_every=1, commit_s=0.5)
    # 1 s to write, 0.5 s to commit; the thread computes 0.1 s meanwhile.
    assert [round(step.seconds, 6) for step in steps] == [0.1, 1.5, 1.5, 1.5]
    # Step 3 waits for the write of the page that it changes, step 4 for the rest of the commit.
    every_second = alone(pages, buffers=0, steps=4, commit_every=2, commit_s=0.5)
    assert [round(step.seconds, 6) for step in every_second] == [0.1, 0.1, 1.1, 0.4]


WORK = st.builds(
    PageWork,
    read_bytes=st.integers(0, 100 * MB),
    write_bytes=st.integers(1, 100 * MB),
    compute_s=st.floats(0, 2),
    rests=st.just(False),
) | st.builds(
    PageWork,
    read_bytes=st.just(0),
    write_bytes=st.integers(1, 100 * MB),
    compute_s=st.floats(0, 2),
    rests=st.just(True),
)


@given(
    pages=st.lists(WORK, min_size=1, max_size=12),
    buffers=st.integers(1, 6),
    commit_every=st.none() | st.integers(1, 3),
    model_s=st.floats(0, 5),
    share=st.floats(0, 1),
)
def test_no_promise_of_the_order_is_broken(
    pages: list[PageWork], buffers: int, commit_every: int | None, model_s: float, share: float
) -> None:
    steps = alone(
        pages,
        buffers=buffers,
        steps=5,
        model_s=model_s,
        prefetch_s=share * model_s,
        commit_every=commit_every,
    )
    spans = sorted(
        {span for step in steps for span in step.spans}, key=lambda span: (span.start, span.stop)
    )
    computed = [span for span in spans if span.lane in ("compute", "model")]
    # One thread.
    assert all(one.stop <= other.start + 1e-9 for one, other in pairwise(computed))
    for number in range(len(pages)):
        events = [span for span in spans if span.page == number]
        # A page is read, stepped and written in turn, and not read again before it is written.
        assert all(one.stop <= other.start + 1e-9 for one, other in pairwise(events))
    # No more bytes than the disk can move.
    first, end = steps[0].start, max([span.stop for span in spans], default=0.0)
    moved = sum(
        pages[span.page].read_bytes / FAIR.read
        if span.lane == "read"
        else pages[span.page].write_bytes / FAIR.write
        for span in spans
        if span.lane in ("read", "write")
    )
    assert moved <= end - first + 1e-6
    # No step is shorter than what the thread does, and the waits make up the rest.
    own = model_s + sum(page.compute_s for page in pages)
    for step in steps:
        assert step.seconds == pytest.approx(own + step.stall_s)
    # Memory: pages between the start of their read and the end of their write.
    held = [
        (span.start, 1) if span.lane == "read" else (span.stop, -1)
        for span in spans
        if span.lane in ("read", "write") and not pages[span.page].rests
    ]
    count = most = 0
    for _, change in sorted(held):
        count += change
        most = max(most, count)
    assert most <= buffers


@given(st.lists(WORK, min_size=2, max_size=10), st.integers(1, 5))
def test_another_buffer_does_not_hurt_much(pages: list[PageWork], buffers: int) -> None:
    """More reads ahead delay writes: by no more than what the disk moves in a step."""
    fewer, more = (last(pages, buffers=count).seconds for count in (buffers, buffers + 1))
    disk = sum(p.read_bytes / FAIR.read + p.write_bytes / FAIR.write for p in pages if not p.rests)
    assert more <= fewer + disk + 1e-6


def test_nonsense() -> None:
    page = PageWork(read_bytes=1, write_bytes=1, compute_s=0)
    with pytest.raises(PlanError, match="need 1 buffers or more, got 0"):
        alone([page], buffers=0, steps=1)
    with pytest.raises(PlanError, match="need 3 buffers or more, got 2"):
        alone([page], buffers=2, steps=1, window=3)
    ranks = [RankWork(pages=[page] * count, rates=FAIR, buffers=1) for count in (1, 2)]
    with pytest.raises(PlanError, match="same number of pages"):
        simulate(ranks, StepTimes(steps=1))
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="must be above 0"):
            DiskRates(read=rate, write=1, mixed_read=1, mixed_write=1)


def together(ranks: list[RankWork], **times: Any) -> list[float]:
    """Return the seconds of the last step of each rank."""
    return [steps[-1].seconds for steps in simulate(ranks, StepTimes(steps=6, **times))]


RESTING = PageWork(read_bytes=0, write_bytes=1, compute_s=1.0, rests=True)


def test_pages_pass_the_gpu_in_a_pipeline() -> None:
    """Copies in, computation and copies out overlap; the slowest of them decides."""
    page = PageWork(read_bytes=0, write_bytes=1, compute_s=1.0, copy_in_s=0.4, copy_out_s=0.3)
    pages = [replace(page, rests=True)] * 10
    step = last(pages, buffers=0, on_gpu=True)
    # The first copy in is not hidden. The last copy out hides in the next step.
    assert step.seconds == pytest.approx(0.4 + 10 * 1.0)
    slow = [replace(one, copy_in_s=2.0) for one in pages]
    assert last(slow, buffers=0, on_gpu=True).seconds == pytest.approx(10 * 2.0 + 1.0)
    # On the CPU, the thread does all of it.
    assert last([RESTING] * 10, buffers=0).seconds == pytest.approx(10.0)


def test_threads_check_and_seal_beside_the_computation() -> None:
    """Checksums of the next page are compared while this one is stepped."""
    page = PageWork(read_bytes=MB, write_bytes=MB, compute_s=1.0, check_s=0.5, seal_s=0.25)
    on_gpu = last([page] * 10, buffers=4, on_gpu=True).seconds
    on_cpu = last([page] * 10, buffers=4).seconds
    assert on_gpu == pytest.approx(0.5 + 10 * 1.0, rel=0.05)
    assert on_cpu == pytest.approx(0.5 + 10 * 1.0, rel=0.05)
    slow = replace(page, check_s=2.0)
    assert last([slow] * 10, buffers=4).seconds == pytest.approx(10 * 2.0 + 1.0, rel=0.05)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_matrices_are_exchanged_beside_the_computation(on_gpu: bool) -> None:
    pages = [replace(RESTING, exchange_s=0.2)] * 10
    rank = RankWork(pages=pages, rates=FAIR, buffers=0)
    times = {"commit_every": None, "window": 3, "on_gpu": on_gpu}
    # Only the first gather and the last scatter are not hidden.
    assert together([rank, rank], **times) == [pytest.approx(0.2 + 10 * 1.0 + 0.2)] * 2
    # A network slower than the computation carries gathers and scatters in turn.
    slow = replace(rank, pages=[replace(page, exchange_s=2.0) for page in pages])
    assert together([slow, slow], **times)[0] == pytest.approx(20 * 2.0 + 1.0, rel=0.06)
    # One page at a time: nothing overlaps.
    times["window"] = 1
    assert together([rank, rank], **times)[0] == pytest.approx(10 * (0.2 + 1.0 + 0.2))


def test_all_ranks_wait_for_the_slowest() -> None:
    pages = [PageWork(read_bytes=10 * MB, write_bytes=10 * MB, compute_s=0.01, exchange_s=0.001)]
    fair = RankWork(pages=pages * 12, rates=FAIR, buffers=4)
    half = DiskRates(read=50 * MB, write=25 * MB, mixed_read=25 * MB, mixed_write=12.5 * MB)
    slow = replace(fair, rates=half)
    times = {"commit_every": None, "window": 3}
    (alone_s, _), (beside_s, slow_s) = (
        together([fair, fair], **times),
        together([fair, slow], **times),
    )
    assert alone_s == pytest.approx(12 * 0.3, rel=0.05)
    assert beside_s == pytest.approx(slow_s, rel=0.05)
    assert slow_s == pytest.approx(12 * 0.6, rel=0.05)
    # Without anything to exchange each goes its own way.
    apart = [replace(page, exchange_s=0.0) for page in fair.pages]
    fast_s, slow_s = together([replace(fair, pages=apart), replace(slow, pages=apart)], **times)
    assert slow_s == pytest.approx(2 * fast_s, rel=0.05)


def test_replicas_get_parameters_behind_the_computation() -> None:
    rank = RankWork(pages=[replace(RESTING, spread_s=0.5)] * 10, rates=FAIR, buffers=0)
    found = together([rank, rank], commit_every=None, window=3, on_gpu=True)
    assert found[0] == pytest.approx(10 * 1.0 + 3 * 0.5, rel=0.06)


def test_a_rank_that_owns_nothing_of_a_page_meets_the_others() -> None:
    empty = PageWork(read_bytes=0, write_bytes=0, compute_s=0.0)
    page = PageWork(read_bytes=MB, write_bytes=MB, compute_s=1.0, exchange_s=0.1)
    ranks = [
        RankWork(pages=[page, empty, page], rates=FAIR, buffers=4),
        RankWork(pages=[empty, page, empty], rates=FAIR, buffers=4),
    ]
    first, second = together(ranks, commit_every=1, window=3)
    assert first == pytest.approx(second, rel=0.2)
    assert 2.0 < first < 3.5
