"""A rank that dies, fails or is stuck as it trains: the others say so soon, and nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_programs import faults as program
from tests.rank_programs.checks import assert_as_one_process
from tests.rank_programs.faults import Durable, FailAt, Restored, Wrong
from tests.rank_programs.job import Failure, Job, running
from tests.rank_programs.training import SHAPES, Case, Tensors, one_process
from tests.support.faults import Fault
from tests.support.rank_pool import RankPool

WORLD_SIZE = 3
PATIENCE_S = 60.0
# Four of them are for a key-value store whose process is stopped, and one to close without it.
SOON_S = 7.0
PATIENCE_WITH_STUCK_S = 3.0

LAYOUTS = [("rows", "auto"), ("plain", "by_parameter"), ("plain", "flat"), ("fsdp", "auto")]


@functools.cache
def parameters_after(step: int) -> Tensors:
    return one_process(SHAPES, {}, step)[0]


class Training:
    """The ranks of one training, as the test sees them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = self.durable = 0

    def receive(self, rank: int) -> Any:
        """The next message of a rank."""
        message = self.job.receive(rank)
        if isinstance(message, Durable):
            self.durable = max(self.durable, message.step)
        elif isinstance(message, int):
            self.begun = max(self.begun, message)
        return message

    def until(self, rank: int, step: int) -> float:
        """Wait until a rank begins a step; return how many seconds the one before took."""
        began: list[float] = []
        while True:
            message = self.receive(rank)
            if isinstance(message, int):
                began.append(time.monotonic())
            if message == step:
                return began[-1] - began[-2]

    def hear_out(self, rank: int) -> None:
        """Receive the messages that a dead rank had sent."""
        with contextlib.suppress(EOFError):
            while self.job.connections[rank].poll():
                self.receive(rank)

    def end(self, rank: int) -> Failure:
        """Return the error that ended the training of a rank."""
        while isinstance(message := self.receive(rank), int | Durable):
            pass
        assert isinstance(message, Failure), message
        return message


def case_of(seed: int, directory: Path, timeout: float = PATIENCE_S) -> Case:
    layout, partition = LAYOUTS[seed % len(LAYOUTS)]
    return Case(
        layout=layout,
        directory=directory / "run",
        store={"page_bytes": 6000, "buffers": 5, "timeout": timeout},
        options={"partition": partition},
    )


def training(case: Case, wrong: Wrong | None = None, culprit: int = 0) -> Any:
    return running(program.train_until, WORLD_SIZE, case, wrong, culprit)


def assert_others_fail(
    ranks: Training, culprit: int, since: float, *, timeout_s: float = 0.0
) -> None:
    others = [rank for rank in range(WORLD_SIZE) if rank != culprit]
    failures = [ranks.end(rank) for rank in others]
    for failure in failures:
        assert failure.rank == culprit, failure
        assert failure.at - since < timeout_s + SOON_S, failure
    ranks.job.exit_seconds(*others)


def assert_goes_on(ranks: Training, case: Case, pool: RankPool) -> None:
    """From one step that all ranks have, no older than the newest that any knew to be durable."""
    found: list[Restored] = pool.run(WORLD_SIZE, "tests.rank_programs.faults:go_on", case)
    (step,) = {each.step for each in found}
    assert ranks.durable <= step <= ranks.begun
    expected = parameters_after(step)
    for each in found:
        assert each.extra == ({"step": step} if step else None)
        for name, values in each.values.items():
            at = each.trained.positions[name]
            assert torch.equal(values, expected[name].flatten()[at]), (name, step)
    trained = [each.trained for each in found]
    last = step + program.GOES_ON
    assert_as_one_process(trained, SHAPES, one_process(SHAPES, {}, last), order=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 30))]
)
def test_killed_at_any_moment(seed: int, pool: RankPool, tmp_path: Path) -> None:
    draw = random.Random(seed)
    culprit, step, part = draw.randrange(WORLD_SIZE), draw.randint(2, 10), draw.random()
    case = case_of(seed, tmp_path)
    with training(case) as job:
        ranks = Training(job)
        took = ranks.until(culprit, step)
        time.sleep(part * took)  # Anywhere within a step and its commit.
        job.processes[culprit].kill()
        assert_others_fail(ranks, culprit, time.monotonic())
        ranks.hear_out(culprit)
    assert_goes_on(ranks, case, pool)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_stopped_at_any_moment(seed: int, pool: RankPool, tmp_path: Path) -> None:
    """It is taken for stuck when it lets the others wait for too long."""
    draw = random.Random(100 + seed)
    culprit, step, part = draw.randrange(WORLD_SIZE), draw.randint(2, 10), draw.random()
    case = case_of(seed, tmp_path, timeout=PATIENCE_WITH_STUCK_S)
    with training(case) as job:
        ranks = Training(job)
        took = ranks.until(culprit, step)
        time.sleep(part * took)
        pid = job.processes[culprit].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert_others_fail(ranks, culprit, time.monotonic(), timeout_s=PATIENCE_WITH_STUCK_S)
        job.processes[culprit].kill()
        job.processes[culprit].join()
        ranks.hear_out(culprit)
    assert_goes_on(ranks, case, pool)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("operation", "call", "culprit"),
    [
        ("read", 2, 1),
        ("flush", 1, 0),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("read", 9, 0),
                ("write", 1, 2),
                ("write", 7, 0),
                ("flush", 2, 2),
                ("put", 1, 1),
                ("rename", 2, 2),
                ("sync_directory", 1, 1),
                ("sync_directory", 2, 0),
                ("unlink", 1, 1),
                ("is_shared", 3, 2),
            ]
        ),
    ],
)
def test_an_error_of_one_rank(
    operation: str, call: int, culprit: int, pool: RankPool, tmp_path: Path
) -> None:
    case = case_of(call + culprit, tmp_path)
    with training(case, FailAt(5, Fault("error", operation, call=call)), culprit) as job:
        ranks = Training(job)
        failure = ranks.end(culprit)
        assert failure.rank == culprit
        assert "errno 5" in failure.reason
        others = [rank for rank in range(WORLD_SIZE) if rank != culprit]
        for rank in others:
            heard = ranks.end(rank)
            assert heard.rank == culprit
            assert "errno 5" in heard.reason
            assert heard.at - failure.at < SOON_S
        job.exit_seconds(*range(WORLD_SIZE))
    assert_goes_on(ranks, case, pool)
