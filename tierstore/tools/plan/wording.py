"""Numbers of a plan as text for people: seconds, days, counts."""

from __future__ import annotations

import math


def seconds_text(value: float | None) -> str:
    """Return seconds with three digits: ``"77.8 s"``, ``"1,288 s"``, ``"12.5 ms"``."""
    if value is None:
        return "unknown"
    if value < 1e-6:
        return "0 s"
    if value >= 99.95:
        return f"{value:,.0f} s"
    number, unit = (value, "s") if value >= 0.9995 else (1000 * value, "ms")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def days_text(days: float | None) -> str:
    """Return days as hours, days or years: ``"9.5 hours"``, ``"18 days"``, ``"4.2 years"``."""
    if days is None:
        return "unknown"
    if math.isinf(days):
        return "for ever"
    if days < 2:
        return f"{24 * days:.1f} hours"
    if days < 730:
        return f"{days:.0f} days"
    years = days / 365
    return f"{years:.1f} years" if years < 100 else f"{years:,.0f} years"


def short_text(number: float) -> str:
    """Return a count with three digits and a letter: ``"8.03B"``, ``"500k"``."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if float(f"{number / scale:.3g}") >= 1:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"
