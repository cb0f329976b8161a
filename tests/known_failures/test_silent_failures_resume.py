"""How a process ends.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import muon
import tierstore

ROOT = Path(__file__).resolve().parents[2]

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
