"""The step of a planned job: the pages of its ranks, their costs, and the time they take."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tierstore.layout.ownership import SharedSubgroup
from tierstore.paging.rank_checks import shared_parameter
from tierstore.paging.replication import bytes_in_flight
from tierstore.paging.tier_plan import Tier, pages_at_once
from tierstore.tools.plan.footprint import Footprint, footprint_of, subgroups_of
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.rates import Rates
from tierstore.tools.plan.simulator import (
    DiskRates,
    PageWork,
    RankWork,
    SimulatedStep,
    StepTimes,
    simulate,
)
from tierstore.tools.probe.optimizers import OptimizerPlan, PageWorks, PlannedOptimizer

_CLASSES_MAX = 8
"""Most ranks that are laid out and simulated: those with the most state, if more are unlike."""

_CYCLE_MAX = 16
"""Most steps between two commits that are simulated."""

_NO_DISK = DiskRates(read=1e30, write=1e30, mixed_read=1e30, mixed_write=1e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that own as many elements of each subgroup as one of them."""

    rank: int
    """The first of them."""
    count: int
    footprint: Footprint
    works: Sequence[PageWorks]
    """Of each subgroup."""
    spread_bytes: Sequence[int]
    """Bytes of parameters that the rank receives for each subgroup, as a replica."""
    in_flight_bytes: int
    """Most bytes of parameters that are on their way to and from replicas at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of a job."""

    job: Job
    optimizer: OptimizerPlan
    subgroups: Sequence[SharedSubgroup]
    classes: Sequence[RankClass]
    matrix_bytes: int
    """Bytes that the optimizer needs beside pages."""

    def total(self, of: str) -> float:
        """Return the sum of a property of the footprint over all ranks.

        If more kinds of ranks are unlike than were laid out, the others count as those.
        """
        counted = sum(one.count for one in self.classes)
        sums = sum(one.count * getattr(one.footprint, of) for one in self.classes)
        return float(sums * self.job.world_size / counted)

    def most(self, of: str) -> int:
        """Return the largest value of a property of the footprint."""
        return max(int(getattr(one.footprint, of)) for one in self.classes)


def lay_out_ranks(job: Job, planned: PlannedOptimizer, optimizer: OptimizerPlan) -> Ranks:
    """Partition the parameters of a job as its store would.

    Raises:
        BudgetError: the host memory of the store is too small.
        PlanError: the partition is unknown.
        ValueError: the optimizer refuses its memory.
    """
    size = job.world_size
    shared = [
        [
            shared_parameter(parameter, job.holding(parameter.spec.shape))
            for parameter in group.parameters
        ]
        for group in planned.groups
    ]
    subgroups = subgroups_of(shared, job.store, size)
    members: dict[tuple[int, ...], list[int]] = {}
    by_rank = zip(
        *(
            [stop - start for start, stop in shard.ranges]
            for subgroup in subgroups
            for shard in subgroup.shards
        ),
        strict=True,
    )
    for rank, numels in enumerate(by_rank):
        members.setdefault(numels, []).append(rank)
    largest = sorted(members.items(), key=lambda item: (-sum(item[0]), item[1][0]))[:_CLASSES_MAX]
    ranks = [found[0] for _, found in largest]
    works, matrix_bytes = planned.works(subgroups, ranks, size)
    classes = []
    for rank, (_, alike), own in zip(ranks, largest, works, strict=True):
        footprint = footprint_of(
            subgroups, job.store, world_size=size, rank=rank, on_gpu=job.on_gpu
        )
        messages = [messages_of(subgroup, rank) for subgroup in subgroups]
        classes.append(
            RankClass(
                rank=rank,
                count=len(alike),
                footprint=footprint,
                works=own,
                spread_bytes=[sum(found.values()) - found[rank] for found in messages],
                in_flight_bytes=bytes_in_flight([*chain(*(m.values() for m in messages))]),
            )
        )
    return Ranks(
        job=job,
        optimizer=optimizer,
        subgroups=subgroups,
        classes=classes,
        matrix_bytes=matrix_bytes,
    )


def messages_of(subgroup: SharedSubgroup, rank: int) -> Counter[int]:
    """Return the bytes of parameters of a subgroup that a rank sends to replicas, or receives.

    Returns:
        Owner -> bytes, without padding.
    """
    found: Counter[int] = Counter()
    for shard in subgroup.shards:
        for replicas in shard.parameter.holding.replicas():
            for owner in replicas if rank in replicas else ():
                start, stop = shard.ranges[owner]
                found[owner] += shard.spec.dtype.itemsize * max(0, stop - start)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step of a long run, commits and the model's own time included."""

    seconds: float
    """Mean over the steps from one commit to the next."""
    resident_s: float
    """Of the same step with all state in memory and no commit."""
    model_s: float
    """Forward and backward."""
    shown: SimulatedStep
    """The last step of the slowest rank, which commits if any does."""

    @property
    def exposed_s(self) -> float:
        """Seconds that paging and commits add to the step."""
        return self.seconds - self.resident_s


