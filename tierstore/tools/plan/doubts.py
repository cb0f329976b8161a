"""Doubts about a plan: inputs that are not known well, and errors of earlier plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tierstore.tools.plan.job import Job
from tierstore.tools.plan.memory import job_activations
from tierstore.tools.plan.plan import Plan
from tierstore.tools.plan.step import formula_of
from tierstore.tools.plan.wording import seconds_text
from tierstore.units import format_bytes

LEAST, MOST = 0.75, 1.5
"""Activations that other kernels and layers keep, for each byte that is estimated."""
_CHANGE = 0.05
"""An input matters if a step without half of it is this much longer."""


def doubts(found: Plan) -> Iterator[str]:
    """Yield sentences on the inputs of a plan that are not measured, the most important first."""
    effects = []
    now_s, model_s = found.time.seconds, found.model_s or 0.0
    if found.is_timed and now_s:
        if found.job.flops is not None and found.job.model_s is None:
            slower_s = found.formula.step(2 * model_s).seconds
            effects.append((slower_s, "the TFLOP/s of forward and backward"))
        if found.rates.disk is not None:
            halved = replace(found.rates, disk=found.rates.disk.scaled(0.5))
            slower_s = formula_of(found.ranks, halved).step(model_s).seconds
            effects.append((slower_s, "the rates of the drives"))
    matter = [one for one in sorted(effects, reverse=True) if one[0] > (1 + _CHANGE) * now_s]
    if matter:
        steps = ", ".join(f"{seconds_text(slower)} at half of {name}" for slower, name in matter)
        yield f"What matters most: a step takes {steps}."
    job = found.job
    known = job_activations(job, found.model)
    if known is None:
        yield "Activations are left out: pass --tokens, or --activations."
    elif job.activation_bytes is None:
        nbytes = known.kept + max(known.in_layer, known.logits)
        yield (
            f"Activations are estimated from shapes: {format_bytes(round(LEAST * nbytes))} to "
            f"{format_bytes(round(MOST * nbytes))} with other kernels."
        )


def errors_of_plans(job: Job) -> str:
    """Return how far plans were from runs, as ``bench/plan.py`` and ``bench/fit.py`` found."""
    text = (
        "in 26 runs on 2 cores and a virtual disk, bytes were within 0.1%, peak memory within 14%, "
        "and steps 10% off in the median, 30% at most"
    )
    if job.on_gpu:
        return f"How far plans were from runs: not compared on a GPU yet; without one, {text}."
    return f"How far plans were from runs: {text}."
