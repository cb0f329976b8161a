"""A plan: how long the drives last, whether the job fits, how long a step takes, and what helps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tierstore.errors import BudgetError, PlanError
from tierstore.tools.plan.drives import SECONDS_PER_DAY, Wear, wear_of
from tierstore.tools.plan.formula import LANES, StepFormula, StepTime
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.memory import (
    Need,
    job_activations,
    model_bytes,
    needs_of,
    store_bytes,
)
from tierstore.tools.plan.models import Model
from tierstore.tools.plan.rates import Rates
from tierstore.tools.plan.skeleton import skeleton_of
from tierstore.tools.plan.step import Ranks, formula_of, lay_out_ranks
from tierstore.tools.plan.totals import quiet
from tierstore.tools.probe.optimizers import OptimizerPlan, PlannedOptimizer, load_optimizers
from tierstore.units import format_bytes

FREE = 0.02
"""Paging counts as free if it makes a step longer by at most this share."""

_CLASSES = "torch"
"""The optimizer that takes any class, as "module.Class", besides its algorithms."""
_COMPUTATION = "the optimizer's computation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the job, and the step with it."""

    change: str
    step_s: float
    days: float | None
    """Days that the drives then last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The same model and machine under another algorithm of the optimizer."""

    algorithm: str
    step_s: float | None
    """None if the optimizer's computation is not known."""
    state_bytes: int
    """Of all ranks."""
    written_bytes: float
    """Bytes that all ranks write in a step."""
    days: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answers about a job. Exact figures come from the code of store and optimizer."""

    model: Model
    job: Job
    rates: Rates
    algorithm: str
    ranks: Ranks
    call: str
    """Python code of the optimizer."""
    wear: Wear | None
    """None without drives."""
    steps_allowed: float | None
    """Steps until the allowed share of the drives' endurance is used; None if not known."""
    needs: Sequence[Need]
    formula: StepFormula
    """The step for any time of forward and backward."""
    time: StepTime
    is_timed: bool
    """False if the optimizer's computation is not known, which then takes no time in ``formula``:
    a step takes at least this time, and drives are written at most as much in a day."""
    model_s: float | None
    """Seconds of forward and backward; None if the job does not say, and the step has none."""
    busy: Mapping[str, float]
    """Resource -> seconds of a step that it works, the busiest first."""
    free_model_s: float | None
    """Shortest forward and backward beside which paging is free; None if it never is, or if that
    is not known."""
    changes: Sequence[Change] = ()
    beside: Sequence[Beside] = ()
    """This algorithm, and the others of the optimizer."""

    @property
    def fits(self) -> bool:
        """True if no kind of memory is exceeded."""
        return all(need.fits for need in self.needs)

    @property
    def lasts(self) -> bool:
        """False if the run writes more than the drives are allowed to endure."""
        steps = self.job.steps or 1
        return self.steps_allowed is None or steps <= self.steps_allowed

    @property
    def days(self) -> float | None:
        """Days until the allowed share of the endurance is used; None if not known."""
        return _days_allowed(self.job, self.wear, self.time) if self.is_timed else None

    @property
    def bottleneck(self) -> str:
        """The resource that works longest in a step."""
        return next(iter(self.busy))

    @property
    def free_tokens(self) -> float | None:
        """Tokens of the shortest step beside which paging is free; None if not known."""
        if self.free_model_s is None:
            return None
        return self.job.tokens_in(self.free_model_s, self.model.active_count)


