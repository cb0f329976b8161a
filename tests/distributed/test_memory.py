"""Memory of ranks for matrices on their way, and how long pages of several ranks stay valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import muon
from tests.rank_programs.memory import COLUMNS, COUNT, ROWS, Gathered, groups_of, matrices
from tests.support.rank_pool import RankPool

RANKS = 4
# Three matrices of float32: the quarter that is sent, what the owner receives, and the whole.
LEAST = 3 * 4 * (ROWS * COLUMNS // RANKS + 2 * ROWS * COLUMNS)


def gathered(pool: RankPool, directory: Path, *of_ranks: int) -> list[Gathered]:
    sizes = list(of_ranks) if len(of_ranks) > 1 else list(of_ranks) * RANKS
    found: list[Gathered] = pool.run(RANKS, "tests.rank_programs.memory:gather", sizes, directory)
    return found


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(each) for each in matrices()]
    optimizer = muon.Muon(groups_of(parameters))
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    for _ in range(2):
        optimizer.step()
    return [each.detach() for each in parameters]


def assert_right(found: list[Gathered], expected: list[torch.Tensor]) -> None:
    for index, whole in enumerate(expected):
        assert torch.equal(torch.cat([each.values[index] for each in found]), whole)


@pytest.mark.quick(1)
def test_gather_memory_bounds_what_a_rank_takes(
    pool: RankPool, tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    rounds = []
    for times in (1, 3):
        found = gathered(pool, tmp_path / f"{times}", times * LEAST)
        assert_right(found, expected)
        for each in found:
            assert LEAST // 3 < each.peak <= times * LEAST
        rounds.append(found[0].rounds)
    assert rounds[0] > rounds[1] > 2


def test_the_least_of_any_rank_counts(
    pool: RankPool, tmp_path: Path, expected: list[torch.Tensor]
) -> None:
    found = gathered(pool, tmp_path / "run", 10 * LEAST, LEAST, 2 * LEAST, 5 * LEAST)
    assert_right(found, expected)
    assert max(each.peak for each in found) <= LEAST


@pytest.mark.parametrize("of_ranks", [[LEAST - 1], [10**9, 10**9, LEAST - 1, 10**9]])
def test_a_matrix_too_large_is_refused_on_all_ranks(
    pool: RankPool, tmp_path: Path, of_ranks: list[int]
) -> None:
    for found in gathered(pool, tmp_path / "run", *of_ranks):
        assert found.error is not None
        assert f"gather_memory is {LEAST - 1} bytes" in found.error
        assert f"'p{COUNT}', of shape [{ROWS}, {COLUMNS}]" in found.error
        assert f"pass gather_memory={LEAST}" in found.error
        assert found.unchanged
        assert (found.step, found.rounds) == (0, 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("messages", "at_once"), [(0, 1), (1, 1), (2, 2), (2.9, 2), (100, 4)])
def test_what_is_spread_at_once_is_bounded(pool: RankPool, messages: float, at_once: int) -> None:
    nbytes = 6 * 16 * 16 * 4
    found = pool.run(RANKS, "tests.rank_programs.memory:spread_peak", int(messages * nbytes))
    assert found == [at_once * nbytes] * RANKS


@pytest.mark.parametrize("present", [{0, 1, 8}, {0, 3, 4, 6}, {8}, set(range(9))])
def test_pages_stay_valid_while_others_are_only_written(
    pool: RankPool, tmp_path: Path, present: set[int]
) -> None:
    for found in pool.run(2, "tests.rank_programs.memory:step_late", tmp_path / "run", present):
        assert found == [2.0 if index in present else 1.0 for index in range(9)]
