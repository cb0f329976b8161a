from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.rank_programs import job as programs
from tests.rank_programs.job import Failure, Job, Waiting, Wrong, running
from tierstore.ranks.failure_detector import ACCUSE_S
from tierstore.ranks.job import FRAME_BYTES, ProcessGroupRanks

# What is measured is a hundredth of it, or the second that a rank has to answer in.
SOON_S = 5.0
# Half a second goes to the interpreter. A thread that waits for gloo takes PATIENCE_S or more.
EXIT_S = 15.0


# ---------------------------------------------------------------------------- all is well


@pytest.mark.quick(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_come_in_order_of_rank(world_size: int) -> None:
    values = [3, None, {"a": (1, 2.5)}, ["text"]][:world_size]
    with running(programs.gather, world_size, values) as job:
        assert job.results() == [[values, values]] * world_size


def test_large_values_come_whole() -> None:
    n = programs.LARGE_BYTES
    expected = [
        [(n, {0}), (n + 1, {1}), (n + 2, {2})],
        [(1, {0}), (1, {1}), (1, {2})],
        [(0, set()), (n, {1}), (0, set())],
    ]
    with running(programs.gather_large, 3) as job:
        assert job.results() == [expected] * 3


def test_values_around_the_size_of_a_frame_come_whole() -> None:
    sizes = range(FRAME_BYTES - 50, FRAME_BYTES + 10)
    with running(programs.gather_around, 2, sizes) as job:
        assert job.results() == [[[n, n + 1] for n in sizes]] * 2


def test_two_threads_gather_at_once() -> None:
    rounds = 200
    expected = {
        name: [[(name, rank, number) for rank in range(2)] for number in range(rounds)]
        for name in ("training", "commits")
    }
    with running(programs.gather_at_once, 2, rounds) as job:
        assert job.results() == [expected] * 2


@pytest.mark.parametrize("failing", [0, 2])
def test_what_one_rank_cannot_do_raises_on_all_and_breaks_nothing(failing: int) -> None:
    here = repr(ValueError("no room"))
    there = f"PeerFailed('rank {failing} failed: no room')"
    with running(programs.agree_to_fail, 3, failing) as job:
        for rank, (errors, gathered) in enumerate(job.results()):
            assert errors == [here if rank == failing else there] * 2
            assert gathered == [0, 1, 2]


@pytest.mark.long
def test_wait_returns_what_was_exchanged() -> None:
    with running(programs.exchange, 3, [0, 2]) as job:
        assert job.results() == [[0.0, 20.0], None, [1.0, 21.0]]


@pytest.mark.long
def test_a_part_of_the_world_opens_twice() -> None:
    with running(programs.open_within, 3, [1, 2], 2) as job:
        message, *inside = job.results()
    assert "global rank 0 is not in the process group" in message
    assert inside == [[([1, 2], [(0, 1), (1, 2)], 2.0)] * 2] * 2


def test_a_part_of_the_world_whose_ranks_are_in_unequal_groups_is_refused() -> None:
    with running(programs.open_within_unequal, 3) as job:
        first, second, _ = job.results()
    assert first == second
    assert "[2, 3] process groups" in first


def test_unlike_groups_are_refused_on_all_ranks() -> None:
    with running(programs.ask_for_unlike_groups, 2) as job:
        for message, gathered in job.results():
            assert "all ranks must ask for the same group" in message
            assert gathered == [0, 1]


@pytest.mark.long
def test_ranks_can_be_made_again() -> None:
    opened = [[(0, number), (1, number)] for number in range(3)]
    with running(programs.open_again, 2, 3) as job:
        assert job.results() == [[*opened, ["StoreClosedError"]]] * 2


def test_a_rank_that_is_about_to_come_is_not_refused() -> None:
    """It has said which store it opens, and is late for the roll call of opening it."""
    with running(programs.come_after_a_look, 2) as job:
        assert job.results() == [[0, 1]] * 2


@pytest.mark.parametrize("closes", [True, False])
def test_ranks_exit_soon(closes: bool) -> None:
    with running(programs.leave, 3, closes) as job:
        assert job.results() == [[0, 1, 2]] * 3
        assert job.exit_seconds(0, 1, 2) < EXIT_S


@pytest.mark.long
def test_ranks_exit_well_twenty_times() -> None:
    for _ in range(20):
        with running(programs.leave, 3, True) as job:
            job.results()
            job.exit_seconds(0, 1, 2)


def test_bad_arguments_are_refused() -> None:
    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            ProcessGroupRanks(None, timeout_s=timeout_s)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"call init_process_group\(\)"):
        ProcessGroupRanks(None, timeout_s=1)


