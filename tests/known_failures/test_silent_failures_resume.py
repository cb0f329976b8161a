"""Runs that are gone on with: schedulers made late, and how a process ends.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import muon
import tierstore
from tests.support.twins import parameter

NOT_RAISED = pytest.fail.Exception
ROOT = Path(__file__).resolve().parents[2]

# ----------------------------------------------------------------------------- schedulers


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)


def open_run(directory: Path) -> tuple[tierstore.TierStore, Any, nn.Parameter]:
    weight = parameter()
    store = tierstore.TierStore(directory, resume=True)
    return store, muon.Muon([("weight", weight)], store=store, lr=1.0), weight


def train_warming_up(directory: Path) -> float:
    """Leave a run of three steps behind; return the lr that comes next."""
    store, optimizer, weight = open_run(directory)
    with store:
        scheduler = warm_up(optimizer)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            scheduler.step()
            store.commit(extra={"scheduler": scheduler.state_dict()})
        lr: float = optimizer.param_groups[0]["lr"]
    return lr


@pytest.mark.xfail(strict=True, raises=TypeError, reason="restore() takes no scheduler")
def test_restore_brings_a_scheduler_back(tmp_path: Path) -> None:
    lr = train_warming_up(tmp_path)
    store, optimizer, _ = open_run(tmp_path)
    with store:
        scheduler = warm_up(optimizer)
        assert optimizer.restore(scheduler=scheduler) == 3
        assert optimizer.param_groups[0]["lr"] == lr
        assert scheduler.last_epoch == 3


@pytest.mark.xfail(strict=True, raises=NOT_RAISED, reason="nobody compares lr with the commit")
def test_lr_that_a_late_scheduler_sets_back_warns(tmp_path: Path) -> None:
    train_warming_up(tmp_path)
    store, optimizer, weight = open_run(tmp_path)
    with store:
        optimizer.restore()
        scheduler = warm_up(optimizer)
        scheduler.load_state_dict(store.extra["scheduler"])
        weight.grad = torch.ones_like(weight)
        with pytest.warns(UserWarning, match=r"\blr\b|learning rate"):
            optimizer.step()


@pytest.mark.xfail(strict=True, raises=TypeError, reason="restore() takes no expected step")
def test_restore_refuses_another_step_than_the_expected(tmp_path: Path) -> None:
    train_warming_up(tmp_path)
    store, optimizer, weight = open_run(tmp_path)
    with store:
        before = weight.detach().clone()
        with pytest.raises((ValueError, tierstore.TierstoreError), match=r"\b5\b"):
            optimizer.restore(expected_step=5)
        assert torch.equal(weight, before)
        assert optimizer.restore(expected_step=3) == 3


# --------------------------------------------------------------------------- how it ends

_PROGRAM = """
import sys, torch, muon, tierstore
weight = torch.nn.Parameter(torch.ones(3, 4))
store = tierstore.TierStore(sys.argv[1], engine=sys.argv[2])
optimizer = muon.Muon([("weight", weight)], store=store)
for step in range(3):
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    if sys.argv[3] == "commits" and step == 1:
        store.commit()
"""


def ends_without_close(directory: Path, engine: str, how: str) -> str:
    """Do three steps in a process that then ends; return what it printed to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(directory), engine, how],
        cwd=ROOT,
        check=True,
        text=True,
        stderr=subprocess.PIPE,
    )
    return done.stderr


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the last step is lost")
def test_a_process_that_ends_without_close_commits_its_last_step(tmp_path: Path) -> None:
    ends_without_close(tmp_path, "io_uring", "steps")
    with tierstore.TierStore(tmp_path, resume=True) as store:
        assert store.committed_step == 3
        assert muon.Muon([("weight", nn.Parameter(torch.zeros(3, 4)))], store=store).restore() == 3


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the last step is lost silently")
def test_a_process_that_commits_and_ends_without_close_is_warned(tmp_path: Path) -> None:
    """The program then decides which step it continues with."""
    said = ends_without_close(tmp_path, "aiofiles", "commits")
    assert "close()" in said


@pytest.mark.xfail(strict=True, raises=TimeoutError, reason="it waits 30 s for its own process")
def test_a_run_opened_twice_in_a_process_is_refused_at_once(tmp_path: Path) -> None:
    first = tierstore.TierStore(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        opening = executor.submit(tierstore.TierStore, tmp_path, resume=True)
        try:
            error = opening.exception(timeout=3)
            assert isinstance(error, tierstore.RunLockedError)
            assert "close()" in str(error)
        finally:
            first.close()  # The second then gets the lock.
            if opening.exception() is None:
                opening.result().close()
