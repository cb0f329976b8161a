"""The same bits in every tier and with any number of buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tierstore.storage.memory import MemoryStorage

STEPS = 20


def run(store: tierstore.TierStore, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    parameters = training.make_parameters(dtype)
    with store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        scheduler = training.make_scheduler(optimizer)
        training.train(optimizer, parameters, range(1, STEPS + 1), scheduler=scheduler)
        return training.snapshot(optimizer, parameters)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("engine", ["io_uring", "libaio", "aiofiles", "memory", "resident"])
def test_engines_give_the_same_result(engine: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if engine == "memory":
        store = tierstore.TierStore(MemoryStorage(), page_bytes=16384)
    elif engine == "resident":
        store = tierstore.TierStore(None, page_bytes=16384)
    else:
        store = tierstore.TierStore(tmp_path, engine=engine, page_bytes=16384)
    training.assert_identical(run(store, dtype), training.resident_run(STEPS, dtype))


@pytest.mark.quick(1)
@pytest.mark.parametrize("buffers", [2, 3, 8])
@pytest.mark.parametrize("page_bytes", [4096, 10000, "1MiB"])
def test_buffers_and_page_sizes_do_not_change_the_result(
    buffers: int, page_bytes: int | str, tmp_path: Path
) -> None:
    store = tierstore.TierStore(tmp_path, page_bytes=page_bytes, buffers=buffers)
    actual = run(store, torch.bfloat16)
    training.assert_identical(actual, training.resident_run(STEPS, torch.bfloat16))
    assert store.stats().pages >= (4 if page_bytes == "1MiB" else 10)


@pytest.mark.parametrize("commit_every", [1, 3, None])
def test_commits_do_not_change_the_result(commit_every: int | None, tmp_path: Path) -> None:
    store = tierstore.TierStore(tmp_path, page_bytes=10000, buffers=2, commit_every=commit_every)
    training.assert_identical(run(store, torch.float32), training.resident_run(STEPS))
    assert store.committed.step == STEPS


def test_embedding_spans_pages(tmp_path: Path) -> None:
    parameters = training.make_parameters()
    with tierstore.TierStore(tmp_path, page_bytes=10000) as store:
        groups = training.make_groups(parameters)[1:2]
        optimizer = muon.Muon(groups, store=store)
        training.train(optimizer, parameters, range(1, 3))
        # 203 * 19 elements of 12 bytes in pages of at most 10,000.
        assert store.stats().pages >= 5
