"""Gradients that are not finite on one rank, and gradients that were not reduced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool

GRADIENTS = "tests.rank_programs.gradients"


@pytest.mark.quick(2)
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("layout", ["plain", "sharded"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_all(
    pool: RankPool, layout: str, on_disk: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "run" if on_disk else None
    found = pool.run(4, f"{GRADIENTS}:nan_on_one", directory, layout, "raise")
    for raised, changed, step, afterwards in found:
        assert raised.startswith("NonFiniteGradientError")
        assert "'second' (rank 1)" in raised
        assert (changed, step, afterwards) == (False, 1, "")


def test_all_ranks_skip_a_step(pool: RankPool) -> None:
    for warned, *rest in pool.run(4, f"{GRADIENTS}:nan_on_one", None, "plain", "skip"):
        assert "'second' (rank 1). This step is skipped" in warned
        assert rest == [False, 1, ""]


def test_a_gradient_on_a_device_that_is_not_finite_on_one_rank_is_never_committed(
    pool: RankPool, tmp_path: Path
) -> None:
    (other, first), (own, second) = pool.run(2, f"{GRADIENTS}:nan_on_a_device", tmp_path / "run")
    assert own.startswith("NonFiniteGradientError")
    assert other.startswith("PeerFailed: rank 1 failed: gradients with NaN")
    assert first == second == 1


def test_ranks_with_other_options_are_refused(pool: RankPool) -> None:
    for raised in pool.run(2, f"{GRADIENTS}:other_options"):
        assert "nonfinite is raise on rank 0 and skip on rank 1" in raised


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("layout", "ranks", "named"),
    [
        ("plain", [2], "ranks 0 and 2"),
        ("replicated", [0, 1, 3], "ranks 0 and 2"),
        ("hsdp", [2, 3], "ranks 0 and 2"),
        ("hsdp", [3], "ranks 1 and 3"),
    ],
)
def test_gradients_that_are_not_reduced_are_refused_at_the_first_step(
    pool: RankPool, layout: str, ranks: list[int], named: str
) -> None:
    for raised, changed, afterwards in pool.run(4, f"{GRADIENTS}:not_reduced", layout, 1, ranks):
        for each in raised:  # Nothing was stepped, so the next step is the first one again.
            assert each.startswith(f"ValueError: {named} hold")
            assert "'second'" in each
            assert "reduce gradients" in each
        assert (changed, afterwards) == (False, "")


@pytest.mark.parametrize("layout", ["sharded", "hsdp"])
def test_shards_of_a_gradient_may_differ(pool: RankPool, layout: str) -> None:
    """The two halves along the second dimension of the mesh."""
    for raised, changed, afterwards in pool.run(4, f"{GRADIENTS}:not_reduced", layout, 1, [1, 3]):
        assert (raised, changed, afterwards) == (["", ""], True, "")


def test_gradients_are_compared_at_every_hundredth_step(pool: RankPool) -> None:
    for raised, changed, _ in pool.run(2, f"{GRADIENTS}:not_reduced", "plain", 100, [1]):
        assert raised[0] == ""
        assert changed
        assert "ranks 0 and 1" in raised[1]


def test_gradients_may_be_rounded_otherwise(pool: RankPool) -> None:
    assert pool.run(2, f"{GRADIENTS}:rounded_otherwise") == ["", ""]


def test_a_rank_may_have_no_gradient(pool: RankPool) -> None:
    for raised, warned in pool.run(2, f"{GRADIENTS}:absent_on_one"):
        assert raised == ""
        assert "no parameter has a gradient" in warned


def test_a_gradient_with_other_rows_than_the_parameter_is_refused(pool: RankPool) -> None:
    for rank, (raised, step) in enumerate(pool.run(2, f"{GRADIENTS}:cut_elsewhere")):
        assert raised == (
            "ValueError: on this rank, the local tensor of the gradient of 'matrix' has shape "
            f"[{4 - 2 * rank}, 4] and the local parameter [3, 4]: shard both alike"
        )
        assert step == 0


@pytest.mark.parametrize("layout", ["plain", "sharded"])
def test_a_gradient_that_is_missing_on_one_rank_is_refused_on_request(
    pool: RankPool, layout: str
) -> None:
    for raised, step in pool.run(4, f"{GRADIENTS}:missing_on_one", layout, "raise"):
        assert raised.startswith("ValueError: rank 1 has no gradient of 'third', but other ranks")
        assert step == 0
    for found in pool.run(4, f"{GRADIENTS}:missing_on_one", layout, "zeros"):
        assert found == ("", 1)


def test_gradients_in_float32_beside_shards(pool: RankPool, tmp_path: Path) -> None:
    pool.run(3, f"{GRADIENTS}:summed_up_elsewhere", tmp_path / "run")
