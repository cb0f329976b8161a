"""Settings with which a job runs on a machine, or the nearest machine on which it does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from tierstore.errors import BudgetError, PlanError
from tierstore.tools.plan.calls import program_of, size_text
from tierstore.tools.plan.drives import wear_of
from tierstore.tools.plan.footprint import StoreOptions
from tierstore.tools.plan.job import Job
from tierstore.tools.plan.models import Model
from tierstore.tools.plan.plan import Chosen, Plan, Planner, choose, steps_allowed
from tierstore.tools.plan.rates import Rates
from tierstore.tools.plan.search import Search, Setting
from tierstore.units import format_bytes

_GAIN = 1.02
"""A setting that is not the default must make a step this much shorter."""
_SLOWER = 2.0
"""Most steps of the quickest plan that one step with the least memory may take."""
_TRIES = 4
_NEAREST = 3
_GIB = 2**30
_GPU_GIB = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 180, 288)
"""Memory of GPUs that are sold."""

Change = tuple[str, Mapping[str, Any]]
"""A change of the machines in words, and the fields of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A plan that fits."""

    title: str
    """"quickest", "least memory" or "longest life"."""
    plan: Plan
    is_exact: bool
    """False if states are kept in fewer bits: full ones do not fit, or wear the drives out."""
    loses_steps: int
    """Steps that a crash loses at most."""

    @property
    def program(self) -> str:
        """Python code of the training loop with these settings."""
        return program_of(self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A change of the machines, and the quickest step with it."""

    change: str
    step_s: float
    written: float
    """Bytes that a rank writes in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Result of fit_job(): plans that fit, or the nearest machines."""

    model: Model
    job: Job
    algorithm: str
    plans: Sequence[Fitted]
    """At most three, without those that are equal to another; empty if nothing fits."""
    is_worn_out: bool
    """True if nothing fits because the drives do not last for the steps of the job."""
    nearest: Sequence[Nearest]
    """At most three changes of the machines, with which it fits, or a step is shorter."""


def fit_job(
    model: Model,
    job: Job,
    rates: Mapping[bool, Rates],
    *,
    algorithm: str | None = None,
    nvme_bytes: int | None = None,
) -> Fit:
    """Return the settings with which a job runs.

    The search covers the settings of a store, the places of gradients, parameters and steps, states
    in fewer bytes, micro-batches, and recomputation of layers and logits. Of the settings that fit,
    three are planned in full: the quickest step, the least memory, and the fewest bytes written.

    Args:
        model: its parameters, in the dtype that they are trained in.
        job: the machines and the tokens of a step; its own settings are replaced.
        rates: of the machines, by whether pages are stepped on GPUs.
        algorithm: as for ``plan()``.
        nvme_bytes: as for ``plan()``.

    Raises:
        PlanError: a memory of the machines is not known, or the optimizer is not installed or
            refuses the model.
    """
    job = _without_settings(job)
    chosen = choose(None, algorithm)
    fitting = _Fitting(model, job, chosen, rates, nvme_bytes)
    settings = list(fitting.settings(job))
    plans = list(fitting.finalists(settings))
    short = [] if plans else list(fitting.settings(replace(job, steps=None)))
    if plans:
        nearest = fitting.better(job, settings)
    else:
        nearest = fitting.more_drives(job, short) if short else fitting.nearest(job)
    return Fit(
        model=model,
        job=job,
        algorithm=chosen.algorithm,
        plans=plans,
        is_worn_out=bool(short),
        nearest=nearest,
    )


def fits(
    model: Model,
    job: Job,
    rates: Mapping[bool, Rates],
    *,
    algorithm: str | None = None,
    nvme_bytes: int | None = None,
) -> bool:
    """Return whether any settings let a job run; see fit_job()."""
    job = _without_settings(job)
    fitting = _Fitting(model, job, choose(None, algorithm), rates, nvme_bytes)
    return next(fitting.settings(job), None) is not None


