"""One screen about a plan: does it fit, how long is a step, how long do drives last, what helps."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tierstore.tools.cli.output import folded, plain, table
from tierstore.tools.plan.drives import SECONDS_PER_DAY
from tierstore.tools.plan.wording import days_text, seconds_text, short_text
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.plan.fit import Fit
    from tierstore.tools.plan.memory import Need
    from tierstore.tools.plan.plan import Plan
    from tierstore.tools.plan.rates import Rates

_BAR = 24
_PARTS_MAX = 4


def screen(found: Plan) -> Iterator[str]:
    """Yield the lines of a plan, in the order of a person's questions."""
    yield heading(found)
    yield ""
    yield from memory_lines(found)
    yield ""
    yield from time_lines(found)
    yield from wear_lines(found)
    if found.changes:
        yield ""
        yield from table(
            {
                "what would help": lambda one: one.change,
                "step": lambda one: seconds_text(one.step_s),
                "gain": lambda one: seconds_text(max(0.0, found.time.seconds - one.step_s)),
                "drives last": lambda one: days_text(one.days),
            },
            found.changes,
            right=("step", "gain", "drives last"),
        )
    if len(found.beside) > 1:
        yield ""
        yield from table(
            {
                "beside": lambda one: one.algorithm,
                "step": lambda one: seconds_text(one.step_s),
                "state": lambda one: format_bytes(one.state_bytes),
                "written a step": lambda one: format_bytes(round(one.written_bytes)),
                "drives last": lambda one: days_text(one.days),
            },
            found.beside,
            right=("step", "state", "written a step", "drives last"),
        )
    yield ""
    yield from doubt_lines(found)


def heading(found: Plan) -> str:
    """Return the model and machines of a plan."""
    count, partition = short_text(found.model.parameter_count), found.job.partition
    return plain(
        f"{found.model.name}: {count} parameters, {found.algorithm}, {found.job.describe()}, "
        f"{partition if found.job.world_size > 1 else 'one rank'}"
    )


def memory_lines(found: Plan) -> Iterator[str]:
    """Yield whether a plan fits, and a bar for each memory."""
    short = [_whose(need) for need in found.needs if not need.fits]
    yield f"DOES NOT FIT: {', '.join(short)}" if short else "It fits."
    for need in found.needs:
        share = min(1.0, need.nbytes / need.limit) if need.limit else 0.0
        bar = "#" * math.ceil(_BAR * share)
        limit = "" if need.limit is None else f" of {format_bytes(need.limit)}"
        parts = sorted(need.parts.items(), key=lambda item: -item[1])
        names = [f"{part} {format_bytes(nbytes)}" for part, nbytes in parts[:_PARTS_MAX]]
        rest = sum(nbytes for _, nbytes in parts[_PARTS_MAX:])
        names += [f"other {format_bytes(rest)}"] if rest else []
        yield f"  {_whose(need):<14} |{bar:<{_BAR}}| {format_bytes(need.nbytes)}{limit}"
        yield from folded(", ".join(names), sys.stdout, margin=" " * 18)


def time_lines(found: Plan) -> Iterator[str]:
    """Yield how long a step is, and what a day brings."""
    time, job = found.time, found.job
    busy = [(name, seconds) for name, seconds in found.busy.items() if seconds]
    if not found.is_timed:
        yield (
            f"A step takes at least {seconds_text(time.seconds)}, without the computation of the "
            "optimizer, which is not known."
        )
    elif time.seconds:
        of = "" if job.tokens is None else f" of {short_text(job.tokens)} tokens"
        model = f"forward and backward {seconds_text(time.model_s)}, " if found.model_s else ""
        yield (
            f"A step{of} takes {seconds_text(time.seconds)}: {model}paging and commits add "
            f"{seconds_text(time.exposed_s)}."
        )
        yield f"Busy: {', '.join(f'{name} {seconds_text(value)}' for name, value in busy)}."
        steps = SECONDS_PER_DAY / time.seconds
        tokens = "" if job.tokens is None else f", {short_text(steps * job.tokens)} tokens"
        if found.model_s is not None:
            yield f"A day has {steps:,.0f} steps{tokens}."
        yield _free_line(found)
    if found.model_s is None:
        missing = "--tflops" if job.tokens else "--tokens and --tflops"
        yield f"Forward and backward are left out: pass {missing}."


