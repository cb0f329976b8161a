"""Simulated steps, against closed forms, bounds that no schedule beats, and a clock of our own."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import PlanError
from tierstore.plan.simulator import DiskRates, PageWork, SimulatedStep, simulate

MB = 10**6
FAIR = DiskRates(read=100 * MB, write=50 * MB, mixed_read=50 * MB, mixed_write=25 * MB)
"""Each direction gets half of the disk's time while both are busy."""


def last(pages: list[PageWork], *, buffers: int, steps: int = 8, **options: float) -> SimulatedStep:
    return simulate(pages, FAIR, buffers=buffers, steps=steps, commit_every=None, **options)[-1]


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


def test_a_commit_is_durable_before_the_next_step_writes() -> None:
    pages = [PageWork(read_bytes=0, write_bytes=50 * MB, compute_s=0.1, rests=True)]
    steps = simulate(pages, FAIR, buffers=0, steps=4, commit_every=1, commit_s=0.5)
    # 1 s to write, 0.5 s to commit; the thread computes 0.1 s meanwhile.
    assert [round(step.seconds, 6) for step in steps] == [0.1, 1.5, 1.5, 1.5]
    # Step 3 waits for the write of the page that it changes, step 4 for the rest of the commit.
    every_second = simulate(pages, FAIR, buffers=0, steps=4, commit_every=2, commit_s=0.5)
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
    steps = simulate(
        *(pages, FAIR),
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
    with pytest.raises(PlanError, match="at least one buffer"):
        simulate([page], FAIR, buffers=0, steps=1)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PlanError, match="must be above 0"):
            DiskRates(read=rate, write=1, mixed_read=1, mixed_write=1)