class _Fitting:
    """Searches settings, and plans some of them."""

    def __init__(
        self,
        model: Model,
        job: Job,
        chosen: Chosen,
        rates: Mapping[bool, Rates],
        nvme_bytes: int | None,
    ) -> None:
        known = {on_gpu: chosen.known(one) for on_gpu, one in rates.items()}
        self._planners = {
            on_gpu: Planner(model, chosen, one, nvme_bytes) for on_gpu, one in known.items()
        }
        self._search = Search(
            *(model, chosen.plan, chosen.algorithm, known),
            drives=job.drives.count if job.drives else 1,
            nvme_bytes=nvme_bytes,
        )

    def settings(self, job: Job) -> Iterator[Setting]:
        """Yield the settings with which a job fits, and wears no drive out.

        States lose bits only if the job does not fit otherwise.
        """
        for is_exact in (True, False):
            found = filter(_lasts, self._search.settings(job, is_exact=is_exact))
            first = next(found, None)
            if first is not None:
                yield first
                yield from found
                return

    def finalists(self, settings: Sequence[Setting]) -> Iterator[Fitted]:
        """Yield plans of the best settings, the quickest first."""
        durable = [one for one in settings if one.job.store.commit_every == 1] or settings
        longest = _SLOWER * min((one.step_s for one in durable), default=0.0)
        useful = [one for one in durable if one.step_s <= longest]
        shown: list[Job] = []
        for title, among, key in (
            ("quickest", durable, _quickness),
            ("least memory", useful, lambda one: (_about(one.memory), _quickness(one))),
            ("longest life", settings, lambda one: (_about(one.written), _quickness(one))),
        ):
            for one in sorted(among, key=key)[:_TRIES]:
                if one.job in shown:
                    break
                found = self._plan(one.job)
                if found is not None and found.fits:
                    shown.append(one.job)
                    yield Fitted(
                        title=title,
                        plan=found,
                        is_exact=one.is_exact,
                        loses_steps=one.job.store.commit_every or 1,
                    )
                    break

    def _plan(self, job: Job) -> Plan | None:
        try:
            return self._planners[job.steps_on_gpu].plan(job)
        except BudgetError:  # Pages are larger than the search assumed.
            return None

    def better(self, job: Job, settings: Sequence[Setting]) -> list[Nearest]:
        """Return the smallest change of each part of the machines that makes a step shorter."""
        now = _quickest(settings).step_s
        found = [one for changes in _changes(job) for one in self._first(job, changes[:1])]
        return [one for one in found if one.step_s * _GAIN < now][:_NEAREST]

    def nearest(self, job: Job) -> list[Nearest]:
        """Return the smallest changes of the machines with which a job fits."""
        found, others = list[Nearest](), list[list[Change]]()
        for changes in _changes(job):
            alone = list(self._first(job, changes))
            found += alone
            others += [] if alone else [changes]
        for first, second in combinations(others, 2):  # One is not enough.
            if len(found) >= _NEAREST:
                break
            pairs = sorted(
                product(enumerate(first[::2]), enumerate(second[::2])),
                key=lambda pair: pair[0][0] + pair[1][0],
            )
            both = ((f"{a} and {b}", {**x, **y}) for (_, (a, x)), (_, (b, y)) in pairs)
            found += self._first(job, both)
        return found[:_NEAREST]

    def more_drives(self, job: Job, short: Sequence[Setting]) -> list[Nearest]:
        """Return the drives that last for the steps of a job.

        Args:
            job: the job, whose drives do not.
            short: the settings with which it fits.
        """
        if job.drives is None or job.steps is None:
            return []
        allowed = max(_steps_of(one) or math.inf for one in short)
        count = math.ceil(job.drives.count * job.steps / allowed)
        text = f"{count} drives in each node instead of {job.drives.count}"
        return list(self._first(job, [(text, {"drives": replace(job.drives, count=count)})]))

    def _first(self, job: Job, changes: Iterable[Change]) -> Iterator[Nearest]:
        """Yield the first change with which a job fits."""
        for text, changed in changes:
            try:
                settings = self.settings(replace(job, **changed))
                first = next(settings, None)
            except PlanError:
                continue
            if first is not None:
                best = _quickest([first, *settings])
                yield Nearest(change=text, step_s=best.step_s, written=best.written)
                return


def _lasts(setting: Setting) -> bool:
    """Return whether the drives endure the steps of the job."""
    allowed = _steps_of(setting)
    return allowed is None or (setting.job.steps or 1) <= allowed


def _steps_of(setting: Setting) -> float | None:
    """Return the steps that the drives endure; None if that is not known."""
    job, wear = setting.job, None
    if job.drives is not None:
        nbytes, step_s = setting.written * job.node_size, setting.step_s or 1.0
        wear = wear_of(job.drives, step_bytes=nbytes, step_s=step_s, used=job.wear)
    return steps_allowed(job, wear)


