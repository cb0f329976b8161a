"""Real ranks that gather, wait, fail, die and get stuck, and tell what became of them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support import killed_processes
from tierstore.errors import PeerFailed, RollCallError, StoreClosedError
from tierstore.ranks.failure_detector import clone
from tierstore.ranks.job import ProcessGroupRanks
from tierstore.ranks.peers import Peers, agree
from tierstore.ranks.roll_call import RollCalls

# Whatever happens, the ranks of a test have ended by then, on a busy machine as well.
JOB_TIMEOUT_S = 120
# Seconds that a rank may let others wait, in programs where none does.
PATIENCE_S = 30
LARGE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Failure:
    """A PeerFailed that a rank raised."""

    rank: int
    reason: str
    at: float
    """Seconds of the monotonic clock, which is the same in all processes."""
    began: float = 0.0
    """Begin of the wait that failed, on the same clock; 0 where a program does not tell."""


class Job:
    """The ranks of one program, each a process."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        self._deadline = time.monotonic() + JOB_TIMEOUT_S

    def receive(self, rank: int) -> Any:
        """The next thing that a rank tells: the last is what its program returned or raised."""
        left = max(0.0, self._deadline - time.monotonic())
        assert self.connections[rank].poll(left), f"rank {rank} takes too long"
        return self.connections[rank].recv()

    def meet(self) -> None:
        """Let the ranks go on, when all have come to where they meet."""
        assert self.results() == ["met"] * len(self.processes)
        for connection in self.connections:
            connection.send("go on")

    def results(self) -> list[Any]:
        return [self.receive(rank) for rank in range(len(self.processes))]

    def exit_seconds(self, *ranks: int) -> float:
        """Wait until these ranks have exited as they should, and tell for how long."""
        began = time.monotonic()
        for rank in ranks:
            self.processes[rank].join(max(0.0, self._deadline - time.monotonic()))
            code = self.processes[rank].exitcode
            assert code == 0, f"rank {rank} exited with {code}"
        return time.monotonic() - began


@contextmanager
def running(program: Callable[..., Any], world_size: int, *args: Any) -> Iterator[Job]:
    """Run a program on so many ranks; those that have not ended by then are killed."""
    job = Job()
    with ExitStack() as stack:
        for rank in range(world_size):
            ours, theirs = killed_processes._processes.Pipe()
            process = killed_processes._processes.Process(
                target=_run, args=(theirs, rank, world_size, program, args)
            )
            process.start()
            job.connections.append(stack.enter_context(ours))
            job.processes.append(process)
            stack.callback(process.join)
            stack.callback(process.kill)
            theirs.close()
        port = job.receive(0)
        for connection in job.connections[1:]:
            connection.send(port)
        yield job


@dataclass(frozen=True, slots=True)
class Here:
    """A rank, as its program sees it."""

    rank: int
    world_size: int
    test: Connection

    def meet(self) -> None:
        """Wait until all ranks are here, without anything that is under test."""
        self.test.send("met")
        self.test.recv()


def _run(
    test: Connection, rank: int, world_size: int, program: Callable[..., Any], args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    serves = rank == 0
    port = 0 if serves else test.recv()
    store = dist.TCPStore("127.0.0.1", port, world_size, serves, wait_for_workers=False)
    if serves:
        test.send(store.port)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=JOB_TIMEOUT_S),
    )
    try:
        result = program(Here(rank, world_size, test), *args)
    except Exception as error:
        result = error
    test.send(result)
    # Exit as a program does; a process of multiprocessing just stops. What was imported need
    # not be collected, which takes a second.
    gc.freeze()
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(0)


# ---------------------------------------------------------------------------- all is well


def gather(here: Here, values: list[Any]) -> list[list[Any]]:
    """Gather what belongs to this rank, with each of the channels."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    assert (ranks.rank, ranks.world_size) == (here.rank, here.world_size)
    found = [peers.gather(values[here.rank]) for peers in (ranks, ranks.commits)]
    ranks.close()
    return found


def gather_large(here: Here) -> list[list[tuple[int, set[int]]]]:
    """Gather a lot, then little, then a lot of one rank; return the number and values of bytes."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    found = []
    for nbytes in (LARGE_BYTES + here.rank, 1, LARGE_BYTES * (here.rank == 1)):
        values = ranks.gather(bytes([here.rank]) * nbytes)
        found.append([(len(value), set(value)) for value in values])
    ranks.close()
    return found


