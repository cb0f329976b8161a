"""Programs that end without close(): real processes, and what a restart finds."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muon
import tierstore

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ["io_uring", "libaio", "aiofiles"]

# Three steps; commits of the first two are begun.
_BEGINNING = """
import os, signal, sys, threading
import torch, muon, tierstore, tierstore.store

def open_run(**options):
    global store, optimizer, weight
    weight = torch.nn.Parameter(torch.ones(3, 4))
    store = tierstore.TierStore(sys.argv[2:], engine=sys.argv[1], **options)
    optimizer = muon.Muon([("weight", weight)], store=store)

def train(steps=3, each=lambda: None):
    for _ in range(steps):
        weight.grad = torch.ones(3, 4)
        optimizer.step()
        each()

def at_the_manifest_of(step, act):
    # Call a function before the manifest of a step is written.
    from tierstore.run import committer
    write = committer.write_durably
    def acting(storage, name, data):
        if name == f"commit-{step:010}":
            act()
        write(storage, name, data)
    committer.write_durably = acting

# Set as the process ends. Hooks run in reverse order, so the hook of the store comes later.
ends = threading.Event()
threading._register_atexit(ends.set)
"""


def start(program: str, engine: str, *directories: object) -> subprocess.Popen[str]:
    code = _BEGINNING + program
    return subprocess.Popen(
        [sys.executable, "-c", code, engine, *map(str, directories)],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
    )


def run(program: str, engine: str, *directories: object) -> tuple[int, str]:
    """Run a program to its end; return its exit code and what it printed to stderr."""
    process = start(program, engine, *directories)
    _, printed = process.communicate(timeout=120)
    return process.returncode, printed


def committed_step(*directories: Path) -> int:
    """Return the step that a restart finds, after checking that it is whole."""
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    with tierstore.TierStore(list(directories), resume=True) as store:
        step = muon.Muon([("weight", weight)], store=store).restore()
    expected = torch.nn.Parameter(torch.ones(3, 4))
    stock = torch.optim.Muon([expected])
    for _ in range(step):
        expected.grad = torch.ones(3, 4)
        stock.step()
    assert torch.equal(weight, expected)
    return step


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("engine", "directories"),
    [*((engine, ["run"]) for engine in ENGINES), ("aiofiles", ["one", "two"])],
)
def test_a_commit_in_flight_at_the_end_becomes_durable(
    engine: str, directories: list[str], tmp_path: Path
) -> None:
    program = "at_the_manifest_of(3, ends.wait); open_run(); train(each=lambda: store.commit())"
    paths = [tmp_path / name for name in directories]
    assert run(program, engine, *paths) == (0, "")
    assert committed_step(*paths) == 3


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("program", "code", "step"),
    [
        ("open_run(); train()", 0, 2),
        ("open_run(); train(); 1 / 0", 1, 2),
        ("open_run(commit_every=3); train(); store.synchronize(); train(1)", 0, 3),
        (
            "def work():\n    open_run(); train()\n"
            "thread = threading.Thread(target=work); thread.start(); thread.join()",
            0,
            2,
        ),
        ("open_run(); train(); del store, optimizer; import gc; gc.collect()", 0, 2),
        ("at_the_manifest_of(2, lambda: 1 / 0); open_run(); train(2, store_commit)", 0, 1),
        ("open_run(commit_every=None); train(); store.synchronize(); train()", 0, 3),
    ],
    ids=["end", "error", "every 3", "thread", "dropped", "failed commit", "in memory"],
)
def test_a_warning_says_which_step_a_restart_finds(
    program: str, code: int, step: int, tmp_path: Path
) -> None:
    program = program.replace("store_commit", "lambda: store.commit()")
    returned, printed = run(program, "aiofiles", tmp_path)
    assert returned == code, printed
    (line,) = [line for line in printed.splitlines() if "without close()" in line]
    assert f": a restart finds step {step} of " in line
    assert "Call close()" in line
    assert committed_step(tmp_path) == step


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [
        "open_run(commit_every=None); train()",
        "open_run(commit_every=None, buffers=2); train(); store.synchronize(); train()",
        "open_run(commit_every=10); train()",
    ],
    ids=["no commit", "overwritten", "none due"],
)
def test_a_warning_says_that_the_run_is_lost(program: str, tmp_path: Path) -> None:
    code, printed = run(program, "aiofiles", tmp_path)
    assert code == 0
    (line,) = printed.splitlines()
    assert "the process ends without close(): the run is lost" in line


@pytest.mark.long
def test_a_run_whose_only_slots_are_committed_is_not_lost(tmp_path: Path) -> None:
    program = "open_run(commit_every=None); train(); store.synchronize()"
    assert run(program, "aiofiles", tmp_path) == (0, "")
    assert committed_step(tmp_path) == 3


@pytest.mark.long
def test_an_interrupt_at_the_end_leaves_the_commit_in_flight(tmp_path: Path) -> None:
    """The commit becomes durable, and the other store warns."""
    program = """
one, other = sys.argv[2:]
sys.argv[2:] = [other]
open_run(); train()
first = store, optimizer
sys.argv[2:] = [one]

def interrupt():
    ends.wait()
    os.kill(os.getpid(), signal.SIGINT)

at_the_manifest_of(4, interrupt)
open_run(); train(4, lambda: store.commit())
"""
    one, other = tmp_path / "one", tmp_path / "other"
    code, printed = run(program, "aiofiles", one, other)
    assert code == 0
    assert f"{other}" in printed
    assert "a restart finds step 2 of 3" in printed
    assert [committed_step(directory) for directory in (one, other)] == [4, 2]


@pytest.mark.long
def test_the_end_of_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    # How the child ends is not tested: some versions of torch crash at the exit of a forked child.
    program = """
open_run(); train(2)
if os.fork() == 0:
    sys.exit(0)
os.wait()
store.synchronize()
assert store.committed.step == 2
train(1)
store.close()
"""
    assert run(program, "io_uring", tmp_path) == (0, "")
    assert committed_step(tmp_path) == 3


@pytest.mark.long
def test_each_of_several_ranks_finishes_its_commit_and_warns(tmp_path: Path) -> None:
    program = """
rank = int(os.environ["RANK"])
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}.init", rank=rank, world_size=2
)
open_run(); train(4)
"""
    processes = [
        start(program.replace('os.environ["RANK"]', str(rank)), "aiofiles", tmp_path / "run")
        for rank in range(2)
    ]
    for process in processes:
        _, printed = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        assert "the process ends without close(): a restart finds step 3 of 4" in printed


def test_a_store_that_is_dropped_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a store without a step, or one that was closed, says nothing."""
    for steps, close in [(0, False), (1, True), (1, False)]:
        caplog.clear()
        weight = torch.nn.Parameter(torch.ones(3, 4))
        store = tierstore.TierStore(tmp_path, overwrite=True)
        optimizer = muon.Muon([("weight", weight)], store=store)
        for _ in range(steps):
            weight.grad = torch.ones(3, 4)
            optimizer.step()
        if close:
            store.close()
        with caplog.at_level(logging.WARNING):
            del store, optimizer
            gc.collect()
        said = "dropped without close(): the run is lost" in caplog.text
        assert said == (steps > 0 and not close)
