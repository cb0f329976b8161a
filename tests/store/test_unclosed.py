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

# Three steps, of which commits of the first two are begun.
_BEGINNING = """
import os, signal, sys, threading
import torch, muon, tierstore

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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("open_run(); train()", 0),
        ("open_run(commit_every=None); train(); sys.exit(3)", 3),
        ("def main():\n    open_run(); train()\nmain()", 0),
    ],
    ids=["end", "exit", "function"],
)
def test_the_last_step_is_committed(program: str, code: int, engine: str, tmp_path: Path) -> None:
    assert run(program, engine, tmp_path) == (code, "")
    assert committed_step(tmp_path) == 3


def test_the_last_step_is_committed_in_several_directories(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    assert run("open_run(); train()", "aiofiles", *directories) == (0, "")
    assert committed_step(*directories) == 3


@pytest.mark.parametrize(
    "program",
    [
        # The last step has its commit, with its extra.
        "open_run(); train(each=store.commit)",
        "open_run(commit_every=2); train(each=lambda: store.commit(extra=1))",
        # An exception before the last step did not end the program.
        "open_run()\nsys.last_value = ValueError(); train()",
        # An exception in a thread that did not do the last step did not end the program.
        "open_run(); train(); threading.excepthook = print\n"
        "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        # The thread has committed its last step.
        "def work():\n    open_run(); train(each=store.commit)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()",
    ],
    ids=["committed", "annotated", "error-before", "error-in-thread", "thread"],
)
def test_other_programs_whose_last_step_is_committed(program: str, tmp_path: Path) -> None:
    assert run(program, "aiofiles", tmp_path) == (0, "")
    assert committed_step(tmp_path) == 3


@pytest.mark.parametrize(
    ("program", "reason", "code", "step"),
    [
        ("open_run(); train(2, store.commit); train(1)", "did not call commit()", 0, 2),
        ("open_run(); train(); 1 / 0", "an exception", 1, 2),
        ("open_run(); train(); raise KeyboardInterrupt", "an exception", None, 2),
        (
            "trained = threading.Event()\n"
            "def work():\n    open_run(); train(); trained.set(); threading.Event().wait()\n"
            "threading.Thread(target=work, daemon=True).start(); trained.wait()",
            "the thread of the last step still runs",
            0,
            2,
        ),
        (
            "def work():\n    open_run(); train(); 1 / 0\n"
            "thread = threading.Thread(target=work); thread.start(); thread.join()",
            "another thread did the last step, and an exception may have ended it",
            0,
            2,
        ),
        (
            "open_run(); train(1)\n"
            "def work():\n    train(2); 1 / 0\n"
            "thread = threading.Thread(target=work); thread.start(); thread.join()",
            "another thread did the last step, and an exception may have ended it",
            0,
            2,
        ),
        ("open_run(); train(); del store, optimizer; import gc; gc.collect()", "dropped", 0, 2),
    ],
    ids=["commits", "error", "interrupt", "thread", "ended thread", "other thread", "dropped"],
)
def test_what_is_lost_is_said(
    program: str, reason: str, code: int | None, step: int, tmp_path: Path
) -> None:
    returned, printed = run(program, "aiofiles", tmp_path)
    assert code in (None, returned)
    assert reason in printed
    assert f"everything after step {step} is lost" in printed
    assert "Call close()" in printed
    assert committed_step(tmp_path) == step


def test_a_failing_commit_at_the_end_is_said(tmp_path: Path) -> None:
    program = """
import shutil
open_run(); train(); store.synchronize(); train(1); store.stats()
shutil.rmtree(sys.argv[2])
"""
    code, printed = run(program, "io_uring", tmp_path / "run")
    assert code == 0
    assert "ends without close(), which failed: " in printed


def test_an_interrupt_of_the_commit_at_the_end_is_said(tmp_path: Path) -> None:
    """The commit that has begun is waited for, and the other store is closed, too."""
    program = """
from tierstore.run import committer

one, other = sys.argv[2:]
sys.argv[2:] = [one]
open_run(); train()
first = store, optimizer
sys.argv[2:] = [other]
open_run(); train()
begin, write = committer.Committer.begin, committer.write_durably
has_begun = threading.Event()

def begin_and_tell(*args):
    begin(*args)
    has_begun.set()

def interrupt(storage, name, data):
    if name.startswith("commit-"):
        has_begun.wait()
        if is_first.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
    write(storage, name, data)

is_first = threading.Lock()
committer.Committer.begin, committer.write_durably = begin_and_tell, interrupt
"""
    directories = [tmp_path / "one", tmp_path / "other"]
    code, printed = run(program, "aiofiles", *directories)
    assert code == 0
    (line,) = printed.splitlines()
    assert "ends without close(), which was interrupted: a restart finds step 3" in line
    assert [committed_step(directory) for directory in directories] == [3, 3]


def test_a_process_of_multiprocessing_may_have_ended_by_an_exception(tmp_path: Path) -> None:
    program = """
def work():
    open_run(); train()

import multiprocessing
child = multiprocessing.get_context("fork").Process(target=work)
child.start(); child.join()
"""
    code, printed = run(program, "aiofiles", tmp_path)
    assert code == 0
    assert "everything after step 2 is lost" in printed
    assert committed_step(tmp_path) == 2


def test_the_end_of_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    # How the child ends is not tested: some versions of torch crash at the exit of a forked child.
    program = """
open_run(); train(2)
if os.fork() == 0:
    sys.exit(0)
os.wait()
store.synchronize()
assert store.committed_step == 2
train(1)
"""
    assert run(program, "io_uring", tmp_path) == (0, "")
    assert committed_step(tmp_path) == 3


def test_one_of_several_ranks_warns_and_does_not_wait(tmp_path: Path) -> None:
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
        assert "ranks commit together only" in printed or "has failed" in printed
        assert "Call close()" in printed


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
        said = "dropped without close(): everything after step 0 is lost" in caplog.text
        assert said == (steps > 0 and not close)
