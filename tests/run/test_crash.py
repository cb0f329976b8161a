"""Kill -9 at any moment: a restart finds one committed step, whole, and goes on from it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import killed_processes, training

STEPS = 8


def check(
    directory: Path, scratch: Path, seeds: list[int], acknowledged: int, directories: int = 1
) -> int:
    """Check that a restart finds a step of this history that is not older than promised."""
    step, state, extra = killed_processes.look(directory, scratch, directories)
    # The last commit() that returned, or the one before it, or one whose news was lost.
    assert acknowledged - 1 <= step <= acknowledged + 1
    training.assert_identical(state, killed_processes.state_after(tuple(seeds[:step])))
    assert (extra["step"] if step else 0) == step
    return step


def crash_twice(
    directory: Path, scratch: Path, kills: list[int | float], directories: int = 1
) -> None:
    """Train, be killed, go on with other gradients, be killed again, go on to the end.

    A kill is the number of a storage operation, or seconds after the first step.
    """
    options = {"directories": directories}
    seeds = [0] * STEPS
    found = 0
    for attempt, kill in enumerate(kills):
        seeds = seeds[:found] + [attempt] * (STEPS - found)
        at = kill if isinstance(kill, int) else 0
        with killed_processes.process(directory, STEPS, attempt, kill_at=at, **options) as (
            child,
            receiver,
        ):
            if isinstance(kill, float):
                receiver.poll(None)
                child.join(kill)
                child.kill()
            child.join()
            told = [step for step in killed_processes.news(receiver) if step != "closed"]
        found = check(directory, scratch, seeds, max(told, default=found), directories)
    seeds = seeds[:found] + [9] * (STEPS - found)
    with killed_processes.process(directory, STEPS, 9, **options) as (child, receiver):
        child.join()
        assert killed_processes.news(receiver)[-1] == "closed"
    assert check(directory, scratch, seeds, STEPS, directories) == STEPS


def half(points: range) -> list[Any]:
    """Points. Every second point is for the long tests."""
    return [
        pytest.param(point, marks=pytest.mark.long) if index % 2 else point
        for index, point in enumerate(points)
    ]


def random_kills(count: int) -> list[list[float]]:
    generator = random.Random(20)
    return [[generator.uniform(0, 0.12), generator.uniform(0, 0.12)] for _ in range(count)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("kills", random_kills(10))
def test_killed_at_random_moments(kills: list[float], tmp_path: Path) -> None:
    crash_twice(tmp_path / "run", tmp_path / "copy", list(kills))


@pytest.mark.long
@pytest.mark.parametrize("kills", random_kills(100)[10:])
def test_killed_at_more_random_moments(kills: list[float], tmp_path: Path) -> None:
    crash_twice(tmp_path / "run", tmp_path / "copy", list(kills))


# Opening a new run, its first step and the first commits are about 40 operations, told
# before and after; a recovery is about 10, then its commits follow.
@pytest.mark.quick(1)
@pytest.mark.parametrize("second", [3, 9, 14, 20])
@pytest.mark.parametrize("first", half(range(1, 60, 4)))
def test_killed_at_each_point(first: int, second: int, tmp_path: Path) -> None:
    crash_twice(tmp_path / "run", tmp_path / "copy", [first, second])


# With three directories the same takes about three times as many.
@pytest.mark.quick(1)
@pytest.mark.parametrize("second", [9, 35])
@pytest.mark.parametrize("first", half(range(1, 180, 11)))
def test_killed_at_each_point_over_several_directories(
    first: int, second: int, tmp_path: Path
) -> None:
    crash_twice(tmp_path / "run", tmp_path / "copy", [first, second], directories=3)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1, 180, 12))
def test_killed_at_more_points_over_several_directories(first: int, tmp_path: Path) -> None:
    """A twelfth of first points with one second one each; all pairs would take hours."""
    second = 1 + 37 * first % 90
    crash_twice(tmp_path / "run", tmp_path / "copy", [first, second], directories=3)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1, 60, 3))
def test_killed_at_each_point_of_commit_and_recovery(first: int, tmp_path: Path) -> None:
    """Every third first point, with a tenth of the second ones."""
    for second in range(1 + first % 10, 31, 10):
        crash_twice(tmp_path / f"run-{second}", tmp_path / "copy", [first, second])


def test_synchronized_step_is_found(tmp_path: Path) -> None:
    with killed_processes.process(tmp_path / "run", STEPS, 0, synchronize=True) as (
        child,
        receiver,
    ):
        steps = [receiver.recv() for _ in range(3)]
        child.kill()
        child.join()
        steps += killed_processes.news(receiver)
    step, _, _ = killed_processes.look(tmp_path / "run", tmp_path / "copy")
    assert step >= max(step for step in steps if step != "closed")


def test_never_killed(tmp_path: Path) -> None:
    with killed_processes.process(tmp_path / "run", STEPS, 0) as (child, receiver):
        child.join()
        assert killed_processes.news(receiver) == [*range(1, STEPS + 1), "closed"]
    assert check(tmp_path / "run", tmp_path / "copy", [0] * STEPS, STEPS) == STEPS


def test_kill_leaves_the_lock_free(tmp_path: Path) -> None:
    with killed_processes.process(tmp_path / "run", 1000, 0) as (child, receiver):
        receiver.recv()
        child.kill()
        child.join()
    started = time.monotonic()
    killed_processes.open_store(tmp_path / "run").close()
    assert time.monotonic() - started < 20  # A held lock is waited for, for 30 s.
    assert torch.get_num_threads() == 1