def gather_around(here: Here, sizes: range) -> list[list[int]]:
    """Gather values of many sizes; tell which came."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    found = [list(map(len, ranks.gather(b"x" * (n + here.rank)))) for n in sizes]
    ranks.close()
    return found


def gather_at_once(here: Here, rounds: int) -> dict[str, list[list[Any]]]:
    """Gather in two threads at once, each with its channel."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    found: dict[str, list[list[Any]]] = {"training": [], "commits": []}

    def gather_all(name: str, peers: Peers) -> None:
        for number in range(rounds):
            found[name].append(peers.gather((name, here.rank, number)))

    other = threading.Thread(target=gather_all, args=("commits", ranks.commits))
    other.start()
    gather_all("training", ranks)
    other.join()
    ranks.close()
    return found


def agree_to_fail(here: Here, failing: int) -> tuple[list[str], list[Any]]:
    """Agree on something that one rank cannot do, with each channel; then gather."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)

    def act() -> None:
        if here.rank == failing:
            raise ValueError("no room")

    errors = []
    for peers in (ranks, ranks.commits):
        try:
            agree(peers, "make room", act)
        except (ValueError, PeerFailed) as error:
            errors.append(repr(error))
    gathered = ranks.gather(here.rank)
    ranks.close()
    return errors, gathered


def exchange(here: Here, members: list[int]) -> list[float] | None:
    """Exchange numbers in a group of some of the ranks."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    group = ranks.new_group(members)
    if group is None:
        received = None
    else:
        sent = torch.arange(len(members)) + 10.0 * here.rank
        tensor = torch.empty_like(sent)
        ranks.wait(dist.all_to_all_single(tensor, sent, group=group, async_op=True))
        received = tensor.tolist()
    ranks.gather(None)
    ranks.close()
    return received


def open_within(here: Here, members: list[int], times: int) -> list[tuple[Any, ...]] | str:
    """Gather and exchange in a part of the world. Ranks outside are refused."""
    part = dist.new_group(members)
    found: list[tuple[Any, ...]] | str = []
    for _ in range(times):
        try:
            ranks = ProcessGroupRanks(part, timeout_s=PATIENCE_S)
        except ValueError as error:
            found = str(error)
            break
        gathered = ranks.gather((ranks.rank, here.rank))
        group = ranks.new_group(range(len(members)))
        total = torch.ones(1)
        ranks.wait(dist.all_reduce(total, group=group, async_op=True))
        found.append((ranks.global_ranks, gathered, total.item()))
        ranks.commits.gather(None)
        ranks.close()
    dist.barrier()  # Or the key-value store could be gone with its rank.
    return found


def open_within_unequal(here: Here) -> str:
    """Ask for a group of two ranks. One of them is in more groups than the other."""
    part = dist.new_group([0, 1])
    dist.new_group([1, 2])
    message = ""
    if here.rank < 2:
        ranks = ProcessGroupRanks(part, timeout_s=PATIENCE_S)
        try:
            ranks.new_group([0, 1])
        except ValueError as error:
            message = str(error)
        ranks.close()
    return message


