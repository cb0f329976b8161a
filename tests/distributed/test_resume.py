"""Runs of several ranks that are closed and go on, with other memory on each rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_programs.checks import assert_as_one_process
from tests.rank_programs.collective_order import assert_one_order
from tests.rank_programs.training import SHAPES, STEPS, Case, one_process
from tests.support.rank_pool import RankPool

WORK = "tests.rank_programs.training:train"
# Of one rank nothing rests in memory, of another everything.
UNLIKE: list[dict[str, Any]] = [
    {"buffers": 5},
    {"buffers": 2},
    {"host_memory": "1GiB"},
    {"buffers": 3, "engine": "aiofiles"},
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("world_size", "layout", "partition"),
    [
        pytest.param(2, "plain", "by_parameter", marks=pytest.mark.long),
        (3, "plain", "flat"),
        (3, "rows", "auto"),
        pytest.param(4, "hsdp", "auto", marks=pytest.mark.long),
    ],
)
def test_a_run_that_was_closed_goes_on(
    pool: RankPool, tmp_path: Path, world_size: int, layout: str, partition: str
) -> None:
    expected = one_process(SHAPES, {})
    case = Case(
        layout=layout,
        directory=tmp_path / "run",
        store={"page_bytes": 6000},
        of_ranks=UNLIKE,
        options={"partition": partition},
    )
    whole = pool.run(world_size, WORK, replace(case, directory=tmp_path / "whole"))
    assert_as_one_process(whole, SHAPES, expected)
    pool.run(world_size, WORK, replace(case, last=4))
    # Each rank has what another had before.
    turned = [*UNLIKE[1:world_size], UNLIKE[0]]
    rest = pool.run(world_size, WORK, replace(case, first=5, last=STEPS, of_ranks=turned))
    assert_as_one_process(rest, SHAPES, expected)


def test_the_dtype_of_newton_schulz_comes_from_the_run(pool: RankPool, tmp_path: Path) -> None:
    options = {"ns_dtype": torch.float32}
    case = Case(layout="rows", directory=tmp_path / "run", store={"page_bytes": 6000})
    pool.run(2, WORK, replace(case, last=4, options=options))
    rest = pool.run(2, WORK, replace(case, first=5))
    assert_as_one_process(rest, SHAPES, one_process(SHAPES, options))


@pytest.mark.long
def test_the_rank_with_least_memory_bounds_how_much_is_stepped_at_once(
    pool: RankPool, tmp_path: Path
) -> None:
    """The collectives and their order are as on ranks that all have as little memory."""
    case = Case(layout="rows", store={"page_bytes": 6000}, last=3)
    issued = []
    for name, of_ranks, window in [
        ("unlike", UNLIKE, 1),
        ("little", [{"buffers": 2}] * 4, 1),
        ("much", [{"host_memory": "1GiB"}] * 4, 3),
    ]:
        found = pool.run(4, WORK, replace(case, directory=tmp_path / name, of_ranks=of_ranks))
        assert {each.window for each in found} == {window}
        assert_one_order([each.issued for each in found])
        issued.append([each.issued for each in found])
        resting = [each.resting > 0 for each in found]
        assert resting == {"unlike": [False, False, True, False]}.get(name, [name == "much"] * 4)
    assert issued[0] == issued[1]


@pytest.mark.parametrize(("world_size", "wrapped_first"), [(1, True), (2, False), (2, True)])
def test_a_run_resumes_with_or_without_ddp(
    pool: RankPool, tmp_path: Path, world_size: int, wrapped_first: bool
) -> None:
    work = "tests.rank_programs.resuming:resume_with_ddp"
    assert pool.run(world_size, work, tmp_path / "run", wrapped_first) == [2] * world_size


def test_a_state_that_one_rank_does_not_want_is_refused_on_all(
    pool: RankPool, tmp_path: Path
) -> None:
    work = "tests.rank_programs.resuming:want_less_on_rank_1"
    first, second = pool.run(2, work, tmp_path / "run")
    text = "step 1 was committed with 'random', but no object of that name is registered"
    assert (first[0].startswith(f"PeerFailed: rank 1 failed: {text}"), first[1]) == (True, True)
    assert (second[0].startswith(f"ValueError: {text}"), second[1]) == (True, True)
