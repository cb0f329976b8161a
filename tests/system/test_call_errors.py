"""Errors of system calls: each is an error of tierstore, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.support.disturbed_runs import ENGINES, PROGRAMS, Case
from tests.support.interrupted_run import AFTER_ERROR
from tests.support.system_calls import Call

ERRORS = (errno.EIO, errno.ENOSPC)


class Fail:
    """Has calls fail.

    io_uring_enter() is not among them. It has no such errors: errors of transfers are in the
    ring, and after any other error the process aborts.

    Args:
        number: of the call, counted from 1; 0 for none.
        error: its errno.
        lasting: whether all later calls that change something also fail.
    """

    def __init__(self, number: int, error: int, *, lasting: bool = False) -> None:
        self.calls = 0
        self.failed: list[Call] = []
        self._left = number
        self._error = error
        self._lasting = lasting

    def __call__(self, call: Call) -> int | None:
        if call.name == "io_uring_enter":
            return None
        self.calls += 1
        self._left -= 1
        if self._left == 0 or (self._left < 0 and self._lasting and call.changes):
            self.failed.append(call)
            return self._error
        return None


def fail(
    scratch: Path, name: str, engine: str, numbers: range, *, lasting: bool = False
) -> tuple[int, int]:
    """Have each of these calls fail in a run of its own.

    Returns:
        The number of calls that failed, and the number of runs that told of an error.
    """
    failed = told = 0
    for index, number in enumerate(numbers):
        case = Case(scratch / f"{number}", name, engine)
        variant = index + number
        rule = Fail(number, ERRORS[variant % len(ERRORS)], lasting=lasting)
        after = AFTER_ERROR[variant % len(AFTER_ERROR)]
        try:
            case.run(rule, after_error=after)
            failed += bool(rule.failed)
            told += bool(case.promises.errors)
            case.promises.errors.clear()
            case.check()
        except BaseException as error:
            error.add_note(f"call {number}, {rule.failed[:1]}, then {after}")
            raise
        shutil.rmtree(scratch / f"{number}")
    return failed, told


def count_calls(scratch: Path, name: str, engine: str) -> int:
    """Run a program to its end; return the number of its calls."""
    case = Case(scratch / "undisturbed", name, engine)
    rule = Fail(0, 0)
    case.run(rule)
    assert case.promises.errors == []
    return rule.calls


@pytest.mark.quick(1)
@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors(name: str, engine: str, tmp_path: Path) -> None:
    """One call of each program, another one with each engine."""
    number = 220 + 300 * ENGINES.index(engine)
    fail(tmp_path, name, engine, range(number, number + 1))


@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize("engine", ENGINES)
def test_lasting_errors(engine: str, tmp_path: Path) -> None:
    fail(tmp_path, "train", engine, range(400, 401), lasting=True)


class FailOn:
    """Has the first call of this kind on this file fail, counted from the n-th one.

    Args:
        name: of the call.
        place: how the path of the file ends.
        number: of the call, counted from 1.
    """

    def __init__(self, name: str, place: str, number: int = 1) -> None:
        self._name = name
        self._place = place
        self._left = number

    def __call__(self, call: Call) -> int | None:
        if call.name == self._name and call.place.endswith(self._place):
            self._left -= 1
            return errno.EIO if self._left == 0 else None
        return None


@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize(
    ("name", "call", "place", "number"),
    [
        ("train", "newfstatat", "/rank-00000", 9),
        ("striped", "newfstatat", "/run/1/rank-00000", 13),
        *(("reshard", "openat", "/run", number) for number in (3, 4, 5)),
        ("reshard", "newfstatat", "/resharded", 1),
        ("reshard", "openat", "/resharded/unpaged", 3),
    ],
)
def test_errors_of_single_calls(
    name: str, call: str, place: str, number: int, tmp_path: Path
) -> None:
    case = Case(tmp_path / "case", name, "auto")
    case.run(FailOn(call, place, number))
    assert case.promises.errors
    case.promises.errors.clear()
    case.check()


EVERY = 81


@pytest.mark.long
@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors_of_all_calls(name: str, engine: str, tmp_path: Path) -> None:
    """Every 81st call of each program, other ones with each engine."""
    begin = 1 + ENGINES.index(engine) * EVERY // len(ENGINES)
    numbers = range(begin, count_calls(tmp_path, name, engine) + 1, EVERY)
    failed, told = fail(tmp_path, name, engine, numbers)
    # Threads may make a few calls more or less. Some errors change nothing.
    assert failed >= 0.9 * len(numbers)
    assert told >= 0.5 * len(numbers)


@pytest.mark.long
@pytest.mark.usefixtures("watched_calls")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_lasting_errors_of_all_calls(name: str, engine: str, tmp_path: Path) -> None:
    begin = 1 + 30 * ENGINES.index(engine)
    numbers = range(begin, count_calls(tmp_path, name, engine) + 1, 90)
    failed, told = fail(tmp_path, name, engine, numbers, lasting=True)
    assert min(failed, told) >= 0.9 * len(numbers)
