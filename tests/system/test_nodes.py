"""Jobs on two nodes that lose a rank, or a whole node: ``torchrun`` starts them again."""

from __future__ import annotations

import os
import select
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

import muon
from tests.rank_programs.nodes import digest
from tests.support import nodes, training
from tests.support.nodes import Node, two_nodes

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROGRAM = "tests.rank_programs.nodes"
TIMEOUT_S = 240


class Notes:
    """Notes of the ranks in the order of time, from a named pipe.

    Args:
        path: of the pipe, which is made. Ranks write a line at a time, which no other line cuts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # It never ends.
        self._read = b""

    def close(self) -> None:
        os.close(self._pipe)

    def all_lines(self) -> list[list[str]]:
        """Return the words of each note so far."""
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 2**16):
                self._read += data
        return [line.split() for line in self._read.decode().splitlines()]

    def lines(self, kind: str) -> list[tuple[int, str]]:
        """Return rank and value of the notes of a kind."""
        return [(int(rank), value) for noted, rank, value in self.all_lines() if noted == kind]

    def done_before_resume(self, count: int) -> int:
        """Return the last step that both ranks had done before the count-th note of a resume."""
        done, resumed = {0: 0, 1: 0}, 0
        for kind, rank, value in self.all_lines():
            resumed += kind == "resumed"
            if resumed == count:
                break
            if kind == "step":
                done[int(rank)] = int(value)
        return min(done.values())

    def wait(self, kind: str, count: int) -> None:
        """Wait until there are so many notes of a kind."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.lines(kind)) < count:
            left = deadline - time.monotonic()
            assert select.select([self._pipe], [], [], max(0.0, left))[0], f"no {count} {kind!r}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[tuple[Node, Node], Path, Notes]]:
    if reason := nodes.why_not():
        pytest.skip(reason)
    with closing(Notes(tmp_path / "notes")) as notes, two_nodes(tmp_path) as (both, shared):
        yield both, shared, notes


def undisturbed(steps: int) -> str:
    """Return the parameters of a run on one rank in memory, as a digest."""
    parameters = training.make_parameters(torch.float32)
    optimizer = muon.Muon(training.make_groups(parameters), ns_dtype=torch.float32)
    for step in range(1, steps + 1):
        training.set_gradients(parameters, step)
        optimizer.step()
    return digest(parameters)


def lost_steps(notes: Notes, count: int) -> int:
    """Wait for a number of notes of resumes: how many steps the newest two ranks do again."""
    notes.wait("resumed", count)
    first, second = (int(value) for _, value in notes.lines("resumed")[count - 2 : count])
    assert first == second
    return notes.done_before_resume(count - 1) - first


def test_a_rank_and_then_a_node_are_lost(cluster: tuple[tuple[Node, Node], Path, Notes]) -> None:
    (first, second), shared, notes = cluster
    steps = 600
    arguments = (str(shared / "run"), str(notes.path), str(steps))
    for node in (first, second):
        node.start(PROGRAM, *arguments, nodes=2)
    notes.wait("step", 40)
    (worker,) = [pid for pid in second.pids(PROGRAM) if pid not in second.pids("torch.distributed")]
    second.kill([worker])
    lost = [lost_steps(notes, 4)]
    notes.wait("step", len(notes.lines("step")) + 40)
    second.kill()
    second.start(PROGRAM, *arguments, nodes=2)
    lost.append(lost_steps(notes, 6))
    # Below 0: a rank was killed after the commit, and before it could note the step.
    assert all(-1 <= count <= 1 for count in lost), lost
    assert (first.wait(), second.wait()) == (0, 0)
    ended = notes.lines("ended")
    assert sorted(rank for rank, _ in ended) == [0, 1]
    assert {value for _, value in ended} == {undisturbed(steps)}


def test_a_job_continues_on_fewer_nodes(cluster: tuple[tuple[Node, Node], Path, Notes]) -> None:
    """The directories of the ranks are brought to one node."""
    (first, second), shared, notes = cluster
    for node in (first, second):
        node.start(PROGRAM, str(shared / "run"), str(notes.path), "600", nodes=2)
    notes.wait("step", 40)
    for node in (second, first):
        node.kill()
    done = notes.done_before_resume(3)
    shutil.copytree(second.disk / "run", first.disk / "run", dirs_exist_ok=True)
    first.start(PROGRAM, str(shared / "run"), str(notes.path), str(done + 20), nodes=1)
    assert first.wait() == 0
    assert abs(int(notes.lines("resumed")[2][1]) - done) <= 1  # As above.
    assert notes.lines("ended") == [(0, undisturbed(done + 20))]
