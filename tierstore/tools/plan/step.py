"""The step of a planned job: the pages of its ranks, and the cost of each page."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tierstore.errors import PlanError
from tierstore.layout.ownership import SharedSubgroup
from tierstore.paging.page import checksum_threads
from tierstore.paging.replication import bytes_in_flight
from tierstore.paging.shared_parameters import shared_parameter
from tierstore.paging.tier_plan import Tier, pages_at_once
from tierstore.tools.plan.footprint import (
    Footprint,
    footprint_of,
    parameter_bytes,
    subgroups_of,
)
from tierstore.tools.plan.formula import DiskRates, PageWork, RankWork, StepFormula, StepRules
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.rates import Rates
from tierstore.tools.probe.optimizers import OptimizerPlan, PageWorks, PlannedOptimizer

_CLASSES_MAX = 8
"""Most ranks that are laid out: the ones with the most state, if more differ."""

_NO_DISK = DiskRates(read=1e30, write=1e30, mixed_read=1e30, mixed_write=1e30)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that own the same number of elements of each subgroup."""

    rank: int
    """The first of these ranks."""
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

        Ranks that were not laid out count as the mean of the ranks that were.
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
        PlanError: the partition is unknown, or cuts parameters that must be whole.
        ValueError: the optimizer refuses its memory.
    """
    size = job.world_size
    _require_whole(job, planned)
    shared = [
        [
            shared_parameter(parameter, job.holding(tuple(parameter.tensor.shape)))
            for parameter in group.parameters
        ]
        for group in planned.groups
    ]
    subgroups = subgroups_of(shared, job.store, size)
    members: dict[tuple[int, ...], list[int]] = {}
    shards = [shard for subgroup in subgroups for shard in subgroup.shards]
    unlike = dict.fromkeys(shard.ranges for shard in shards)  # Layers are cut alike.
    by_rank = zip(*([stop - start for start, stop in ranges] for ranges in unlike), strict=True)
    for rank, numels in enumerate(by_rank):
        members.setdefault(numels, []).append(rank)
    densities = [shard.spec.nbytes / math.prod(shard.spec.shape) for shard in shards]

    def by_state(alike: list[int]) -> tuple[float, int]:
        bounds = (shard.ranges[alike[0]] for shard in shards)
        numels = (stop - start for start, stop in bounds)
        return -sum(map(operator.mul, numels, densities)), alike[0]

    largest = sorted(members.values(), key=by_state)[:_CLASSES_MAX]
    ranks = [alike[0] for alike in largest]
    works, matrix_bytes = planned.works(subgroups, ranks, size)
    classes = []
    for rank, alike, own in zip(ranks, largest, works, strict=True):
        footprint = footprint_of(
            subgroups,
            job.store,
            world_size=size,
            rank=rank,
            parameters_on_gpu=job.parameters_on_gpu,
            steps_on_gpu=job.steps_on_gpu,
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


def _require_whole(job: Job, planned: PlannedOptimizer) -> None:
    """Refuse parts of parameters if the optimizer needs whole ones."""
    for group in planned.groups if planned.whole else ():
        for parameter in group.parameters:
            holding, shape = job.holding(parameter.spec.shape), parameter.spec.shape
            if holding.local_shape(shape, holding.ranks[0]) != shape:
                raise PlanError(
                    f"the optimizer sees whole parameters, and the partition {job.partition!r} "
                    f"cuts {parameter.name!r}: plan with 'ddp'. If it steps each element by "
                    "itself, pass elementwise=True"
                )


def messages_of(subgroup: SharedSubgroup, rank: int) -> Counter[int]:
    """Return the bytes of parameters of a subgroup that a rank sends to replicas, or receives.

    Returns:
        Owner -> bytes, without padding.
    """
    found: Counter[int] = Counter()
    for shard in subgroup.shards:
        itemsize = shard.spec.dtype.itemsize
        for replicas in shard.parameter.holding.replicas():
            for owner in replicas if rank in replicas else ():
                start, stop = shard.ranges[owner]
                if start < stop:
                    found[owner] += itemsize * (stop - start)
    return found


def formula_of(ranks: Ranks, rates: Rates) -> StepFormula:
    """Return the formula for the steps of all ranks."""
    return StepFormula(
        [_rank_work(one, ranks, rates, on_gpu=ranks.job.steps_on_gpu) for one in ranks.classes],
        step_rules(ranks.job, rates, _window(ranks)),
    )


def step_rules(job: Job, rates: Rates, window: int) -> StepRules:
    """Return the settings that all ranks share; ``window`` is the most pages at once."""
    return StepRules(
        commit_every=job.store.commit_every,
        commit_s=rates.commit_s,
        on_gpu=job.steps_on_gpu,
        window=window,
        checksum_threads=checksum_threads(rates.cores),
    )


def disk_of_rank(job: Job, rates: Rates) -> DiskRates:
    """Return the share of a rank of the disks of its node."""
    return (rates.disk or _NO_DISK).scaled(1 / job.node_size)


def _window(ranks: Ranks) -> int:
    """Return the most pages that are stepped at once, as ``TierStore.window_max``."""
    held = [pages_at_once(ranks.job.world_size)]
    for one in ranks.classes:
        placement = one.footprint.placement
        if placement.buffers:
            held.append(max(1, placement.buffers - 1 - (Tier.DEVICE in placement.tiers)))
    return min(held)


def moved_s(job: Job, nbytes: float, rates: Rates) -> tuple[float, float]:
    """Return the seconds to copy gradients and parameters to where a page is stepped, and back.

    Args:
        job: the job.
        nbytes: of the parameters of the page, and of their gradients.
        rates: of the bus.
    """
    if job.parameters_on_gpu and not job.steps_on_gpu:  # Gradients that left are there already.
        down = nbytes if job.offloads else 2 * nbytes
        return down / rates.from_device, nbytes / rates.to_device
    if job.steps_on_gpu and not job.parameters_on_gpu:
        return 2 * nbytes / rates.to_device, nbytes / rates.from_device
    return (nbytes / rates.to_device if job.offloads else 0.0), 0.0


def with_gradients_s(job: Job, nbytes: float, rates: Rates) -> float:
    """Return the seconds of the bus beside forward and backward, for a page's part of the model.

    Gradients that leave go down in each backward, and up again before the next one is added. With
    parameters on the host, FSDP2 brings them up for forward and again for backward.
    """
    if job.on_gpu and not job.parameters_on_gpu:
        return job.micro_batches * nbytes * max(2 / rates.to_device, 1 / rates.from_device)
    if not job.offloads:
        return 0.0
    up = (job.micro_batches - 1) * nbytes / rates.to_device
    return max(job.micro_batches * nbytes / rates.from_device, up)


def _phases(subgroups: Sequence[SharedSubgroup]) -> list[int]:
    """Return for each page the group of the pages around it.

    Pages of elementwise rules are spread among the other pages, group after group.
    """
    others = [one.group for one in subgroups if not one.elementwise]
    if not others:
        return [one.group for one in subgroups]
    phase, phases = others[0], []
    for one in subgroups:
        phase = phase if one.elementwise else one.group
        phases.append(phase)
    return phases


def _rank_work(one: RankClass, ranks: Ranks, rates: Rates, *, on_gpu: bool) -> RankWork:
    """Return the pages of a rank, and its share of the disks of its node."""
    footprint = one.footprint
    tiers = iter(footprint.placement.tiers)
    phases = _phases(ranks.subgroups)
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
        moved_bytes = parameter_bytes(layout)
        to_step, from_step = moved_s(ranks.job, moved_bytes, rates)
        # Without GPUs, ranks send with the processor that they compute on.
        sends_s = 0.0 if ranks.job.on_gpu else 2 * exchange_s + spread_s
        pages.append(
            PageWork(
                phase=phases[number],
                read_bytes=read_bytes,
                write_bytes=written_bytes,
                compute_s=rates.seconds(works, ranks.optimizer) + sends_s,
                check_s=read_bytes / rates.checksum,
                seal_s=written_bytes / rates.checksum,
                copy_in_s=to_step + (layout.nbytes / rates.to_device if is_copied else 0.0),
                copy_out_s=from_step + (layout.nbytes / rates.from_device if leaves else 0.0),
                gradients_s=with_gradients_s(ranks.job, moved_bytes, rates),
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
        rates=disk_of_rank(ranks.job, rates),
        buffers=footprint.placement.buffers,
    )
