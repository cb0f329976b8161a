"""Median and spread of repeated measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from tierstore.tools.probe.result import Rate

ROUNDS = 5
SECONDS_MAX = 1.5
"""After this time no further round is started."""


def rate_of(values: Sequence[float]) -> Rate:
    """Return median and spread of one value or more."""
    return Rate(statistics.median(values), min(values), max(values), len(values))


def measured(one_round: Callable[[], int], seconds_max: float = SECONDS_MAX) -> Rate:
    """Return the bytes per second of rounds. A round returns its number of bytes."""
    began = time.perf_counter()
    rates: list[float] = []
    while len(rates) < ROUNDS and (not rates or time.perf_counter() - began < seconds_max):
        started = time.perf_counter()
        nbytes = one_round()
        rates.append(nbytes / (time.perf_counter() - started))
    return rate_of(rates)
