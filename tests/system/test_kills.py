"""Kills at system calls: a restart finds what was acknowledged, and so do all checkpoints."""

from __future__ import annotations

import errno
import math
import shutil
from pathlib import Path

import pytest

from tests.support.disturbed_runs import ENGINES, PROGRAMS, Case
from tests.support.system_calls import KILL, Call


class Kill:
    """Ends the process before the n-th call that changes something; 0 for never.

    Args:
        number: of the call.
        links: whether files can be linked; otherwise checkpoints are copied.
    """

    def __init__(self, number: int, *, links: bool) -> None:
        self.calls = 0
        self._number = number
        self._links = links

    def __call__(self, call: Call) -> int | str | None:
        self.calls += 1
        if self.calls == self._number:
            return KILL
        return errno.EXDEV if call.name in ("link", "linkat") and not self._links else None


def run(case: Case, kill_at: int, *, links: bool) -> int:
    """Run a process that is killed, unless it makes fewer calls; return how many it makes."""
    kill = Kill(kill_at, links=links)
    outcome = case.run(kill, only_changes=True)
    assert case.promises.errors == []
    assert bool(outcome.exitcode) == (kill.calls == kill_at)
    return kill.calls


def count_calls(directory: Path, name: str, engine: str) -> int:
    """Run a program to its end; return the number of its calls."""
    case = Case(directory, name, engine)
    calls = run(case, 0, links=name != "copy")
    case.check()
    return calls


def kill_twice(scratch: Path, name: str, engine: str, firsts: range, calls: int) -> int:
    """Kill a run at each of these calls, and then once more; return the number of kills."""
    # So that second kills are also spread over all calls of a process.
    stride = next(n for n in range(round(calls * 0.618), calls) if math.gcd(n, calls) == 1)
    kills = 0
    for first in firsts:
        case = Case(scratch / f"{first}", name, engine)
        for number in (first, 1 + first * stride % calls):
            kills += run(case, number, links=name != "copy") == number
        case.check()
        shutil.rmtree(scratch / f"{first}")
    return kills


@pytest.mark.quick(2)
@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kills(name: str, engine: str, tmp_path: Path) -> None:
    """One call of each program, another one with each engine, and one after it."""
    first = 150 + 250 * ENGINES.index(engine)
    kill_twice(tmp_path, name, engine, range(first, first + 1), 800)


EVERY = 27


@pytest.mark.long
@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kills_at_all_calls(name: str, engine: str, tmp_path: Path) -> None:
    """Every 27th call of each program, other ones with each engine."""
    calls = count_calls(tmp_path / "undisturbed", name, engine)
    begin = 1 + ENGINES.index(engine) * EVERY // len(ENGINES)
    firsts = range(begin, calls + 1, EVERY)
    kills = kill_twice(tmp_path, name, engine, firsts, calls)
    # Threads may make a few calls more or less, so that the last one may not come.
    assert kills >= 1.5 * len(firsts)