def time_step(ranks: Ranks, rates: Rates, model_s: float) -> StepTime:
    """Simulate steps of all ranks."""
    job = ranks.job
    every = job.store.commit_every
    cycle = 1 if every is None else min(every, _CYCLE_MAX)
    on_gpu = job.on_gpu and job.store.compute == "device"
    times = StepTimes(
        steps=cycle * max(2, -(-4 // cycle)),  # The last one commits.
        model_s=model_s,
        prefetch_s=model_s * 2 / 3,  # Reads begin in backward, which is two thirds of it.
        commit_every=None if every is None else cycle,
        commit_s=rates.commit_s,
        on_gpu=on_gpu,
        window=_window(ranks),
    )
    works = [_rank_work(one, ranks, rates, on_gpu=on_gpu) for one in ranks.classes]
    found = simulate(works, times)
    by_step = [max(step.seconds for step in steps) for steps in zip(*found, strict=True)]
    last = by_step[-cycle:]
    seconds = statistics.fmean(last)
    if every is not None and every > cycle:
        # The steps that were not simulated are like the last one before the commit.
        seconds = (sum(last) + (every - cycle) * last[-2]) / every
    slowest = max(range(len(found)), key=lambda index: found[index][-1].stop)
    resident = [
        replace(
            work,
            pages=[
                replace(page, read_bytes=0, check_s=0, seal_s=0, copy_in_s=0, copy_out_s=0)
                for page in map(_resting, work.pages)
            ],
        )
        for work in works
    ]
    in_memory = simulate(resident, replace(times, steps=2, commit_every=None, prefetch_s=0.0))
    return StepTime(
        seconds=seconds,
        resident_s=max(steps[-1].seconds for steps in in_memory),
        model_s=model_s,
        shown=found[slowest][-1],
    )


def _window(ranks: Ranks) -> int:
    """Return the most pages that are stepped at once, as ``TierStore.window_max``."""
    held = [pages_at_once(ranks.job.world_size)]
    for one in ranks.classes:
        placement = one.footprint.placement
        if placement.buffers:
            held.append(max(1, placement.buffers - 1 - (Tier.DEVICE in placement.tiers)))
    return min(held)


def _resting(page: PageWork) -> PageWork:
    return replace(page, rests=True)


def _rank_work(one: RankClass, ranks: Ranks, rates: Rates, *, on_gpu: bool) -> RankWork:
    """Return the pages of a rank, and its share of the disks of its node."""
    footprint = one.footprint
    tiers = iter(footprint.placement.tiers)
    pages = []
    for number, layout in enumerate(footprint.layouts):
        works, sent, received = one.works[number]
        tier = next(tiers) if layout.nbytes else Tier.HOST
        readable = sum(section.extent.nbytes for section in layout.readable)
        read_bytes = readable if tier is Tier.NVME else 0
        written_bytes = footprint.options.written_bytes(layout)
        added_bytes = layout.nbytes - written_bytes
        is_copied = on_gpu and tier is not Tier.DEVICE
        leaves = on_gpu and bool(layout.nbytes)
        exchange_s = max(sent, received) / rates.network
        spread_s = one.spread_bytes[number] / rates.network
        # Without GPUs, ranks send with the processor that they compute on.
        sends_s = 0.0 if ranks.job.on_gpu else 2 * exchange_s + spread_s
        pages.append(
            PageWork(
                read_bytes=read_bytes,
                write_bytes=written_bytes,
                compute_s=rates.seconds(works, ranks.optimizer) + sends_s,
                check_s=read_bytes / rates.checksum,
                seal_s=written_bytes / rates.checksum,
                copy_in_s=layout.nbytes / rates.to_device if is_copied else 0.0,
                copy_out_s=layout.nbytes / rates.from_device if leaves else 0.0,
                exchange_s=exchange_s,
                spread_s=spread_s,
                rests=tier is not Tier.NVME,
                added_bytes=added_bytes,
                add_s=added_bytes / rates.from_device if on_gpu else 0.0,
                added_seal_s=added_bytes / rates.checksum,
            )
        )
    return RankWork(
        pages=pages,
        rates=(rates.disk or _NO_DISK).scaled(1 / ranks.job.node_size),
        buffers=footprint.placement.buffers,
    )
