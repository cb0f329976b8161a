"""All settings with which a job may run, with their memory and step by the formulas of a plan.

Pages are assumed to be of equal size, so that settings cost microseconds. ``fit`` lays out the few
settings that it shows as a store would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.errors import PlanError
from tierstore.paging.sources import slabs_count
from tierstore.paging.tier_plan import (
    BUFFERS_MIN,
    MOVING_PAGES_OF_GPU,
    PAGE_BYTES_MAX,
    STREAM_BUFFERS,
    STREAM_BYTES,
    Tier,
    default_page_bytes,
    pages_at_once,
)
from tierstore.tools.plan.activations import Activations
from tierstore.tools.plan.formula import PageWork, RankWork, StepFormula
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.memory import (
    ModelBytes,
    Need,
    StoreBytes,
    job_activations,
    model_bytes,
    needs_of,
)
from tierstore.tools.plan.models import Model
from tierstore.tools.plan.partitions import PARTITIONS
from tierstore.tools.plan.rates import Rates
from tierstore.tools.plan.step import disk_of_rank, moved_s, step_rules, with_gradients_s
from tierstore.tools.plan.totals import Totals, totals_of
from tierstore.tools.probe.optimizers import OptimizerPlan
from tierstore.units import SECTOR_BYTES

SPARE = 0.05
"""Share of each memory that is left free, for fragments and other programs."""

_ALL = 2**62
"""More than any memory has bytes."""
_SMALL_PAGES = PAGE_BYTES_MAX // 4
"""Tried where pages of the usual size do not fit."""
_COMMITS = (1, 10, 100)
_WHOLE = 1.01
"""Memory for all pages, for each of their bytes: they end at whole sectors."""
_LARGE_HOST = 64 * 2**30
"""Memory of a rank in which some GiB for pages of the usual size do not count."""
_LOSS_TOKENS = 1024
_MICRO_TOKENS = [2**power for power in range(15, 10, -1)]
_CRASH_S = 3600.0
"""Most seconds of work that a crash may lose."""
_PLACES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpu", {}),
    ("gpu", {"offload_gradients": "backward"}),
    ("gpu", {"step_on": "cpu"}),
    ("gpu", {"offload_gradients": "backward", "step_on": "cpu"}),
    ("host", {"step_on": "cuda"}),
    ("host", {}),
)
"""Places of parameters, and of gradients and steps."""
_ON_HOST = ("cpu", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a job, and what they cost."""

    job: Job
    is_exact: bool
    """True if states keep all their bits."""
    changes: int
    """Number of settings that are not the default, but for commit_every."""
    step_s: float
    memory: int
    """Bytes of GPUs and host memory of a node."""
    written: float
    """Bytes that a rank writes in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """A choice of states in fewer bytes."""

    options: Mapping[str, Any]
    changes: int
    totals: Totals


class Search:
    """Settings for a model and an optimizer.

    Args:
        model: the model.
        optimizer: the optimizer.
        algorithm: one of its algorithms.
        rates: of the machine, with steps on a GPU and on the host.
        drives: number of drives of a node to which these rates belong.
        nvme_bytes: bytes of the drives of a node, if the job does not name the drives.
    """

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerPlan,
        algorithm: str,
        rates: Mapping[bool, Rates],
        *,
        drives: int = 1,
        nvme_bytes: int | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._algorithm, self._rates = algorithm, rates
        self._active_count = model.active_count
        self._is_timed = algorithm in optimizer.algorithms
        self._totals: dict[str, Totals] = {}
        self._own: dict[tuple[object, ...], ModelBytes] = {}
        self._activations: dict[tuple[object, ...], Activations | None] = {}
        self._drives, self._nvme_bytes = drives, nvme_bytes

    def settings(self, job: Job, *, is_exact: bool) -> Iterator[Setting]:
        """Yield all settings with which a job fits.

        Args:
            job: the job.
            is_exact: whether states keep all their bits. If not, each setting has states that
                lose some.

        Raises:
            PlanError: the optimizer refuses the model.
        """
        for laid, changes in self._layouts(job):
            for states in self._states(laid, is_exact=is_exact):
                if states.totals.whole and laid.world_size > 1 and laid.partition != "ddp":
                    continue
                with_states = replace(laid, optimizer=states.options)
                for page_bytes in (None, _SMALL_PAGES):
                    paged = _with_store(with_states, page_bytes=page_bytes)
                    count = changes + states.changes + (page_bytes is not None)
                    found = self._fitting(paged, states.totals, count, is_exact=is_exact)
                    first = next(found, None)
                    if first is not None:
                        yield first
                        yield from found
                        break

    def _layouts(self, job: Job) -> Iterator[tuple[Job, int]]:
        """Yield the places of parameters, gradients and steps, and the number of changes."""
        partitions = [job.partition, *(p for p in PARTITIONS if p != job.partition)]
        for partition in partitions if job.world_size > 1 else [job.partition]:
            for experts in self._experts(job) if partition == "fsdp" else [1]:
                for parameters_on, place in _PLACES if job.on_gpu else _PLACES[:1]:
                    if not self._is_timed and place.get("step_on", parameters_on) in _ON_HOST:
                        continue  # Its computation counts as zero, but is slow there.
                    try:
                        laid = replace(
                            job,
                            partition=partition,
                            expert_parallel=experts,
                            parameters_on=parameters_on,
                            store=replace(job.store, **place),
                        )
                    except PlanError:
                        continue  # The partition does not allow these places.
                    changes = (partition != job.partition) + (experts > 1)
                    yield laid, changes + len(place) + (parameters_on == "host")

    def _experts(self, job: Job) -> list[int]:
        """Return the numbers of ranks that experts may be dealt to."""
        experts = {p.shape[0] for p in self._model.parameters if len(p.shape) == 3}
        sizes = [2**power for power in range(1, 10)] if experts else []
        common = math.gcd(job.world_size, *experts)
        return [1, *(size for size in sizes if common % size == 0)]

    def _states(self, job: Job, *, is_exact: bool) -> Iterator[_States]:
        """Yield the states that are tried, the fullest first."""
        narrower = [one for one in self._optimizer.narrower if one[2] or not is_exact]
        least = None
        for count in range(len(narrower) + 1):
            for chosen in itertools.combinations(narrower, count):
                keys = [key for _, options, _ in chosen for key in options]
                if len(set(keys)) < len(keys) or (not is_exact and all(one[2] for one in chosen)):
                    continue
                options = dict(job.optimizer)
                for _, given, _ in chosen:
                    options = {**given, **options}
                try:
                    totals = self._totals_of(job, options)
                except PlanError:
                    if not chosen and is_exact:
                        raise
                    continue  # The model has a dtype that the option does not allow.
                if least is None or totals.state < least:
                    least = totals.state
                    yield _States(options=options, changes=count, totals=totals)

    def _totals_of(self, job: Job, options: Mapping[str, Any]) -> Totals:
        on_gpu = job.steps_on_gpu
        key = repr((on_gpu, sorted(options.items())))
        if key not in self._totals:
            self._totals[key] = totals_of(
                *(self._model, self._optimizer, self._algorithm, options, self._rates[on_gpu]),
                on_gpu=on_gpu,
            )
        return self._totals[key]

    def _rates_of(self, job: Job) -> Rates:
        """Return the rates with the drives of a job, which may have more drives than the node."""
        rates = self._rates[job.steps_on_gpu]
        if rates.disk is None or job.drives is None or job.drives.count == self._drives:
            return rates
        return replace(rates, disk=rates.disk.scaled(job.drives.count / self._drives))

    def _own_of(self, job: Job) -> ModelBytes:
        key = job.partition, job.expert_parallel, job.parameters_on, job.world_size, job.gpus
        if key not in self._own:
            self._own[key] = model_bytes(job, self._model)
        return self._own[key]

    def _fitting(
        self, job: Job, totals: Totals, changes: int, *, is_exact: bool
    ) -> Iterator[Setting]:
        """Yield the settings that fit: micro-batches, memories of the store, commits."""
        own, rates = self._own_of(job), self._rates_of(job)
        for batched in self._batches(job, own, totals):
            more = batched.checkpointing + (batched.loss_tokens is not None)
            for stored in self._stores(batched, own, totals):
                pages = _Pages.of(stored, totals)
                needs = None if pages is None else self._needs(stored, own, pages, totals)
                if pages is None or needs is None or not _fit(needs):
                    continue
                memory = sum(
                    need.nbytes * (job.node_size if need.place == "GPU" else 1)
                    for need in needs
                    if need.place != "NVMe"
                )
                has_device = stored.store.device_memory > 0
                for every in _COMMITS if pages.resting or pages.device else _COMMITS[:1]:
                    committed = _with_store(stored, commit_every=every)
                    step_s = pages.step_s(committed, totals, own, rates, self._active_count)
                    if every > 1 and every * step_s > _CRASH_S:
                        break
                    yield Setting(
                        job=committed,
                        is_exact=is_exact,
                        changes=changes + more + has_device,
                        step_s=step_s,
                        memory=memory,
                        written=pages.written(committed, totals),
                    )

    def _batches(self, job: Job, own: ModelBytes, totals: Totals) -> Iterator[Job]:
        """Yield jobs with the largest micro-batch that fits and the smallest, for each way."""
        of_rank = math.ceil((job.tokens or 1) / job.world_size)
        sizes = sorted({min(size, of_rank) for size in _MICRO_TOKENS}, reverse=True)

        def fits(batched: Job) -> bool:
            least = next(self._stores(batched, own, totals), None)
            pages = None if least is None else _Pages.of(least, totals)
            return (
                least is not None
                and pages is not None
                and _fit(self._needs(least, own, pages, totals))
            )

        smallest = replace(
            job, micro_tokens=sizes[-1], checkpointing=True, loss_tokens=_LOSS_TOKENS
        )
        if job.activation_bytes is not None:  # They were measured for this job.
            yield job
        elif fits(smallest):
            ways = itertools.product((False, True), (None, _LOSS_TOKENS))
            for checkpointing, loss_tokens in ways:
                way = replace(job, checkpointing=checkpointing, loss_tokens=loss_tokens)
                fitting = (one for size in sizes if fits(one := replace(way, micro_tokens=size)))
                largest = next(fitting, None)
                if largest is not None:
                    yield largest
                    if largest.micro_tokens != sizes[-1]:
                        yield replace(way, micro_tokens=sizes[-1])

    def _stores(self, job: Job, own: ModelBytes, totals: Totals) -> Iterator[Job]:
        """Yield jobs with the least memory for a store, and with all memory that is left."""
        of_pages = _Pages.of(_with_store(job, host_memory=_ALL), totals)
        assert of_pages is not None
        nothing = replace(of_pages, buffers=0, resting=0, device=0, copies=0, staging=0)
        left = {need.place: _left(need) for need in self._needs(job, own, nothing, totals)}
        host = left["host"] // job.node_size
        # Buffers for four pages of the usual size, if a page is a sixteenth of the memory or less.
        least_pages = STREAM_BUFFERS * PAGE_BYTES_MAX
        if job.store.page_bytes is not None:
            least_pages = STREAM_BUFFERS * of_pages.page
        elif host > _LARGE_HOST:
            least_pages *= 4  # Without smaller pages.
        most = of_pages.copies + math.ceil(_WHOLE * of_pages.state)
        least = min(host, of_pages.copies + least_pages, most)
        if least <= of_pages.copies:
            return
        memories = {
            _rounded(least, up=least < host),
            _rounded(min(most, host), up=most < host),
        }
        devices = [0]
        if job.steps_on_gpu:
            devices.append(_rounded(min(left["GPU"] - of_pages.staging, of_pages.state)))
        for device_memory in sorted({size for size in devices if size >= 0}):
            for host_memory in sorted(memories):
                yield _with_store(job, device_memory=device_memory, host_memory=host_memory)

    def _needs(self, job: Job, own: ModelBytes, pages: _Pages, totals: Totals) -> list[Need]:
        drives = job.drives
        store = StoreBytes(
            buffers=pages.buffers * pages.page,
            resting=pages.resting,
            copies=pages.copies,
            device=pages.device + pages.staging,
            matrices=totals.matrices,
            in_flight=0,
            state=pages.state * job.node_size,
        )
        return needs_of(
            job,
            own,
            self._activations_of(job),
            store,
            nvme_limit=self._nvme_bytes if drives is None else drives.nbytes,
        )

    def _activations_of(self, job: Job) -> Activations | None:
        key = job.tokens_at_once, job.checkpointing, job.loss_tokens
        if key not in self._activations:
            self._activations[key] = job_activations(job, self._model)
        return self._activations[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """Pages of equal size of one rank, and where they rest; bytes."""

    state: int
    page: int
    buffers: int
    """Number of buffers of the pool."""
    resting: int
    """Of pages in host memory."""
    device: int
    """Of pages on the GPU."""
    copies: int
    """Of gradients and parameters in host memory."""
    staging: int
    """Of the GPU, for pages that are stepped, their gradients and parameters."""

    @classmethod
    def of(cls, job: Job, totals: Totals) -> _Pages | None:
        """Return the pages of a job; None if its store has no memory for two buffers."""
        store, size = job.store, job.world_size
        state = math.ceil(totals.state / size)
        wanted = max(store.page_bytes or default_page_bytes(store.budget), totals.uncut // size)
        page = min(state, wanted)
        window = pages_at_once(size)
        moves = job.parameters_on_gpu != job.steps_on_gpu
        slabs = 0
        if moves or job.offloads:
            of_page = totals.parameters * page // totals.state
            slabs = slabs_count(window, on_gpu=job.steps_on_gpu) * of_page * (1 + moves)
        copies = totals.parameters // size if job.offloads else 0
        copies += 0 if job.steps_on_gpu else slabs
        free = store.host_memory - copies
        device = min(state, store.device_memory) if store.device_memory >= page else 0
        rest = state - device
        buffers, resting = BUFFERS_MIN if device else 0, rest
        if rest + buffers * page > free:
            buffers = max(STREAM_BUFFERS, min(STREAM_BYTES, free // 2) // page)
            resting = free - buffers * page
            if resting < page:  # All memory is for buffers.
                resting = 0
                buffers = min(max(0, free) // page, -(-rest // page))
            if buffers < BUFFERS_MIN:
                return None
        staging = 0
        if job.steps_on_gpu:
            staging = slabs + min((window + MOVING_PAGES_OF_GPU) * page, rest)
        return cls(
            state=state,
            page=page,
            buffers=buffers,
            resting=resting,
            device=device,
            copies=copies,
            staging=staging,
        )

    def written(self, job: Job, totals: Totals) -> float:
        """Return the bytes that a rank writes in a step, on average."""
        share = (self.state - self.resting - self.device) / self.state
        every = job.store.commit_every or 1
        between = share * (totals.written if every == 1 else totals.written_between)
        return (between + (totals.written - between) / every) / job.world_size

    def step_s(
        self, job: Job, totals: Totals, own: ModelBytes, rates: Rates, active_count: int
    ) -> float:
        """Return the seconds of a step, by the formula of a plan; without exchanges of matrices."""
        every, part = job.store.commit_every, self.page / self.state
        own_part = part / job.world_size
        moved = totals.parameters * own_part
        to_step, from_step = moved_s(job, moved, rates)
        between = totals.written if every == 1 else totals.written_between
        spread = (own.held - totals.parameters / job.world_size) * part
        pages = []
        for tier, nbytes in (
            (Tier.NVME, self.state - self.resting - self.device),
            (Tier.HOST, self.resting),
            (Tier.DEVICE, self.device),
        ):
            read = totals.read * own_part if tier is Tier.NVME else 0.0
            written, added = between * own_part, (totals.written - between) * own_part
            page = PageWork(
                count=nbytes / self.page,
                read_bytes=read,
                write_bytes=written,
                compute_s=totals.compute_s * own_part,
                check_s=read / rates.checksum,
                seal_s=written / rates.checksum,
                copy_in_s=to_step,
                copy_out_s=from_step,
                gradients_s=with_gradients_s(job, moved, rates),
                spread_s=max(0.0, spread) / rates.network,
                rests=tier is not Tier.NVME,
                added_bytes=added,
                added_seal_s=added / rates.checksum,
            )
            if job.steps_on_gpu:
                bus_s = self.page / rates.to_device if tier is not Tier.DEVICE else 0.0
                page = replace(
                    page,
                    copy_in_s=to_step + bus_s,
                    copy_out_s=from_step + self.page / rates.from_device,
                    add_s=added / rates.from_device,
                )
            if nbytes:
                pages.append(page)
        window = min(pages_at_once(job.world_size), max(1, self.buffers - 1))
        formula = StepFormula(
            [RankWork(pages=pages, rates=disk_of_rank(job, rates), buffers=self.buffers)],
            step_rules(job, rates, window),
        )
        return formula.step(job.compute_s(active_count) or 0.0).seconds


def _fit(needs: Sequence[Need]) -> bool:
    return all(_left(need) >= 0 for need in needs)


def _left(need: Need) -> int:
    """Return the bytes that are left of a memory, without the share that stays free."""
    if need.limit is None:
        return _ALL
    spare = 0 if need.place == "NVMe" else SPARE
    return int(need.limit * (1 - spare)) - need.nbytes


def _rounded(nbytes: int, *, up: bool = False) -> int:
    """Return a size in few digits: "45GiB" instead of 48,394,715,136 bytes."""
    unit: int = max(SECTOR_BYTES, 2 ** max(0, nbytes.bit_length() - 6))
    return -(-nbytes // unit) * unit if up else nbytes // unit * unit


def _with_store(job: Job, **options: Any) -> Job:
    return replace(job, store=replace(job.store, **options))