def _changes(job: Job) -> list[list[Change]]:
    """Return changes of each part of the machines, the smallest first."""
    drives, host, gpu = job.drives, job.host_memory or 0, job.gpu_memory or 0
    kinds: list[list[Change]] = []
    if job.checkpoints:
        kinds.append([("no published checkpoints", {"checkpoints": 0})])
    if drives is not None:
        counts = [drives.count + more for more in (1, 2, 4, 8, 16)]
        text = f"drives in each node instead of {drives.count}"
        kinds.append(
            [(f"{count} {text}", {"drives": replace(drives, count=count)}) for count in counts]
        )
    more_memory = [2**power * max(4 * _GIB, host // 8) for power in range(10)]
    kinds.append(
        [
            (f"{format_bytes(more)} more host memory", {"host_memory": host + more})
            for more in more_memory
        ]
    )
    if job.on_gpu:
        text = f"instead of {format_bytes(gpu)}"
        larger = [size for size in _GPU_GIB if size * _GIB > 1.1 * gpu]
        kinds.append(
            [(f"GPUs of {size} GiB {text}", {"gpu_memory": size * _GIB}) for size in larger]
        )
        text = f"GPUs in each node instead of {job.gpus}"
        kinds.append(
            [(f"{count} {text}", {"gpus": count}) for count in (2, 4, 8) if count > job.gpus]
        )
    nodes = [times * job.nodes for times in (2, 4, 8, 16)]
    kinds.append([(f"{count} nodes instead of {job.nodes}", {"nodes": count}) for count in nodes])
    return kinds


def options_of(job: Job) -> list[str]:
    """Return the settings of a job as options of ``tierstore plan``."""
    store = job.store
    states = [
        f"{name}={str(value).removeprefix('torch.')}" for name, value in job.optimizer.items()
    ]
    given = {
        "--partition": job.partition if job.world_size > 1 else None,
        "--expert-parallel": job.expert_parallel if job.expert_parallel > 1 else None,
        "--parameters-on": job.parameters_on if job.parameters_on != "gpu" else None,
        "--micro-tokens": job.micro_tokens,
        "--loss-tokens": job.loss_tokens,
        "--store-memory": size_text(store.host_memory),
        "--device-memory": size_text(store.device_memory) if store.device_memory else None,
        "--page-bytes": None if store.page_bytes is None else size_text(store.page_bytes),
        "--commit-every": store.commit_every if store.commit_every != 1 else None,
        "--step-on": store.step_on,
        "--offload-gradients": store.offload_gradients,
        "--set": " --set ".join(states) or None,
    }
    found = [f"{option} {value}" for option, value in given.items() if value is not None]
    return [*found, *(["--checkpointing"] if job.checkpointing else [])]


def _quickest(settings: Sequence[Setting]) -> Setting:
    durable = [one for one in settings if one.job.store.commit_every == 1]
    return min(durable or settings, key=_quickness)


def _about(value: float) -> int:
    """Return the same number for most values that differ by less than _GAIN."""
    return math.floor(math.log(max(1.0, value), _GAIN))


def _quickness(setting: Setting) -> float:
    return setting.step_s * _GAIN**setting.changes


def _without_settings(job: Job) -> Job:
    """Return a job without the settings that are searched.

    Raises:
        PlanError: a memory is not known, so that everything would fit, or no step is left.
    """
    missing = [
        name
        for name, value in (
            ("host_memory", job.host_memory),
            ("gpu_memory", job.gpu_memory if job.on_gpu else 0),
            ("tokens", job.tokens),
        )
        if value is None
    ]
    if missing:
        raise PlanError(
            f"what fits depends on {' and '.join(missing)}, which the job does not say: give "
            f"{'them' if len(missing) > 1 else 'it'}"
        )
    if job.wear >= min(1.0, job.endurance):
        raise PlanError(
            f"{job.wear:.0%} of the rated life of the drives is used, and {job.endurance:.0%} may "
            "be: take other drives, or allow more"
        )
    kept = {} if job.activation_bytes is None else {"micro_tokens": job.tokens_at_once}
    fresh: dict[str, Any] = {"checkpointing": False, "loss_tokens": None, "micro_tokens": None}
    return replace(
        job,
        store=StoreOptions(),
        parameters_on="gpu",
        expert_parallel=1,
        **(kept or fresh),
    )