# ---------------------------------------------------------------------------- not all is well


def failure_of_all(
    job: Job, world_size: int, culprit: int, *, within_s: float, timeout_s: float = 0.0
) -> str:
    """Return the errors of the other ranks after one rank failed."""
    job.meet()
    began = job.receive(culprit)
    others = [rank for rank in range(world_size) if rank != culprit]
    failures: list[Failure] = [job.receive(rank) for rank in others]
    for failure in failures:
        assert isinstance(failure, Failure), failure
        assert failure.rank == culprit, failure
        assert failure.at - max(began, failure.began) < timeout_s + within_s
    # The first rank that waits also ends first; the others hear of it from that rank.
    assert min(failure.at for failure in failures) >= timeout_s + min(
        failure.began for failure in failures
    )
    assert job.exit_seconds(*others) < EXIT_S
    (reason,) = {failure.reason for failure in failures}
    return reason


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("waiting", "culprit"),
    [
        (programs.in_gather, 0),
        (programs.in_gather, 1),
        (programs.in_commit, 2),
        (programs.in_work, 1),
        (programs.in_roll_call, 0),
        pytest.param(programs.in_work, 0, marks=pytest.mark.long),
    ],
)
def test_all_raise_why_a_rank_failed(waiting: Waiting, culprit: int) -> None:
    args = (culprit, programs.fails, waiting, programs.PATIENCE_S, True)
    with running(programs.go_wrong, 3, *args) as job:
        assert failure_of_all(job, 3, culprit, within_s=SOON_S) == "no room"


def test_the_first_reason_wins() -> None:
    with running(programs.fail_together, 3) as job:
        job.meet()
        ((rank, reason),) = {(failure.rank, failure.reason) for failure in job.results()}
    assert reason in {f"training of rank {rank}", f"commits of rank {rank}"}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("world_size", "culprit", "waiting", "closes"),
    [
        (3, 0, programs.in_gather, True),
        (3, 1, programs.in_gather, False),
        (3, 2, programs.in_gather, True),
        (3, 0, programs.in_roll_call, True),
        (3, 1, programs.in_roll_call, False),
        (2, 1, programs.in_roll_call, True),
        pytest.param(2, 1, programs.in_gather, True, marks=pytest.mark.long),
        pytest.param(2, 0, programs.in_commit, False, marks=pytest.mark.long),
        pytest.param(4, 2, programs.in_commit, True, marks=pytest.mark.long),
        pytest.param(4, 0, programs.in_work, True, marks=pytest.mark.long),
        pytest.param(4, 3, programs.in_work, False, marks=pytest.mark.long),
        pytest.param(3, 0, programs.in_group, True, marks=pytest.mark.long),
        pytest.param(3, 1, programs.in_group, True, marks=pytest.mark.long),
    ],
)
def test_all_raise_that_a_rank_was_killed(
    world_size: int, culprit: int, waiting: Waiting, closes: bool
) -> None:
    args = (culprit, programs.dies, waiting, programs.PATIENCE_S, closes)
    with running(programs.go_wrong, world_size, *args) as job:
        job.meet()
        began = job.receive(culprit)
        others = [rank for rank in range(world_size) if rank != culprit]
        failures = [job.receive(rank) for rank in others]
        assert all(failure.at - began < SOON_S for failure in failures)
        assert {failure.rank for failure in failures} == {culprit}
        # A rank that serves the key-value store takes with it what the others could agree on.
        reasons = {failure.reason for failure in failures}
        if culprit == 0:
            assert all("key-value store" in reason for reason in reasons)
        else:
            (reason,) = reasons
            assert "its process ended" in reason
        assert job.exit_seconds(*others) < EXIT_S


