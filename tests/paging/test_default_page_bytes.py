"""The size of pages where none was given, and the sizes that a refused budget suggests."""

from __future__ import annotations

import contextlib
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.fake_cuda import fake_cuda
from tests.support.thread_ranks import ThreadJob
from tierstore.paging.tier_plan import Budget, default_page_bytes
from tierstore.ranks.peers import Ranks
from tierstore.units import parse_bytes


def table(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    return [{"params": [("table", weight)], "algorithm": "adamw"}]


@pytest.mark.parametrize(
    ("host_memory", "buffers", "expected"),
    [
        ("16GiB", None, "256MiB"),
        ("16GiB", 16, "256MiB"),
        ("4GiB", None, "256MiB"),
        ("256MiB", None, "16MiB"),
        ("256MiB", 2, "21844KiB"),
        ("256MiB", 28, "4MiB"),
        ("1MiB", None, "64KiB"),
        (0, None, "4KiB"),
    ],
)
def test_follows_the_host_memory(
    host_memory: int | str, buffers: int | None, expected: str
) -> None:
    budget = Budget(host_memory=parse_bytes(host_memory), device_memory=0, buffers=buffers)
    assert default_page_bytes(budget) == parse_bytes(expected)


def test_page_bytes_follows_the_host_memory(tmp_path: Path) -> None:
    """The state takes more than twice the memory that there is for it."""
    with tierstore.TierStore(tmp_path, host_memory="16MiB") as store:
        optimizer = muon.Muon(table(3000, 1000), store=store)
        optimizer.step()
        assert store.stats().pages > 1
        assert store.stats().host_bytes_peak <= parse_bytes("16MiB")


@pytest.mark.parametrize(
    ("host_memory", "buffers", "step_on"),
    [
        *product(["1MiB", "16MiB"], [None, 2, 4], [None, "cpu"]),
        # With more, the sectors of the sections of one page take more than the budget.
        *product(["64KiB"], [None, 2], [None]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_budget_works(
    dtype: torch.dtype, step_on: str | None, buffers: int | None, host_memory: str, tmp_path: Path
) -> None:
    groups = table(300, 100, dtype)
    vector = nn.Parameter(torch.zeros(2000, dtype=dtype))
    vector.grad = torch.ones_like(vector)
    groups.append({"params": [("vector", vector)], "algorithm": "adamw"})
    with (
        contextlib.nullcontext() if step_on is None else fake_cuda(),
        tierstore.TierStore(
            tmp_path, host_memory=host_memory, buffers=buffers, step_on=step_on
        ) as store,
    ):
        muon.Muon(groups, store=store).step()
        assert store.stats().host_bytes_peak <= parse_bytes(host_memory)


def test_a_run_keeps_its_first_value(tmp_path: Path) -> None:
    pages = []
    for host_memory in ("1MiB", "64MiB"):
        with tierstore.TierStore(tmp_path, host_memory=host_memory, resume=True) as store:
            optimizer = muon.Muon(table(300, 100), store=store)
            optimizer.restore()
            optimizer.step()
            pages.append(store.stats().pages)
    assert pages[0] == pages[1] > 1


def test_the_rank_with_the_least_host_memory_decides(tmp_path: Path) -> None:
    """An elementwise parameter has the same number of pages on both ranks."""

    def step(ranks: Ranks) -> int:
        host_memory = "16MiB" if ranks.rank else "1MiB"
        with tierstore.TierStore(tmp_path, host_memory=host_memory, process_group=ranks) as store:
            muon.Muon(table(600, 100), store=store).step()
            return store.stats().pages

    pages = ThreadJob(2).run(step)
    assert pages[0] == pages[1] > 1


def suggestions(error: BaseException) -> dict[str, Any]:
    """Return what a message says to pass: argument -> value."""
    found = re.findall(r"(page_bytes|host_memory|buffers)=(\"\w+\"|\d+)", str(error))
    return {name: value.strip('"') if '"' in value else int(value) for name, value in found}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"host_memory": "64KiB", "page_bytes": "1MiB"}, {"host_memory", "page_bytes"}),
        (
            {"host_memory": "1MiB", "page_bytes": "512KiB", "buffers": 4},
            {"host_memory", "page_bytes"},
        ),
        (
            {"host_memory": "1200KiB", "page_bytes": "256KiB", "buffers": 6},
            {"host_memory", "page_bytes", "buffers"},
        ),
        (
            {"host_memory": "1MiB", "page_bytes": "1MiB", "step_on": "cpu"},
            {"host_memory", "page_bytes"},
        ),
    ],
)
def test_a_refused_budget_suggests_values_to_paste(
    options: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    with (
        tierstore.TierStore(tmp_path, **options) as store,
        pytest.raises(tierstore.BudgetError) as refused,
    ):
        muon.Muon(table(1000, 100), store=store).step()
    suggested = suggestions(refused.value)
    assert suggested.keys() == expected, refused.value
    for name, value in suggested.items():
        with tierstore.TierStore(tmp_path, overwrite=True, **{**options, name: value}) as store:
            muon.Muon(table(1000, 100), store=store).step()


def test_no_page_size_is_suggested_for_a_matrix_that_is_not_cut(tmp_path: Path) -> None:
    matrix = nn.Parameter(torch.zeros(300, 400))
    matrix.grad = torch.ones_like(matrix)
    for page_bytes in (None, "2MiB"):
        with tierstore.TierStore(
            tmp_path, host_memory="512KiB", page_bytes=page_bytes, overwrite=True
        ) as store:
            with pytest.raises(tierstore.BudgetError) as refused:
                muon.Muon([("matrix", matrix)], store=store).step()
            assert suggestions(refused.value).keys() == {"host_memory"}, refused.value
    host_memory = suggestions(refused.value)["host_memory"]
    with tierstore.TierStore(tmp_path, host_memory=host_memory, overwrite=True) as store:
        muon.Muon([("matrix", matrix)], store=store).step()
