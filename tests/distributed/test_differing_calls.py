"""Calls that other ranks do not make: refused on all ranks, and the next step works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool

CALLS = "tests.rank_programs.differing_calls"


@pytest.mark.long
def test_a_call_that_another_rank_does_not_make_is_refused_and_the_next_step_works(
    pool: RankPool,
) -> None:
    (alone, first_step), (_, second_step) = pool.run(2, f"{CALLS}:state_dict_of_one")
    assert alone.startswith("RollCallError: rank 1 did not call state_dict() within")
    assert (first_step, second_step) == ("", "")


@pytest.mark.long
def test_a_state_dict_of_one_rank_before_the_first_step_is_refused(pool: RankPool) -> None:
    alone, other = pool.run(2, f"{CALLS}:state_dict_before_a_step")
    assert alone[0].startswith("RollCallError: rank 1 did not call state_dict() within")
    assert alone[1:] == other[1:] == [""]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "name",
    [
        "state_dict()",
        "load_state_dict()",
        "read_states()",
        "write_states()",
        "move()",
        "commit()",
        "synchronize()",
        "checkpoint()",
        "restore()",
        "restore(rewind=True)",
        "add_param_group()",
    ],
)
def test_other_calls_are_refused_at_once_on_all_ranks_and_change_nothing(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    (first, *found), (second, *also) = pool.run(2, f"{CALLS}:other_call", tmp_path, name)
    assert first == second
    assert first.startswith("RollCallError: rank ")
    assert f"rank 0 calls {name}" in first
    assert "rank 1 calls step()" in first
    # Steps that were committed, and whether the parameters are as without the other call.
    assert found == also == ["", 3, True]


@pytest.mark.long
def test_a_store_that_one_rank_opens_is_refused_and_the_next_step_works(
    pool: RankPool,
) -> None:
    (opened, second_step), (stepped, step) = pool.run(2, f"{CALLS}:store_of_one")
    assert opened.startswith("RollCallError: rank 1 did not call TierStore() within 3 s")
    assert stepped.startswith("RollCallError: rank 0 calls TierStore() and this call is step()")
    assert (second_step, step) == ("", "")


def test_a_store_that_one_rank_opens_is_refused_and_all_ranks_open_it_later(
    pool: RankPool,
) -> None:
    alone, other = pool.run(2, f"{CALLS}:open_again")
    assert alone[0].startswith("RollCallError: rank 1 did not call TierStore() within 1 s")
    assert alone[1:] == other[1:] == [""]


def test_states_of_own_parts_need_no_other_rank(pool: RankPool) -> None:
    assert pool.run(2, f"{CALLS}:state_dict_of_own_parts") == ["", ""]
    assert pool.run(2, f"{CALLS}:states_of_own_parts") == [[True, True], [True, True]]