def _free_line(found: Plan) -> str:
    if found.free_model_s is None:
        return "Paging is never free: drives or commits are too slow."
    if found.free_model_s == 0:
        return "Paging is free beside any step."
    tokens = found.free_tokens
    beside = f"forward and backward of {seconds_text(found.free_model_s)} or more"
    return f"Paging is free (2% or less) beside {beside}" + (
        "." if tokens is None else f", which is {short_text(tokens)} tokens a step."
    )


def at_least(found: Plan) -> str:
    """Return a prefix for times that lack the computation of the optimizer."""
    return "" if found.is_timed else "at least "


def wear_lines(found: Plan) -> Iterator[str]:
    """Yield how long the drives last."""
    job, wear, steps = found.job, found.wear, found.steps_allowed
    if wear is None:
        yield "How long the drives last is unknown: name them with --drives."
        return
    most = "" if found.is_timed else "at most "
    yield (
        f"Each node writes {most}{format_bytes(round(wear.bytes_per_day))} a day, "
        f"{most}{wear.drive_writes_per_day:.3g} drive writes per day."
    )
    if steps is None:
        yield "How long the drives last is unknown: name their endurance, as 1DWPD or 7PBW."
    elif math.isinf(steps):
        yield "Nothing is written to the drives."
    else:
        share = "" if job.endurance == 1 else f" to {100 * job.endurance:g}% of their rated life"
        days = f", {days_text(found.days)}" if found.is_timed else ""
        yield f"The drives last{share} {steps:,.0f} steps{days}."
    if not found.lasts:
        run = "no step is left" if job.steps is None else f"the run has {job.steps:,} steps"
        yield (
            f"NOT ALLOWED: {run}: commit less often with the state in memory, or take more or "
            "better drives."
        )


def doubt_lines(found: Plan) -> Iterator[str]:
    """Yield uncertain inputs, the most important first, and how far plans were from runs."""
    from tierstore.tools.plan.doubts import doubts, errors_of_plans

    yield from doubts(found)
    if found.rates.assumed:
        yield f"Assumed: {'; '.join(found.rates.assumed)}."
    yield errors_of_plans(found.job)


def advice(found: Plan, rates: Mapping[bool, Rates], nvme_bytes: int | None) -> Iterator[str]:
    """Yield options that make a job fit, or the nearest machine."""
    from tierstore.tools.plan.fit import fit_job, options_of

    job = found.job
    if found.fits or None in (job.host_memory, job.tokens, job.gpu_memory or not job.on_gpu):
        return
    fitting = fit_job(found.model, job, rates, algorithm=found.algorithm, nvme_bytes=nvme_bytes)
    yield ""
    if fitting.plans:
        best = fitting.plans[0].plan
        options, step = " ".join(options_of(best.job)), seconds_text(best.time.seconds)
        yield f"It fits with {options}: {step} a step."
    else:
        yield from nearest_lines(fitting)


def nearest_lines(found: Fit) -> Iterator[str]:
    """Yield the nearest machines for a job that does not fit with any settings."""
    if found.is_worn_out:
        yield f"It fits, but wears the drives out before {found.job.steps:,} steps."
    else:
        yield "No settings make it fit on these machines."
    steps = [f"{one.change}, {seconds_text(one.step_s)} a step" for one in found.nearest]
    yield f"It fits with {'; or with '.join(steps)}." if steps else "Larger ones were also tried."


def _whose(need: Need) -> str:
    return {"GPU": "one GPU", "host": "host memory"}.get(need.place, "drives")
