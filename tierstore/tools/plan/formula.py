"""The time of a step as a formula: its slowest lane, and what does not overlap with it.

Pages pass through lanes in turn: read, check, copy to the GPU, gather, compute, scatter, spread,
copy back, seal, write. The lanes work at the same time on different pages, so a sweep takes as long
as the slowest lane needs for all pages, and one page of each other lane to fill and to empty the
pipeline. Phases follow each other, since buffers let the drives run only a few pages ahead of the
computation or behind it. A commit adds the time until it is durable, if the next step waits to
write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tierstore.errors import PlanError

LANES = (
    *("model", "read", "check", "copy in", "gather", "compute", "scatter", "spread"),
    *("copy out", "seal", "write", "commit"),
)
"""Lanes of a step, in the order of a page's way."""

_READ_AHEAD = 2 / 3
"""Share of forward and backward that backward is: pages may be read, and gradients leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWork:
    """Cost of one page in a step, on one rank; zero if the rank owns nothing of the page."""

    read_bytes: float
    """Bytes read before the page is stepped; 0 for a page that rests in memory."""
    write_bytes: float
    """Bytes written if the page is written."""
    compute_s: float
    """Seconds of the GPU, or of the thread of a rank that computes on the CPU."""
    count: float = 1
    """Number of such pages, one after the other."""
    phase: int = 0
    """Pages of a phase follow each other, and equal pages are spread evenly over it."""
    check_s: float = 0.0
    """Seconds of one thread to check the bytes that were read."""
    seal_s: float = 0.0
    """Seconds of one thread for the checksums of the bytes that are written."""
    copy_in_s: float = 0.0
    """Seconds to copy the page, gradients and parameters to where it is stepped."""
    copy_out_s: float = 0.0
    """Seconds to copy them back."""
    gradients_s: float = 0.0
    """Seconds to copy its gradients to the host during backward."""
    exchange_s: float = 0.0
    """Seconds of the network to gather matrices, and again to scatter their updates."""
    spread_s: float = 0.0
    """Seconds of the network to send parameters to the replicas."""
    rests: bool = False
    """True for a page that stays in memory: it needs no buffer and is written for commits only."""
    added_bytes: float = 0
    """Bytes that only commits write: values of parameters that no step writes."""
    add_s: float = 0.0
    """Seconds of the thread to copy them from the GPU."""
    added_seal_s: float = 0.0
    """Seconds of one thread for their checksums."""

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
        """Return the rates times a factor, for a part or a multiple of these drives."""
        return DiskRates(
            read=self.read * factor,
            write=self.write * factor,
            mixed_read=self.mixed_read * factor,
            mixed_write=self.mixed_write * factor,
        )

    def seconds(self, read_bytes: float, write_bytes: float) -> tuple[float, float]:
        """Return the seconds of reads and of writes that begin at once; the larger covers both."""
        both = min(read_bytes / self.mixed_read, write_bytes / self.mixed_write)
        return (
            both + (read_bytes - both * self.mixed_read) / self.read,
            both + (write_bytes - both * self.mixed_write) / self.write,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The pages of a rank and its part of a disk."""

    pages: Sequence[PageWork]
    """In the order of the sweep; all ranks have the same number."""
    rates: DiskRates
    buffers: int
    """Number of buffers of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Settings that all ranks share."""

    commit_every: int | None = 1
    """Steps from one commit to the next; None: no commit."""
    commit_s: float = 0.0
    """Seconds that a commit needs after its last page is written."""
    on_gpu: bool = False
    """True if ``compute_s`` is time of a GPU, which works beside the thread."""
    window: int = 1
    """Most pages that are stepped at once."""
    checksum_threads: int = 1
    """Threads that check reads, and as many for writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step of a long run, commits and the model's own time included."""

    seconds: float
    """Mean over the steps from one commit to the next."""
    resident_s: float
    """Of the same step with all state in memory and no commit."""
    model_s: float
    """Forward and backward."""
    lanes: Mapping[str, float]
    """Lane -> seconds that it works in the mean of the steps, on the slowest rank; in the order of
    LANES, without those that do nothing."""

    @property
    def exposed_s(self) -> float:
        """Seconds that paging and commits add to the step."""
        return self.seconds - self.resident_s