def ask_for_unlike_groups(here: Here) -> tuple[str, list[Any]]:
    """Ask for another group on each rank; then gather."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    message = ""
    try:
        ranks.new_group([here.rank])
    except ValueError as error:
        message = str(error)
    gathered = ranks.gather(here.rank)
    ranks.close()
    return message, gathered


def open_again(here: Here, times: int) -> list[list[Any]]:
    """Make ranks, close them, and make others."""
    found = []
    for number in range(times):
        ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
        found.append(ranks.gather((here.rank, number)))
        ranks.close()
        ranks.close()
    try:
        ranks.gather(0)
    except StoreClosedError as error:
        found.append([type(error).__name__])
    return found


def come_after_a_look(here: Here) -> list[Any]:
    """Open, with rank 1 coming to the roll call after rank 0 has looked where it stays."""
    store = clone(dist.distributed_c10d._get_default_store())
    look, take_part = RollCalls._look, RollCalls.take_part

    def look_and_tell(self: RollCalls, *arguments: Any, **options: Any) -> None:
        look(self, *arguments, **options)
        store.set("looked", "yes")

    def come_late(self: RollCalls, *arguments: Any, **options: Any) -> bool:
        store.wait(["looked"])
        return take_part(self, *arguments, **options)

    late = (
        mock.patch.object(RollCalls, "_look", look_and_tell)
        if here.rank == 0
        else mock.patch.object(RollCalls, "take_part", come_late)
    )
    with late:
        ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    gathered = ranks.gather(here.rank)
    ranks.close()
    return gathered


def leave(here: Here, closes: bool) -> list[Any]:
    """Exit, with or without closing first, with or without a group that torch knows."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    ranks.new_group(range(here.world_size))
    gathered = ranks.gather(here.rank)
    if closes:
        ranks.close()
    else:
        dist.destroy_process_group()
    return gathered


# ---------------------------------------------------------------------------- not all is well

# How the others wait for a rank that goes wrong.
Waiting = Callable[[ProcessGroupRanks], None]


def in_gather(ranks: ProcessGroupRanks) -> None:
    ranks.gather(0)


def in_commit(ranks: ProcessGroupRanks) -> None:
    ranks.commits.gather(0)


def in_work(ranks: ProcessGroupRanks) -> None:
    group = ranks.new_group(range(ranks.world_size))
    ranks.wait(dist.all_reduce(torch.ones(1000), group=group, async_op=True))


def in_roll_call(ranks: ProcessGroupRanks) -> None:
    ranks.roll_call("step()")


def in_group(ranks: ProcessGroupRanks) -> None:
    ranks.new_group(range(ranks.world_size))


# How it goes wrong.
Wrong = Callable[[Here, ProcessGroupRanks], None]


def fails(here: Here, ranks: ProcessGroupRanks) -> None:
    ranks.fail(OSError("no room"))


def passes_on(here: Here, ranks: ProcessGroupRanks) -> None:
    """Fail for what another rank is to blame for, and may not have said yet."""
    ranks.fail(PeerFailed(2, "no room"))


def passes_on_from_elsewhere(here: Here, ranks: ProcessGroupRanks) -> None:
    ranks.fail(PeerFailed(2, "no room"), other_group=True)


def dies(here: Here, ranks: ProcessGroupRanks) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops(here: Here, ranks: ProcessGroupRanks) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stays_away(here: Here, ranks: ProcessGroupRanks) -> None:
    here.test.recv()


def leaves(here: Here, ranks: ProcessGroupRanks) -> None:
    ranks.close()


def go_wrong(
    here: Here, culprit: int, wrong: Wrong, waiting: Waiting, timeout_s: float, closes: bool
) -> Failure | None:
    """Wait for a rank that tells when it goes wrong; then try again."""
    ranks = ProcessGroupRanks(None, timeout_s=timeout_s)
    in_gather(ranks)
    here.meet()
    if here.rank == culprit:
        if waiting is in_work:
            in_group(ranks)
        here.test.send(time.monotonic())
        wrong(here, ranks)
        failure = None
    else:
        failure = failure_of(waiting, ranks)
        again = failure_of(in_gather, ranks)
        assert (again.rank, again.reason) == (failure.rank, failure.reason)
    if closes:
        ranks.close()
    return failure


def failure_of(waiting: Waiting, ranks: ProcessGroupRanks) -> Failure:
    began = time.monotonic()
    try:
        waiting(ranks)
    except PeerFailed as error:
        return Failure(error.rank, error.reason, time.monotonic(), began)
    raise AssertionError(f"{waiting.__name__} did not raise")


