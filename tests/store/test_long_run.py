"""A long run of steps, commits and checkpoints: nothing that the process holds grows."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import muon
import tierstore
from tests.support.isolated_process import apart
from tests.support.toy import verified

# 10,000 steps take 2 minutes, and ten times as long if others keep processors and disk busy.
TIMEOUT_S = 1500
LONG = (pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 60))

# Most growth between two samples, and in all: the allocator takes more memory once in a while, and
# a leak grows between any two samples. In 10,000 steps a leak of 33 bytes per step is found.
LEAST_GROWTH_BYTES = 2**16
GROWTH_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory, descriptors and files of the process at some step."""

    anonymous_bytes: int
    resident_bytes: int
    descriptors: int
    threads: int
    run_files: int
    checkpoint_files: int


def thread_names() -> list[str]:
    """Names of the threads. The kernel's for io_uring, which come and go, begin with "iou-"."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            names.append((task / "comm").read_text().strip())
    return names


def held_now(run: Path, checkpoints: Path) -> Held:
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kib = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)", status, re.M)}
    return Held(
        anonymous_bytes=kib["RssAnon"] * 1024,
        resident_bytes=kib["VmRSS"] * 1024,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=sum(not name.startswith("iou-") for name in thread_names()),
        run_files=len(list(run.rglob("*"))),
        checkpoint_files=len(list(checkpoints.rglob("*"))),
    )


def least(samples: list[Held]) -> Held:
    """The least of each: a thread may be about to end, but what grows is never less again."""
    names = [field.name for field in fields(Held)]
    return Held(**{name: min(getattr(held, name) for held in samples) for name in names})


def train(
    directory: Path, engine: str, steps: int, checkpoint_every: int
) -> tuple[int, list[Held]]:
    """Return the committed step, and what is held after each fifth of the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run, checkpoints = directory / "run", directory / "checkpoints"
    checkpoints.mkdir()
    matrices = [torch.nn.Parameter(torch.randn(8, 32, dtype=torch.bfloat16)) for _ in range(2)]
    vectors = [torch.nn.Parameter(torch.randn(32)) for _ in range(2)]
    for parameter in (*matrices, *vectors):
        parameter.grad = torch.randn_like(parameter)
    groups = [
        {"params": matrices, "lr": 1e-3},
        {"params": vectors, "lr": 1e-3, "algorithm": "adamw"},
    ]
    found: list[Held] = []
    with tierstore.TierStore(run, engine=engine, host_memory=8 * 4096, page_bytes=4096) as store:
        optimizer = muon.Muon(groups, store=store)
        store.register(random=tierstore.RandomState())
        samples: list[Held] = []
        for step in range(1, steps + 1):
            optimizer.step()
            store.commit()
            # The last steps before a checkpoint: what the one before left behind has ended.
            if step % (steps // 5) > steps // 5 - 4:
                store.synchronize()
                verified(store)  # Its mark is among the files.
                samples.append(held_now(run, checkpoints))
            if step % (steps // 5) == 0:
                found.append(least(samples))
                samples.clear()
            if step % checkpoint_every == 0:
                store.checkpoint(checkpoints / f"step-{step}", keep_last=2)
    return store.committed.step, found


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("engine", "steps", "checkpoint_every"),
    [
        ("io_uring", 100, 4),
        ("libaio", 100, 4),
        ("aiofiles", 100, 4),
        pytest.param("io_uring", 10_000, 50, marks=LONG),
        pytest.param("libaio", 1_500, 50, marks=LONG),
        pytest.param("aiofiles", 1_500, 50, marks=LONG),
    ],
)
def test_nothing_grows(engine: str, steps: int, checkpoint_every: int, tmp_path: Path) -> None:
    outcome = apart(train, tmp_path, engine, steps, checkpoint_every, within_s=TIMEOUT_S)
    assert outcome.error == ""
    committed, found = outcome.value
    assert committed == steps
    early, late = found[0], found[-1]
    assert (late.descriptors, late.threads) == (early.descriptors, early.threads)
    assert (late.run_files, late.checkpoint_files) == (early.run_files, early.checkpoint_files)
    for memory in ("anonymous_bytes", "resident_bytes"):
        nbytes = [getattr(held, memory) for held in found]
        assert nbytes[-1] - nbytes[0] <= GROWTH_BYTES
        assert min(after - before for before, after in pairwise(nbytes)) <= LEAST_GROWTH_BYTES