@dataclass(slots=True)
class _Sums:
    """Sums over some pages of a rank."""

    pages: float = 0
    """Pages that the rank owns, or exchanges with other ranks."""
    buffered: float = 0
    """Pages among them that pass through the pool."""
    compute: float = 0.0
    gather: float = 0.0
    spread: float = 0.0
    copy_in: float = 0.0
    copy_out: float = 0.0
    gradients: float = 0.0
    check: float = 0.0
    seal: float = 0.0
    read: float = 0
    write: float = 0
    """Bytes that every step writes."""
    sealed: float = 0.0
    written: float = 0
    """Bytes of a step that commits; ``sealed`` are the seconds of their checksums."""
    add: float = 0.0
    buffer_s: float = 0.0
    """Seconds for which buffers are taken."""
    turn_s: float = 0.0
    """Seconds of pages of the pool that the thread reads and steps in turn."""


class StepFormula:
    """The formula for some ranks; sums over pages are made once.

    Ranks meet in the collectives of a page, and then compute as long as the slowest of them.

    Raises:
        PlanError: ranks have unequal numbers of pages, or pages that do not rest in memory have no
            buffers.
    """

    def __init__(self, ranks: Sequence[RankWork], rules: StepRules) -> None:
        if len({len(rank.pages) for rank in ranks}) != 1:
            raise PlanError("all ranks must have the same number of pages, which may be empty")
        for rank in ranks:
            if rank.buffers < rules.window and any(page.needs_buffer for page in rank.pages):
                raise PlanError(
                    f"pages that do not rest in memory need {rules.window} buffers or more, got "
                    f"{rank.buffers}"
                )
        self._rules = rules
        met = [
            (
                max(page.exchange_s for page in pages),
                max(page.spread_s for page in pages),
                max(page.compute_s for page in pages),
            )
            for pages in zip(*(rank.pages for rank in ranks), strict=True)
        ]
        self._ranks = [_Rank(rank, rules, met) for rank in ranks]

    def step(self, model_s: float) -> StepTime:
        """Return the step with some seconds of forward and backward.

        Backward takes at least as long as the copies of gradients that leave during backward.
        """
        rules = self._rules
        gradients_s = max(rank.gradients_s for rank in self._ranks)
        model_s = max(model_s, gradients_s and gradients_s / _READ_AHEAD)
        plain = max(rank.step_s(model_s) for rank in self._ranks)
        commit = 0.0
        if rules.commit_every is not None:
            commit = max(rank.commit_s(model_s, plain) for rank in self._ranks)
        slowest = max(self._ranks, key=lambda rank: rank.step_s(model_s))
        return StepTime(
            seconds=plain + commit / (rules.commit_every or 1),
            resident_s=max(model_s + rank.resident_s for rank in self._ranks),
            model_s=model_s,
            lanes={lane: s for lane, s in slowest.lanes(model_s).items() if s},
        )