def plan(
    model: Model,
    job: Job,
    rates: Rates,
    *,
    optimizer: str | None = None,
    algorithm: str | None = None,
    nvme_bytes: int | None = None,
) -> Plan:
    """Return the plan of a job.

    Args:
        model: its parameters, in the dtype that they are trained in.
        job: the job.
        rates: of its machines.
        optimizer: name of an installed optimizer; None: the one that has the algorithm, or "muon".
        algorithm: one of those that the optimizer names, or a class for Paged, as "module.Class";
            None: the usual one.
        nvme_bytes: bytes of the drives of a node, if the job does not name the drives.

    Raises:
        PlanError: the optimizer is not installed, or refuses the model or an option.
        BudgetError: the host memory of the stores is too small for the pages.
    """
    chosen = choose(optimizer, algorithm)
    planner = Planner(model, chosen, chosen.known(rates), nvme_bytes)
    found = planner.plan(job)
    return replace(
        found,
        changes=list(planner.changes(job)) if chosen.is_timed else [],
        beside=[
            one
            for each in dict.fromkeys([*chosen.plan.algorithms, chosen.algorithm])
            if (one := planner.beside(job, each))
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An optimizer and an algorithm of it."""

    name: str
    plan: OptimizerPlan
    algorithm: str

    @property
    def is_timed(self) -> bool:
        """False if the computation of the algorithm is not known."""
        return self.algorithm in self.plan.algorithms

    def known(self, rates: Rates) -> Rates:
        """Return rates that name the assumptions about this optimizer."""
        assumed = list(rates.assumed)
        if rates.measured and all(one.optimizer != self.name for one in rates.measured):
            rate = f"{rates.memory / 1e9:g} GB/s"
            assumed.append(f"memory of the optimizer at {rate}: the probe lacks {self.name!r}")
        if not self.is_timed:
            text = f"the computation of {self.algorithm} is left out: no probe measures it"
            assumed.append(text)
        return replace(rates, assumed=tuple(assumed))


def choose(optimizer: str | None, algorithm: str | None) -> Chosen:
    """Return an installed optimizer and its algorithm; see plan().

    Raises:
        PlanError: it is not installed, or has no such algorithm.
    """
    installed = load_optimizers()
    is_class = algorithm is not None and "." in algorithm
    if optimizer is None:
        # Classes of other packages may have no such names.
        having = (n for n, one in installed.items() if algorithm in getattr(one, "algorithms", ()))
        optimizer = next(having, _CLASSES if is_class else "muon")
    if optimizer not in installed:
        raise PlanError(
            f"no optimizer {optimizer!r} is installed, expected one of "
            f"{', '.join(map(repr, installed)) or 'none'}: install its package"
        )
    algorithms = installed[optimizer].algorithms
    chosen = algorithm or algorithms[0]
    if chosen not in algorithms and not (is_class and optimizer == _CLASSES):
        raise PlanError(
            f"the optimizer {optimizer!r} has no algorithm {chosen!r}, expected one of "
            f"{', '.join(map(repr, algorithms))}, or a class of optimizers that pages can have, "
            "such as 'torch.optim.Adam'"
        )
    return Chosen(name=optimizer, plan=installed[optimizer], algorithm=chosen)


class Planner:
    """Plans variants of one job.

    Args:
        model: the model.
        chosen: the optimizer.
        rates: of the machines.
        nvme_bytes: bytes of the drives of a node, if the job does not name the drives.
    """

    def __init__(self, model: Model, chosen: Chosen, rates: Rates, nvme_bytes: int | None) -> None:
        self.model = model
        self.optimizer = chosen.plan
        self._chosen = chosen
        self.rates = rates
        self._nvme_bytes = nvme_bytes
        self._skeleton = skeleton_of(model)
        self._planned: dict[str, PlannedOptimizer] = {}
        self._laid_out: dict[str, tuple[Ranks, str]] = {}

    def plan(self, job: Job) -> Plan:
        """Return the plan of a job.

        Raises:
            PlanError, BudgetError: as plan().
        """
        chosen = self._chosen
        ranks, call = self.lay_out(job, chosen.algorithm)
        formula = formula_of(ranks, self.rates)
        time, wear = self.time(ranks, formula)
        busy = _busy(time)
        if not chosen.is_timed:
            del busy[_COMPUTATION]
        return Plan(
            model=self.model,
            job=job,
            rates=self.rates,
            algorithm=chosen.algorithm,
            ranks=ranks,
            call=call,
            wear=wear,
            steps_allowed=steps_allowed(job, wear),
            needs=self.needs(ranks),
            formula=formula,
            time=time,
            is_timed=chosen.is_timed,
            model_s=job.compute_s(self.model.active_count),
            busy=busy,
            free_model_s=_free_model_s(formula) if chosen.is_timed else None,
        )

    def lay_out(self, job: Job, algorithm: str) -> tuple[Ranks, str]:
        """Return all ranks, and the code of the optimizer."""
        key = repr((algorithm, replace(job, drives=None)))
        if key not in self._laid_out:
            self._laid_out[key] = self._lay_out(job, algorithm)
        ranks, call = self._laid_out[key]
        return replace(ranks, job=job), call

    def _lay_out(self, job: Job, algorithm: str) -> tuple[Ranks, str]:
        on_gpu = job.steps_on_gpu
        try:
            key = repr((algorithm, on_gpu, sorted(job.optimizer.items())))
            if key not in self._planned:
                with quiet() if self._planned else nullcontext():  # Each would log the same.
                    self._planned[key] = self.optimizer.plan(
                        self._skeleton, algorithm, on_gpu=on_gpu, options=job.optimizer
                    )
            planned = self._planned[key]
            return lay_out_ranks(job, planned, self.optimizer), planned.call
        except (ValueError, TypeError) as error:
            if isinstance(error, BudgetError | PlanError):
                raise
            raise PlanError(f"the optimizer refuses the job: {error}") from error

    def time(
        self, ranks: Ranks, formula: StepFormula | None = None
    ) -> tuple[StepTime, Wear | None]:
        """Return the time of a step, and how it wears the drives."""
        job = ranks.job
        model_s = job.compute_s(self.model.active_count) or 0.0
        time = (formula or formula_of(ranks, self.rates)).step(model_s)
        wear = None
        if job.drives is not None and time.seconds:
            step_bytes = ranks.total("mean_written_bytes") / job.nodes
            wear = wear_of(job.drives, step_bytes=step_bytes, step_s=time.seconds, used=job.wear)
        return time, wear

    def needs(self, ranks: Ranks) -> list[Need]:
        """Return the needs of the job for each kind of memory."""
        drives = ranks.job.drives
        limit = self._nvme_bytes if drives is None else drives.nbytes
        job, model = ranks.job, self.model
        return needs_of(
            *(job, model_bytes(job, model), job_activations(job, model), store_bytes(ranks)),
            nvme_limit=limit,
        )

    def changes(self, job: Job) -> Iterator[Change]:
        """Yield a few changes, and the step with each."""
        algorithm = self._chosen.algorithm
        ranks, _ = self.lay_out(job, algorithm)
        if self.rates.disk is not None:
            count = self.rates.drives
            faster = replace(self.rates, disk=self.rates.disk.scaled((count + 1) / count))
            drives = job.drives and replace(job.drives, count=job.drives.count + 1)
            yield self._change(
                "one more drive in each node", replace(job, drives=drives), algorithm, faster
            )
        # Buffers, and gradients and parameters.
        others = ranks.most("host_bytes") - ranks.most("resting_bytes")
        nbytes = others + ranks.most("state_bytes") // 2
        store = replace(job.store, host_memory=nbytes, buffers=None)
        if nbytes > ranks.most("host_bytes"):
            text = f"half of the pages in host memory ({format_bytes(nbytes)} for each rank)"
            yield self._change(text, replace(job, store=store), algorithm, self.rates)
        for text, options, _ in self.optimizer.narrower:
            narrower = replace(job, optimizer={**options, **job.optimizer})
            try:
                smaller, _ = self.lay_out(narrower, algorithm)
            except PlanError:  # The option does not allow a dtype of the model, or its cut.
                continue
            if _traffic(smaller) < _traffic(ranks):
                yield self._change(text, narrower, algorithm, self.rates)

    def _change(self, text: str, job: Job, algorithm: str, rates: Rates) -> Change:
        ranks, _ = self.lay_out(job, algorithm)
        time, wear = self.time(ranks, formula_of(ranks, rates))
        return Change(change=text, step_s=time.seconds, days=_days_allowed(job, wear, time))

    def beside(self, job: Job, algorithm: str) -> Beside | None:
        """Return the job under one algorithm; None if it cannot run with it."""
        try:
            ranks, _ = self.lay_out(job, algorithm)
        except (BudgetError, PlanError):
            return None
        time, wear = self.time(ranks)
        is_timed = algorithm in self.optimizer.algorithms
        return Beside(
            algorithm=algorithm,
            step_s=time.seconds if is_timed else None,
            state_bytes=round(ranks.total("state_bytes")),
            written_bytes=ranks.total("mean_written_bytes"),
            days=_days_allowed(job, wear, time) if is_timed else None,
        )


def _traffic(ranks: Ranks) -> float:
    """Return the bytes that a step reads and writes."""
    return ranks.total("step_read_bytes") + ranks.total("mean_written_bytes")


def steps_allowed(job: Job, wear: Wear | None) -> float | None:
    """Return the steps until the allowed share of the endurance is used."""
    if wear is None or wear.steps is None:
        return None
    left = 1 - job.wear
    allowed = job.endurance - job.wear
    if left <= 0 or allowed <= 0:
        return 0.0
    return wear.steps * allowed / left


def _days_allowed(job: Job, wear: Wear | None, time: StepTime) -> float | None:
    steps = steps_allowed(job, wear)
    return None if steps is None else steps * time.seconds / SECONDS_PER_DAY


def _busy(time: StepTime) -> dict[str, float]:
    """Return the seconds that each resource works in a step; checks and copies go both ways."""
    lanes = dict.fromkeys(LANES, 0.0) | dict(time.lanes)
    busy = {
        "the model": lanes["model"],
        "the drives": max(lanes["read"], lanes["write"]) + lanes["commit"],
        _COMPUTATION: lanes["compute"],
        "checksums": max(lanes["check"], lanes["seal"]),
        "PCIe": max(lanes["copy in"], lanes["copy out"]),
        "the network": lanes["gather"] + lanes["scatter"] + lanes["spread"],
    }
    return dict(sorted(busy.items(), key=lambda item: -item[1]))


def _free_model_s(formula: StepFormula) -> float | None:
    """Return the shortest forward and backward beside which paging is free, to one percent."""

    def is_free(model_s: float) -> bool:
        time = formula.step(model_s)
        return time.exposed_s <= FREE * time.seconds

    if is_free(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not is_free(high):
        low, high = high, 4 * high
        if high > 1e7:
            return None
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_free(middle) else (middle, high)
    return high


def to_plain(found: Plan) -> dict[str, Any]:
    """Return a plan as values of JSON; bytes and seconds as numbers."""
    footprint = found.ranks.classes[0].footprint

    def known(value: Any) -> Any:
        return value if found.is_timed else None

    return {
        "model": found.model.name,
        "parameters": found.model.parameter_count,
        "algorithm": found.algorithm,
        "nodes": found.job.nodes,
        "ranks": found.job.world_size,
        "partition": found.job.partition,
        "assumed": list(found.rates.assumed),
        "lasts": found.lasts,
        "wear": None
        if found.wear is None
        else {
            "bytes_per_day": known(found.wear.bytes_per_day),
            "drive_writes_per_day": known(found.wear.drive_writes_per_day),
            "steps": _number(found.steps_allowed),
            "days": _number(found.days),
        },
        "fits": found.fits,
        "needs": [
            {
                "place": need.place,
                "bytes": need.nbytes,
                "limit": need.limit,
                "fits": need.fits,
                "parts": dict(need.parts),
            }
            for need in found.needs
        ],
        "rank": {
            "pages": {
                tier.value: sum(one is tier for one in footprint.placement.tiers)
                for tier in type(footprint.placement.tiers[0])
            },
            "buffers": footprint.placement.buffers,
            "state_bytes": footprint.state_bytes,
            "file_bytes": footprint.file_bytes,
            "host_bytes": footprint.host_bytes,
            "device_bytes": footprint.device_bytes,
            "step_read_bytes": footprint.step_read_bytes,
            "step_written_bytes": footprint.mean_written_bytes,
        },
        "step": {
            "seconds": known(found.time.seconds),
            "resident_seconds": known(found.time.resident_s),
            "exposed_seconds": known(found.time.exposed_s),
            "model_seconds": found.model_s,
            "bottleneck": known(found.bottleneck),
            "busy_seconds": dict(found.busy),
            "lane_seconds": dict(found.time.lanes),
        },
        "free": {
            "model_seconds": found.free_model_s,
            "tokens": found.free_tokens,
        },
        "changes": [
            {"change": one.change, "step_seconds": one.step_s, "days": _number(one.days)}
            for one in found.changes
        ],
        "beside": [
            {
                "algorithm": one.algorithm,
                "step_seconds": one.step_s,
                "state_bytes": one.state_bytes,
                "written_bytes": one.written_bytes,
                "days": _number(one.days),
            }
            for one in found.beside
        ],
    }


def _number(value: float | None) -> float | None:
    """Return a number that JSON has: infinite ones are not, and mean "no end"."""
    return None if value is None or math.isinf(value) else value
