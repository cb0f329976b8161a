"""Curves of a plan: the step against the tokens of a step, and against the drives of a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tierstore.tools.plan.plan import Plan
from tierstore.tools.plan.step import formula_of

_POINTS = 12
_MARGIN = 4.0
"""The first curve goes from its smallest mark divided by this to its largest mark times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One step of a curve."""

    x: float
    step_s: float
    resident_s: float
    """Seconds of the same step with all state in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The step of a plan as a function of the job."""

    by_model: Sequence[Point]
    """Against the tokens of a step, or against seconds of forward and backward."""
    in_tokens: bool
    by_drives: Sequence[Point]
    """Against the drives of a node, or against multiples of them if the job does not name them;
    empty without rates of drives.
    """


def curves(found: Plan) -> Curves:
    """Return the curves of a plan; each point is a step of the formula."""
    marks = [value for value in (found.model_s, found.free_model_s) if value]
    marks = marks or [found.time.resident_s or 1.0]
    in_tokens = tokens_of(found, 1.0) is not None
    by_model = []
    for model_s in _log_spaced(min(marks) / _MARGIN, max(marks) * _MARGIN):
        time = found.formula.step(model_s)
        x = tokens_of(found, model_s) if in_tokens else model_s
        by_model.append(Point(x=x or 0.0, step_s=time.seconds, resident_s=time.resident_s))
    return Curves(by_model=by_model, in_tokens=in_tokens, by_drives=list(_by_drives(found)))


def tokens_of(found: Plan, model_s: float) -> float | None:
    """Return the tokens of a step with that much forward and backward; None if not known."""
    return found.job.tokens_in(model_s, found.model.active_count)


def _by_drives(found: Plan) -> Iterable[Point]:
    disk = found.rates.disk
    if disk is None:
        return
    now = found.job.drives.count if found.job.drives else 1
    stride = -(-2 * now // 16)  # Points are few however many drives there are.
    for count in sorted({now, *range(stride, max(8, 2 * now) + 1, stride)}):
        rates = replace(found.rates, disk=disk.scaled(count / now))
        time = formula_of(found.ranks, rates).step(found.model_s or 0.0)
        yield Point(x=count, step_s=time.seconds, resident_s=time.resident_s)


def _log_spaced(low: float, high: float) -> list[float]:
    return [low * (high / low) ** (at / (_POINTS - 1)) for at in range(_POINTS)]