@pytest.mark.quick(1)
@pytest.mark.parametrize("waiting", [programs.in_gather, programs.in_roll_call])
def test_all_raise_that_a_rank_left(waiting: Waiting) -> None:
    args = (1, programs.leaves, waiting, programs.PATIENCE_S, True)
    with running(programs.go_wrong, 3, *args) as job:
        reason = failure_of_all(job, 3, 1, within_s=SOON_S)
    assert reason.startswith("closed its store or exited, and rank ")


@pytest.mark.parametrize(
    ("wrong", "culprit", "waiting"),
    [
        (programs.stays_away, 1, programs.in_gather),
        pytest.param(programs.stays_away, 0, programs.in_work, marks=pytest.mark.long),
        pytest.param(programs.stops, 0, programs.in_commit, marks=pytest.mark.long),
        pytest.param(programs.stops, 1, programs.in_gather, marks=pytest.mark.long),
        pytest.param(programs.stops, 2, programs.in_work, marks=pytest.mark.long),
        pytest.param(programs.stops, 0, programs.in_group, marks=pytest.mark.long),
    ],
)
def test_all_raise_that_a_rank_is_stuck(wrong: Wrong, culprit: int, waiting: Waiting) -> None:
    with running(programs.go_wrong, 3, culprit, wrong, waiting, 2.0, True) as job:
        reason = failure_of_all(job, 3, culprit, within_s=SOON_S, timeout_s=2.0)
        thread = "commit" if waiting is programs.in_commit else "training"
        assert f"did not come to a collective of the {thread} thread within 2 s" in reason
        assert ("answer" in reason) == (wrong is programs.stops)


@pytest.mark.long
def test_all_raise_that_a_rank_is_stuck_that_serves_the_key_value_store() -> None:
    """No roll call ends without it."""
    limit_s = 2.0 + 2 * ACCUSE_S
    with running(programs.go_wrong, 3, 0, programs.stops, programs.in_roll_call, 2.0, True) as job:
        reason = failure_of_all(job, 3, 0, within_s=SOON_S, timeout_s=limit_s)
        assert f"within {limit_s:g} s" in reason
        assert "does not answer" in reason


def test_failing_after_the_key_value_store_is_gone_does_not_raise() -> None:
    with running(programs.fail_without_store, 3) as job:
        job.meet()
        job.processes[0].kill()
        job.processes[0].join()
        for rank in (1, 2):
            job.connections[rank].send("go on")
            assert job.receive(rank).rank == 0
        assert job.exit_seconds(1, 2) < EXIT_S


def test_a_part_of_the_world_fails_with_ranks_of_its_own() -> None:
    with running(programs.fail_within, 3, [1, 2]) as job:
        job.meet()
        nothing, *failures = job.results()
    assert nothing is None
    assert [(failure.rank, failure.reason) for failure in failures] == [(1, "no room")] * 2


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (programs.passes_on, (2, "no room")),
        # Its number may be another rank's in this group.
        (programs.passes_on_from_elsewhere, (1, "rank 2 failed: no room")),
    ],
)
def test_who_passes_on_a_failure(wrong: Wrong, told: tuple[int, str]) -> None:
    args = (1, wrong, programs.in_gather, programs.PATIENCE_S, True)
    with running(programs.go_wrong, 3, *args) as job:
        job.meet()
        job.receive(1)
        for rank in (0, 2):
            failure = job.receive(rank)
            assert (failure.rank, failure.reason) == told


@pytest.mark.parametrize("program", [programs.meet_again, programs.interrupted_meeting])
def test_ranks_meet_again(program: Callable[..., Any]) -> None:
    """After one did not come in time, or another did not wait for it."""
    with running(program, 2) as job:
        job.meet()
        assert job.results() == [[0, 1]] * 2


def test_all_raise_that_a_rank_did_not_come_at_all() -> None:
    with running(programs.come_late, 3, 1) as job:
        for rank in (0, 2):
            failure = job.receive(rank)
            assert failure.reason.startswith("rank 1 did not call TierStore() within 1 s")
            assert failure.at - failure.began < 1 + SOON_S
        assert job.exit_seconds(0, 2) < EXIT_S


@pytest.mark.parametrize("in_gather", [True, False])
def test_an_interrupt_gets_through(in_gather: bool) -> None:
    with running(programs.interrupt, 2, in_gather) as job:
        job.meet()
        assert job.receive(1) == "KeyboardInterrupt"
        assert job.exit_seconds(1) < EXIT_S
