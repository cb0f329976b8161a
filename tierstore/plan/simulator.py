"""A simulator of steps: pages through disk and computation, in the order of the pager.

One thread computes; reads run ahead of it into free buffers and writes drain behind it, as in
``Pager.stream()``. Where closed forms end, with few buffers or resident pages, the simulator does
not: it says when each page was read, stepped and written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWork:
    """Cost of one page in a step."""

    read_bytes: int
    """Bytes read before the page is stepped; 0 for a page that rests in memory."""
    write_bytes: int
    """Bytes written if the page is written."""
    compute_s: float
    """Seconds of the thread that steps the page, checksums and copies included."""
    rests: bool = False
    """True for a page that stays in memory: it needs no buffer and is written for commits only."""


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


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of the timeline of a step, in seconds since the first step began."""

    lane: str
    """"read", "compute", "write", "commit" or "model"."""
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
    start: float = math.nan
    stop: float = math.inf


class _Disk:
    """Reads in their order and writes in theirs; the two directions share the disk."""

    def __init__(self, rates: DiskRates) -> None:
        self.now = 0.0
        self.ended: list[_Transfer] = []
        self._rates = rates
        self._queues: dict[str, deque[_Transfer]] = {"read": deque(), "write": deque()}

    def start(self, lane: str, page: int, nbytes: int, now: float) -> _Transfer:
        """Queue a transfer at a time that is not before any earlier call."""
        self.run(now)
        transfer = _Transfer(lane, page, float(nbytes))
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
        """Go on to the end of the next transfer, or to a time before it."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        rates = self._rates
        speed = {"read": rates.read, "write": rates.write}
        if len(heads) == 2:
            speed = {"read": rates.mixed_read, "write": rates.mixed_write}
        ends = [self.now + head.left / speed[head.lane] for head in heads]
        then = min([until, *ends])
        for head, end in zip(heads, ends, strict=True):
            if math.isnan(head.start):
                head.start = self.now
            head.left -= (then - self.now) * speed[head.lane]
            if end <= then:
                head.stop = then
                self.ended.append(self._queues[head.lane].popleft())
        self.now = then


@dataclass(slots=True)
class _Rank:
    """The state of one rank between the events of its thread."""

    pages: Sequence[PageWork]
    disk: _Disk
    buffers: int
    now: float = 0.0
    stall_s: float = 0.0
    commit_s: float = 0.0
    committed: list[_Transfer] = field(default_factory=list)
    """The writes of the last commit; no page is written before it is durable."""
    reading: dict[int, _Transfer] = field(default_factory=dict)
    writing: dict[int, _Transfer] = field(default_factory=dict)  # Oldest first.
    spans: list[Span] = field(default_factory=list)

    def wait_for(self, transfer: _Transfer) -> None:
        self.wait_until(self.disk.wait(transfer))

    def wait_until(self, then: float) -> None:
        self.stall_s += max(0.0, then - self.now)
        self.now = max(self.now, then)

    def compute(self, lane: str, page: int, seconds: float) -> None:
        self.spans.append(Span(lane, page, self.now, self.now + seconds))
        self.now += seconds

    def finish_write(self, page: int) -> None:
        self.wait_for(self.writing.pop(page))
        self.buffers += not self.pages[page].rests

    def finish_commit(self) -> None:
        """Wait until the last commit is durable."""
        if self.committed:
            written = max(map(self.disk.wait, self.committed))
            self.spans.append(Span("commit", -1, written, written + self.commit_s))
            self.wait_until(written + self.commit_s)
            self.committed.clear()

    def read_ahead(self, waiting: deque[int], ahead: deque[int], *, may_wait: bool) -> None:
        """As ``Pager._read_ahead()``; without ``may_wait`` as ``Pager.prefetch()``."""
        while waiting:
            self.disk.run(self.now)
            for page in [p for p, write in self.writing.items() if write.stop <= self.now]:
                self.finish_write(page)
            page = waiting[0]
            is_stuck = page in self.writing or not (self.pages[page].rests or self.buffers)
            if is_stuck and (ahead or not may_wait):
                return
            if page in self.writing:
                self.finish_write(page)
            elif is_stuck:
                self.finish_write(next(iter(self.writing)))
            else:
                ahead.append(waiting.popleft())
                self.buffers -= not self.pages[page].rests
                nbytes = self.pages[page].read_bytes
                if nbytes:
                    self.reading[page] = self.disk.start("read", page, nbytes, self.now)

    def sweep(self, waiting: deque[int], ahead: deque[int], *, commits: bool) -> None:
        """Step all pages in order."""
        while waiting or ahead:
            self.read_ahead(waiting, ahead, may_wait=True)
            page = ahead[0]
            if page in self.reading:
                self.wait_for(self.reading.pop(page))
            self.read_ahead(waiting, ahead, may_wait=True)
            ahead.popleft()
            work = self.pages[page]
            self.compute("compute", page, work.compute_s)
            if commits or not work.rests:
                self.finish_commit()
                if page in self.writing:
                    self.finish_write(page)
                self.writing[page] = self.disk.start("write", page, work.write_bytes, self.now)


def simulate(
    pages: Sequence[PageWork],
    rates: DiskRates,
    *,
    buffers: int,
    steps: int,
    model_s: float = 0.0,
    prefetch_s: float = 0.0,
    commit_every: int | None = 1,
    commit_s: float = 0.0,
) -> list[SimulatedStep]:
    """Return what happens in consecutive steps of one rank.

    Args:
        pages: the pages in the order of the sweep.
        rates: the disk.
        buffers: number of buffers of the pool.
        steps: number of steps; the last ones are those of a long run.
        model_s: seconds of forward and backward in each step, before the sweep.
        prefetch_s: seconds before the end of ``model_s`` at which reads may begin.
        commit_every: steps from one commit to the next; None: no commit.
        commit_s: seconds that a commit needs after its last page is written.

    Raises:
        PlanError: pages that do not rest in memory have no buffer.
    """
    if buffers < 1 and not all(page.rests for page in pages):
        raise PlanError("pages that do not rest in memory need at least one buffer, got 0")
    rank = _Rank(pages, _Disk(rates), buffers, commit_s=commit_s)
    found = []
    for step in range(1, steps + 1):
        started, stalled = rank.now, rank.stall_s
        waiting, ahead = deque(range(len(pages))), deque[int]()
        rank.compute("model", -1, model_s - prefetch_s)
        if prefetch_s:
            rank.read_ahead(waiting, ahead, may_wait=False)
            rank.compute("model", -1, prefetch_s)
        commits = commit_every is not None and step % commit_every == 0
        rank.sweep(waiting, ahead, commits=commits)
        if commits:
            rank.committed = list(rank.writing.values())
        found.append((started, rank.now, rank.stall_s - stalled))
    rank.finish_commit()
    for write in rank.writing.values():
        rank.disk.wait(write)
    spans = rank.spans + [Span(t.lane, t.page, t.start, t.stop) for t in rank.disk.ended]
    return [
        SimulatedStep(
            start=start,
            stop=stop,
            stall_s=stall_s,
            spans=sorted(
                (span for span in spans if span.stop > start and span.start < stop),
                key=lambda span: (span.start, span.stop),
            ),
        )
        for start, stop, stall_s in found
    ]
