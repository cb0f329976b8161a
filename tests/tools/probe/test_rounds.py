"""Rounds of a measurement, on a clock that the test sets."""

from __future__ import annotations

import time

import pytest

from tierstore.tools.probe.result import Rate
from tierstore.tools.probe.rounds import measured


class Clock:
    """A clock that only rounds advance, each by its own seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
        self.now = 100.0
        self._seconds = iter(seconds)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def one_round(self) -> int:
        self.now += next(self._seconds)
        return 64


def test_a_rate_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, [0.25, 0.125, 0.5, 0.25, 0.0625])
    assert measured(clock.one_round) == Rate(256.0, 128.0, 1024.0, 5)


def test_no_round_begins_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(Clock(monkeypatch, [2.0]).one_round) == Rate(32.0, 32.0, 32.0, 1)
    clock = Clock(monkeypatch, [0.5, 1.0])
    assert measured(clock.one_round, 1.5) == Rate(96.0, 64.0, 128.0, 2)