class _Rank:
    """The formula for one rank."""

    def __init__(
        self, work: RankWork, rules: StepRules, met: Sequence[tuple[float, float, float]]
    ) -> None:
        self._rates = work.rates
        self._buffers = work.buffers
        self._rules = rules
        pages = list(zip(work.pages, met, strict=True))
        self._phases = [
            self._sums(list(members)) for _, members in groupby(pages, lambda pair: pair[0].phase)
        ]
        self._all = self._sums(pages)
        self._first_s = self._first_read_s(work.pages)
        self._fill_s = self._in_lanes(self._all)[1]
        self.gradients_s = self._all.gradients
        self.resident_s = sum(self._in_lanes(self._all, in_memory=True))

    def _sums(self, pages: Sequence[tuple[PageWork, tuple[float, float, float]]]) -> _Sums:
        rates, sums = self._rates, _Sums()
        for page, (exchange_s, spread_s, slowest_s) in pages:
            count = page.count
            compute_s = slowest_s if exchange_s else page.compute_s
            sums.compute += count * compute_s
            sums.gather += count * exchange_s
            sums.spread += count * spread_s
            nbytes = page.write_bytes + page.added_bytes
            sums.pages += count * bool(nbytes or exchange_s or spread_s)
            sums.copy_in += count * page.copy_in_s
            sums.copy_out += count * page.copy_out_s
            sums.gradients += count * page.gradients_s
            sums.check += count * page.check_s
            sums.sealed += count * (page.seal_s + page.added_seal_s)
            sums.written += count * nbytes
            sums.read += count * page.read_bytes
            sums.add += count * page.add_s
            if page.needs_buffer:
                sums.buffered += count
                sums.seal += count * page.seal_s
                sums.write += count * page.write_bytes
                arrives = page.read_bytes / rates.mixed_read + page.check_s
                leaves = page.copy_out_s + page.seal_s + page.write_bytes / rates.mixed_write
                stepped = page.copy_in_s + 2 * exchange_s + self._rules.window * compute_s
                sums.buffer_s += count * (arrives + stepped + leaves)
                sums.turn_s += count * (arrives + compute_s)
        return sums

    def _first_read_s(self, pages: Sequence[PageWork]) -> float:
        """Return the wait for the first page that is read, less the computation before it."""
        before = 0.0
        for page in pages:
            if page.read_bytes:
                return max(0.0, page.read_bytes / self._rates.read + page.check_s - before)
            before += page.count * page.compute_s
        return 0.0

    def _in_lanes(self, sums: _Sums, *, in_memory: bool = False) -> tuple[float, float]:
        """Return the slowest lane except drives and checksums, and one page of each other lane."""
        lanes = list(self._lane_sums(sums, in_memory=in_memory))
        slowest, page_s = max(lanes)
        return slowest, sum(one for _, one in lanes) - page_s

    def _lane_sums(self, sums: _Sums, *, in_memory: bool) -> Iterator[tuple[float, float]]:
        """Yield the seconds of each lane for all pages, and for one of them."""
        count, window = max(1, sums.pages), self._rules.window
        network = 2 * sums.gather + sums.spread
        if window == 1:  # Pages do not overlap.
            yield sums.compute + network, (sums.compute + network) / count
        else:
            yield sums.compute, sums.compute / count
            last = min(window, count) * sums.spread  # The last pages do not overlap.
            yield network, (2 * sums.gather + last) / count
        if not in_memory:
            yield sums.copy_in, sums.copy_in / count

    def _slowest(self, sums: _Sums) -> float:
        """Return the slowest lane except drives, for all pages."""
        threads = self._rules.checksum_threads
        slowest, _ = self._in_lanes(sums)
        return max(slowest, sums.copy_out, sums.check / threads, sums.seal / threads)

    def _sweep_s(self, model_s: float, *, commits: bool, to_end: bool = False) -> float:
        """Return the seconds of all phases, the one after the other.

        In a step that commits, pages that rest in memory are written before those behind them.

        Args:
            model_s: of forward and backward.
            commits: whether the step commits.
            to_end: whether to wait for the last writes, which otherwise overlap the next step.
        """
        rates = self._rates
        lanes = [self._slowest(sums) for sums in self._phases]
        lanes[0] += max(0.0, self._first_s - _READ_AHEAD * model_s)
        moved = [
            (sums.read, sums.written if commits and sums.buffered else sums.write)
            for sums in self._phases
        ]
        disks = [max(rates.seconds(*nbytes)) for nbytes in moved]
        idle = [max(0.0, lane - disk) for lane, disk in zip(lanes, disks, strict=True)]
        writes = [
            _share(self._buffers, sums.buffered) * nbytes / rates.write
            for sums, (_, nbytes) in zip(self._phases, moved, strict=True)
        ]
        seconds = 0.0
        for number, sums in enumerate(self._phases):
            if number:
                free = self._buffers - self._rules.window
                before = idle[number - 1]
            else:  # Forward and backward, while the drives end the step before.
                free = self._buffers
                before = min(_READ_AHEAD * model_s, max(0.0, model_s - writes[-1]))
            if number + 1 < len(idle):
                after = idle[number + 1]
            else:
                after = 0.0 if to_end else model_s + idle[0]
            read, write = moved[number]
            ahead = min(before * rates.read, _share(free, sums.buffered) * read)  # Bytes.
            behind = min(after * rates.write, _share(self._buffers, sums.buffered) * write)
            left_s = max(rates.seconds(read - ahead, write - behind))
            hidden_s = disks[number] - left_s
            bounds = [lanes[number], left_s]
            if sums.buffered > self._buffers:
                bounds.append((sums.buffer_s - hidden_s) / self._buffers)
                if self._buffers == 2 and not self._rules.on_gpu:
                    # The other buffer is written while a page is read and stepped.
                    bounds.append(sums.turn_s - ahead / rates.read)
            seconds += max(bounds)
        return seconds

    def step_s(self, model_s: float, *, commits: bool = False) -> float:
        """Return the seconds of a step, without the time until it is durable."""
        swept_s = model_s + self._sweep_s(model_s, commits=commits) + self._fill_s
        return max(swept_s, max(self._rates.seconds(self._all.read, self._all.write)))

    def commit_s(self, model_s: float, plain_s: float) -> float:
        """Return the seconds that a commit adds to a step: later pages wait until it is durable.

        Its pages have one step to become durable: from their first write to the first write of the
        next step. If no page is written in every step they have two, unless every step commits.
        """
        sums, rules, rates = self._all, self._rules, self._rates
        assert rules.commit_every is not None
        page = 1 / max(1, sums.pages)
        steps = 1 if sums.write else min(2, rules.commit_every)
        last_s = page * (sums.copy_out + sums.sealed + sums.written / rates.write)
        swept_s = (
            self._sweep_s(model_s, commits=True, to_end=True)
            - page * sums.compute
            + sums.add
            + last_s
        )
        # The drives begin with a phase when the thread does. Before the next step writes, they also
        # fill the buffers for it.
        moved_s = begun_s = 0.0
        for number, phase in enumerate(self._phases):
            left = self._phases[number:]
            nbytes = sum(one.read for one in left), sum(one.written for one in left)
            moved_s = max(moved_s, begun_s + max(rates.seconds(*nbytes)))
            begun_s += self._slowest(phase)
        ahead_s = _share(self._buffers, sums.buffered) * sums.read / rates.read
        moved_s -= min(ahead_s, model_s + rules.commit_s)
        sealed_s = sums.sealed / rules.checksum_threads
        durable_s = max(swept_s, moved_s, sealed_s) + rules.commit_s
        longer_s = self.step_s(model_s, commits=True) - plain_s + sums.add
        return max(0.0, longer_s, durable_s - steps * plain_s)

    def lanes(self, model_s: float) -> dict[str, float]:
        """Return the seconds that each lane works in the mean of the steps."""
        sums, rules = self._all, self._rules
        share = 1 / rules.commit_every if rules.commit_every else 0.0
        sealed = sums.seal + share * (sums.sealed - sums.seal)
        written = sums.write + share * (sums.written - sums.write)
        read_s, write_s = self._rates.seconds(sums.read, written)
        return {
            "model": model_s,
            "read": read_s,
            "check": sums.check / rules.checksum_threads,
            "copy in": sums.copy_in,
            "gather": sums.gather,
            "compute": sums.compute,
            "scatter": sums.gather,
            "spread": sums.spread,
            "copy out": sums.copy_out + sums.gradients + share * sums.add,
            "seal": sealed / rules.checksum_threads,
            "write": write_s,
            "commit": share * rules.commit_s,
        }


def _share(buffers: int, pages: float) -> float:
    """Return the share of some pages that buffers hold at once."""
    return min(1.0, buffers / pages) if pages else 0.0
