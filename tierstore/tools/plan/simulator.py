"""A simulator of steps: pages through disk, PCIe, network and computation, in the pager's order.

Reads run ahead of the computation into free buffers and writes drain behind it, as in
``Pager.stream()``. Where closed forms end, with few buffers, resident pages or unequal ranks, the
simulator does not: it says when each page was read, stepped and written. Ranks that have equal
pages and disks behave alike, so one of them is simulated.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from tierstore.errors import PlanError
from tierstore.paging.tier_plan import MOVING_PAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWork:
    """Cost of one page in a step, on one rank; of nothing if the rank owns nothing of it."""

    read_bytes: int
    """Bytes read before the page is stepped; 0 for a page that rests in memory."""
    write_bytes: int
    """Bytes written if the page is written."""
    compute_s: float
    """Seconds of the GPU, or of the thread of a rank that computes on the CPU."""
    check_s: float = 0.0
    """Seconds of a thread beside the computation to check what was read."""
    seal_s: float = 0.0
    """Seconds of another thread for the checksums of what is written."""
    copy_in_s: float = 0.0
    """Seconds to copy the page to the GPU; 0 on the CPU, and for a page that rests on the GPU."""
    copy_out_s: float = 0.0
    """Seconds to copy it back, if it is written or does not rest on the GPU."""
    exchange_s: float = 0.0
    """Seconds of the network to gather matrices, and again to scatter their updates."""
    spread_s: float = 0.0
    """Seconds of the network to send parameters to the replicas."""
    rests: bool = False
    """True for a page that stays in memory: it needs no buffer and is written for commits only."""
    added_bytes: int = 0
    """Bytes that a commit adds to what was written: values of parameters that no step writes."""
    add_s: float = 0.0
    """Seconds of the thread to copy them from the GPU."""
    added_seal_s: float = 0.0
    """Seconds of another thread for their checksums."""

    @property
    def needs_buffer(self) -> bool:
        """True if the page passes through the pool."""
        return self.write_bytes + self.added_bytes > 0 and not self.rests


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes per second of all drives of a rank together."""

    read: float
    write: float
    mixed_read: float
    """Of reads, while the disk also writes."""
    mixed_write: float
    """Of writes, while the disk also reads."""

    def __post_init__(self) -> None:
        for name in ("read", "write", "mixed_read", "mixed_write"):
            rate = getattr(self, name)
            if not 0 < rate < math.inf:
                raise PlanError(f"the rate {name!r} of a disk must be above 0, got {rate!r}")

    def scaled(self, factor: float) -> DiskRates:
        """Return the rates of so much of these drives, or of more of them."""
        return DiskRates(
            read=self.read * factor,
            write=self.write * factor,
            mixed_read=self.mixed_read * factor,
            mixed_write=self.mixed_write * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The pages of a rank and its part of a disk."""

    pages: Sequence[PageWork]
    """In the order of the sweep; all ranks have as many."""
    rates: DiskRates
    buffers: int
    """Number of buffers of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times and limits that all ranks have in common."""

    steps: int
    """Number of steps to simulate; the last ones are those of a long run."""
    model_s: float = 0.0
    """Seconds of forward and backward in each step, before the sweep."""
    prefetch_s: float = 0.0
    """Seconds before the end of ``model_s`` at which reads may begin."""
    commit_every: int | None = 1
    """Steps from one commit to the next; None: no commit."""
    commit_s: float = 0.0
    """Seconds that a commit needs after its last page is written."""
    on_gpu: bool = False
    """True if ``compute_s`` is time of a GPU, which works beside the thread."""
    window: int = 1
    """Most pages that are stepped at once."""


LANES = (
    *("model", "read", "check", "copy in", "gather", "compute", "scatter", "spread"),
    *("copy out", "seal", "write", "commit"),
)
"""Lanes of a timeline, in the order of a page's way."""


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the timeline of a step, in seconds since the first step began."""

    lane: str
    """One of LANES."""
    page: int
    """Number of the page; -1 for spans without one."""
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step: from the end of the step before to its own end."""

    start: float
    stop: float
    stall_s: float
    """Seconds that the thread waited for the disk."""
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """Seconds from the end of the step before."""
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class _Transfer:
    lane: str
    page: int
    left: float
    ready: float
    start: float = math.nan
    stop: float = math.inf


class _Disk:
    """Reads in their order and writes in theirs; the two directions share the disk."""

    def __init__(self, rates: DiskRates) -> None:
        self.now = 0.0
        self.ended: list[_Transfer] = []
        self._rates = rates
        self._queues: dict[str, deque[_Transfer]] = {"read": deque(), "write": deque()}

    def start(self, lane: str, page: int, nbytes: int, ready: float) -> _Transfer:
        """Queue a transfer that begins at a time or later, behind earlier ones of its direction."""
        transfer = _Transfer(lane, page, float(nbytes), ready)
        self._queues[lane].append(transfer)
        return transfer

    def run(self, until: float) -> None:
        """Let transfers progress up to a time."""
        while self.now < until:
            self._advance(until)

    def wait(self, transfer: _Transfer) -> float:
        """Let transfers progress until one has ended; return when it did."""
        while transfer.stop == math.inf:
            self._advance(math.inf)
        return transfer.stop

    def _advance(self, until: float) -> None:
        """Go on to the next end or beginning of a transfer, or to a time before it."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        later = [head.ready for head in heads if head.ready > self.now]
        heads = [head for head in heads if head.ready <= self.now]
        rates = self._rates
        speed = {"read": rates.read, "write": rates.write}
        if len(heads) == 2:
            speed = {"read": rates.mixed_read, "write": rates.mixed_write}
        ends = [self.now + head.left / speed[head.lane] for head in heads]
        then = min([until, *later, *ends])
        for head, end in zip(heads, ends, strict=True):
            if math.isnan(head.start):
                head.start = self.now
            head.left -= (then - self.now) * speed[head.lane]
            if end <= then:
                head.stop = then
                self.ended.append(self._queues[head.lane].popleft())
        self.now = then


@dataclass(frozen=True, slots=True)
class _Meets:
    """For what all ranks meet at a page."""

    to_exchange: bool
    to_spread: bool


_Collective = tuple[str, int, float, float]
"""Lane and page of a collective, when a rank is ready for it, and its seconds."""

_Meeting = Generator[_Collective, float, None]
"""Yields the collectives of a rank in order; gets the end of each."""


@dataclass(slots=True)
class _Rank:
    """The state of one rank between the events of its thread."""

    work: RankWork
    times: StepTimes
    disk: _Disk
    buffers: int
    now: float = 0.0
    gpu: float = 0.0
    """When the GPU, or the thread on a CPU, has ended what it was given."""
    copied_in: float = 0.0
    copied_out: list[float] = field(default_factory=list)
    checked: float = 0.0
    sealed: float = 0.0
    spread: float = 0.0
    stall_s: float = 0.0
    committed: list[_Transfer] = field(default_factory=list)
    """The writes of the last commit; no page is written before it is durable."""
    reading: dict[int, _Transfer] = field(default_factory=dict)
    writing: dict[int, _Transfer] = field(default_factory=dict)  # Oldest first.
    spans: list[Span] = field(default_factory=list)
    found: list[tuple[float, float, float]] = field(default_factory=list)
    """Start, end and stall of each step."""

    def wait_for(self, transfer: _Transfer) -> None:
        self.wait_until(self.disk.wait(transfer))

    def wait_until(self, then: float) -> None:
        self.stall_s += max(0.0, then - self.now)
        self.now = max(self.now, then)

    def span(self, lane: str, page: int, start: float, seconds: float) -> float:
        """Note a bar of the timeline, if it has any length; return its end."""
        if seconds:
            self.spans.append(Span(lane, page, start, start + seconds))
        return start + seconds

    def compute(self, lane: str, page: int, seconds: float, ready: float = 0.0) -> float:
        """Compute on the GPU behind what it was given, or on the thread; return the end."""
        if self.times.on_gpu:
            self.gpu = self.span(lane, page, max(self.gpu, self.now, ready), seconds)
        else:
            self.now = self.gpu = self.span(lane, page, max(self.now, ready), seconds)
        return self.gpu

    def finish_write(self, page: int) -> None:
        self.wait_for(self.writing.pop(page))
        self.buffers += self.work.pages[page].needs_buffer

    def finish_commit(self) -> None:
        """Wait until the last commit is durable."""
        if self.committed:
            written = max(map(self.disk.wait, self.committed))
            self.wait_until(self.span("commit", -1, written, self.times.commit_s))
            self.committed.clear()

    def read_ahead(self, waiting: deque[int], ahead: deque[int], *, may_wait: bool) -> None:
        """As ``Pager._read_ahead()``; without ``may_wait`` as ``Pager.prefetch()``."""
        pages = self.work.pages
        while waiting:
            self.disk.run(self.now)
            for page in [p for p, write in self.writing.items() if write.stop <= self.now]:
                self.finish_write(page)
            page = waiting[0]
            is_stuck = page in self.writing or (pages[page].needs_buffer and not self.buffers)
            if is_stuck and (ahead or not may_wait):
                return
            if page in self.writing:
                self.finish_write(page)
            elif is_stuck:
                self.finish_write(next(iter(self.writing)))
            else:
                ahead.append(waiting.popleft())
                self.buffers -= pages[page].needs_buffer
                nbytes = pages[page].read_bytes
                if nbytes:
                    self.reading[page] = self.disk.start("read", page, nbytes, self.now)

    def arrive(self, page: int) -> float:
        """Wait until a page was checked, and bring it to the GPU; return when it is there."""
        work = self.work.pages[page]
        if page in self.reading:
            ready = max(self.disk.wait(self.reading.pop(page)), self.checked)
            self.checked = self.span("check", page, ready, work.check_s)
            self.wait_until(self.checked)
        if not self.times.on_gpu:
            return self.now
        start = max(self.now, self.copied_in)
        staging = self.times.window + MOVING_PAGES
        if work.copy_in_s and len(self.copied_out) >= staging:  # For a buffer on the GPU.
            start = max(start, self.copied_out[-staging])
        self.copied_in = self.span("copy in", page, start, work.copy_in_s)
        return self.copied_in

    def leave(self, page: int, ready: float, *, commits: bool) -> None:
        """Copy a page that was stepped from the GPU and write it, unless it rests in memory."""
        work = self.work.pages[page]
        is_written = work.write_bytes and (commits or not work.rests)
        if is_written:
            self.finish_commit()
            if page in self.writing:
                self.finish_write(page)
        if not self.times.on_gpu:
            ready = self.now = max(self.now, ready)
        elif work.copy_out_s:
            # Streams of the GPU wait for all that was given to it before.
            ready = max(ready, self.now, self.gpu)
            start = max(ready, self.copied_out[-1] if self.copied_out else 0.0)
            ready = self.span("copy out", page, start, work.copy_out_s)
            self.copied_out.append(ready)
        if not is_written:
            self.buffers += work.needs_buffer
            return
        self.sealed = ready = self.span("seal", page, max(ready, self.sealed), work.seal_s)
        self.writing[page] = self.disk.start("write", page, work.write_bytes, ready)

    def add_parameters(self) -> None:
        """As ``Pager._add_parameters()`` of all pages, at a commit."""
        for page, work in enumerate(self.work.pages):
            if not work.added_bytes:
                continue
            if page in self.writing:
                self.finish_write(page)
            while work.needs_buffer and not self.buffers:
                self.finish_write(next(iter(self.writing)))
            self.buffers -= work.needs_buffer
            self.now = self.span("copy out", page, self.now, work.add_s)
            ready = max(self.now, self.sealed)
            self.sealed = ready = self.span("seal", page, ready, work.added_seal_s)
            self.writing[page] = self.disk.start("write", page, work.added_bytes, ready)

    def sweep(
        self, ahead: deque[int], waiting: deque[int], meets: Sequence[_Meets], *, commits: bool
    ) -> _Meeting:
        """Step all pages in order; see ``Pipeline.step_pages()`` for that of the exchange."""
        gathered: deque[tuple[int, float]] = deque()  # Page and end of its gather.
        held: deque[tuple[int, float]] = deque()  # Page and when it may leave, oldest first.
        pages = self.work.pages

        def orthogonalize() -> _Meeting:
            page, end = gathered.popleft()
            self.span("gather", page, end - pages[page].exchange_s, pages[page].exchange_s)
            end = self.compute("compute", page, pages[page].compute_s, end)
            end = yield "scatter", page, end, pages[page].exchange_s
            self.span("scatter", page, end - pages[page].exchange_s, pages[page].exchange_s)
            held.append((page, end))

        def leave() -> _Meeting:
            page, ready = held.popleft()
            self.leave(page, ready, commits=commits)
            if meets[page].to_spread:
                ready = max(ready, self.now, self.gpu)
                end = yield "spread", page, ready, pages[page].spread_s
                self.span("spread", page, end - pages[page].spread_s, pages[page].spread_s)
                self.spread = max(self.spread, end)

        for number in range(len(pages)):
            self.read_ahead(waiting, ahead, may_wait=True)
            page = ahead[0]
            while gathered and gathered[0][0] <= number - self.times.window:
                yield from orthogonalize()
            while held and held[0][0] <= number - self.times.window:
                yield from leave()
            there = self.arrive(page)
            self.read_ahead(waiting, ahead, may_wait=True)
            ahead.popleft()
            if meets[page].to_exchange:
                end = yield "gather", page, max(there, self.gpu), pages[page].exchange_s
                gathered.append((page, end))
                if len(gathered) > 1:
                    yield from orthogonalize()
            else:
                while gathered:
                    yield from orthogonalize()
                held.append((page, self.compute("compute", page, pages[page].compute_s, there)))
            if self.times.window == 1 or number + 1 == len(pages):
                while gathered:
                    yield from orthogonalize()
                while held:
                    yield from leave()
        self.now = max(self.now, self.gpu, self.spread)

    def run(self, meets: Sequence[_Meets]) -> _Meeting:
        """Do all steps; their times are in ``found``."""
        times = self.times
        for step in range(1, times.steps + 1):
            started, stalled = self.now, self.stall_s
            waiting, ahead = deque(range(len(self.work.pages))), deque[int]()
            self.now = self.compute("model", -1, times.model_s - times.prefetch_s)
            if times.prefetch_s:
                self.read_ahead(waiting, ahead, may_wait=False)
                self.now = self.compute("model", -1, times.prefetch_s)
            commits = times.commit_every is not None and step % times.commit_every == 0
            yield from self.sweep(ahead, waiting, meets, commits=commits)
            if commits:
                self.add_parameters()
                self.committed = list(self.writing.values())
            self.found.append((started, self.now, self.stall_s - stalled))
        self.finish_commit()
        for write in self.writing.values():
            self.disk.wait(write)

    def steps(self) -> list[SimulatedStep]:
        """Return all steps with their spans."""
        moved = [Span(t.lane, t.page, t.start, t.stop) for t in self.disk.ended]
        return [
            SimulatedStep(
                start=start,
                stop=stop,
                stall_s=stall_s,
                spans=sorted(
                    (s for s in (*self.spans, *moved) if s.stop > start and s.start < stop),
                    key=lambda span: (span.start, span.stop),
                ),
            )
            for start, stop, stall_s in self.found
        ]


def simulate(ranks: Sequence[RankWork], times: StepTimes) -> list[list[SimulatedStep]]:
    """Return what happens in consecutive steps, for each rank.

    Ranks meet in collectives: each begins when the last rank is ready and the network is free, and
    takes as long as on the slowest rank.

    Raises:
        PlanError: ranks have unequal numbers of pages, or pages that do not rest in memory have no
            buffers.
    """
    if len({len(rank.pages) for rank in ranks}) != 1:
        raise PlanError("all ranks must have the same number of pages, which may be empty")
    for rank in ranks:
        if rank.buffers < times.window and any(page.needs_buffer for page in rank.pages):
            raise PlanError(
                f"pages that do not rest in memory need {times.window} buffers or more, got "
                f"{rank.buffers}"
            )
    by_page = list(zip(*(rank.pages for rank in ranks), strict=True))
    meets = [
        _Meets(any(page.exchange_s for page in pages), any(page.spread_s for page in pages))
        for pages in by_page
    ]
    states = [_Rank(rank, times, _Disk(rank.rates), rank.buffers) for rank in ranks]
    meetings = [state.run(meets) for state in states]
    network = 0.0
    asked = [next(meeting, None) for meeting in meetings]
    while all(asked):
        calls = [call for call in asked if call is not None]
        begin = max(network, *(ready for _, _, ready, _ in calls))
        network = begin + max(seconds for _, _, _, seconds in calls)
        asked = [_send(meeting, network) for meeting in meetings]
    return [state.steps() for state in states]


def _send(meeting: _Meeting, end: float) -> _Collective | None:
    """Tell a rank the end of its collective; return its next one, or None."""
    try:
        return meeting.send(end)
    except StopIteration:
        return None
