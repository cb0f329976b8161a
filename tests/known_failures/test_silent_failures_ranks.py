"""Calls that other ranks do not make, and what ranks find out too late about each other.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import pytest

from tests.support.rank_pool import RankPool

CALLS = "tests.rank_programs.differing_calls"


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="there is no roll call")
def test_a_call_that_another_rank_does_not_make_is_refused_and_the_next_step_works(
    pool: RankPool,
) -> None:
    (alone, first_step), (_, second_step) = pool.run(2, f"{CALLS}:state_dict_of_one")
    assert "rank 1" in alone
    assert (first_step, second_step) == ("", "")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="both wait, and the store fails")
def test_a_store_that_one_rank_opens_is_refused_and_the_next_step_works(
    pool: RankPool,
) -> None:
    for first, second in pool.run(2, f"{CALLS}:store_of_one"):
        assert first
        assert second == ""


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="all ranks are asked for names")
def test_a_state_dict_of_own_parts_needs_no_other_rank(pool: RankPool) -> None:
    assert pool.run(2, f"{CALLS}:state_dict_of_own_parts") == ["", ""]