def fail_together(here: Here) -> Failure:
    """Fail on all ranks at once, in both threads."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    here.meet()
    reasons = [f"{name} of rank {here.rank}" for name in ("training", "commits")]
    threads = [threading.Thread(target=ranks.fail, args=(OSError(reason),)) for reason in reasons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failure = failure_of(in_gather, ranks) if here.rank else failure_of(in_commit, ranks)
    ranks.close()
    return failure


def fail_without_store(here: Here) -> Failure:
    """Fail after the rank that serves the key-value store was killed."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    here.meet()
    here.test.recv()
    ranks.fail(OSError("no room either"))
    failure = failure_of(in_gather, ranks)
    ranks.close()
    return failure


def fail_within(here: Here, members: list[int]) -> Failure | None:
    """Fail on the last rank of a part of the world."""
    part = dist.new_group(members)
    failure = None
    if here.rank in members:
        ranks = ProcessGroupRanks(part, timeout_s=PATIENCE_S)
        if here.rank == members[-1]:
            ranks.fail(OSError("no room"))
        failure = failure_of(in_gather, ranks)
        ranks.close()
    here.meet()  # Or the key-value store could be gone with its rank.
    return failure


def come_late(here: Here, absent: int) -> Failure | None:
    """Make ranks where one never comes."""
    if here.rank == absent:
        here.test.recv()
        return None
    began = time.monotonic()
    return Failure(absent, refusal_of(lambda: make_impatient_ranks(None)), time.monotonic(), began)


def make_impatient_ranks(group: dist.ProcessGroup | None) -> ProcessGroupRanks:
    return ProcessGroupRanks(group, timeout_s=1)


def refusal_of(call: Callable[[], Any]) -> str:
    """Return the message of the RollCallError that a call raises, or ""."""
    try:
        call()
    except RollCallError as error:
        return str(error)
    return ""


def meet_again(here: Here) -> list[int]:
    """Come to the second of two meetings, or to both; the first fails."""
    if here.rank == 0:
        failure = come_late(here, absent=1)
        assert failure is not None
        assert failure.rank == 1
    here.meet()
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    found = ranks.gather(here.rank)
    ranks.close()
    return found


def interrupted_meeting(here: Here) -> list[int]:
    """Come to the second of two meetings, or to both; an interrupt ends the first."""
    if here.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            ProcessGroupRanks(None, timeout_s=PATIENCE_S)
        except KeyboardInterrupt:
            here.meet()
    else:
        here.meet()
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    found = ranks.gather(here.rank)
    ranks.close()
    return found


def interrupt(here: Here, in_gather: bool) -> str:
    """Interrupt a rank that waits for one that never comes."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    group = ranks.new_group([0, 1])
    here.meet()
    if here.rank == 0:
        here.test.recv()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    raised = "nothing"
    try:
        if in_gather:
            ranks.gather(0)
        else:
            ranks.wait(dist.all_reduce(torch.ones(1), group=group, async_op=True))
    except KeyboardInterrupt as error:
        raised = type(error).__name__
    if here.rank == 1:  # It would be a call behind the other, which is told why instead.
        assert failure_of(in_commit, ranks).rank == 1
    ranks.close()
    return raised


def come_late_to_calls(here: Here) -> tuple[str, str]:
    """Come late on rank 1, after the call was refused; then make the next call together.

    Returns:
        What each call raised.
    """
    ranks = ProcessGroupRanks(None, timeout_s=2)
    if here.rank:
        dist.barrier()
    refused = refusal_of(lambda: ranks.roll_call("state_dict()"))
    if here.rank == 0:
        dist.barrier()
    dist.barrier()
    went = refusal_of(lambda: ranks.roll_call("step()"))
    ranks.close()
    return refused, went


def interrupt_roll_call(here: Here) -> list[str]:
    """Interrupt a rank of two that waits in a roll call; then make the next call."""
    ranks = ProcessGroupRanks(None, timeout_s=PATIENCE_S)
    here.meet()
    raised: list[str] = []
    if here.rank == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            ranks.roll_call("step()")
        except KeyboardInterrupt as error:
            raised.append(type(error).__name__)
        here.test.send(raised)
    else:
        here.test.recv()
    raised = [*raised, refusal_of(lambda: ranks.roll_call("step()"))]
    ranks.gather(None)
    ranks.close()
    return raised
