"""States that several ranks change, and the state dict that they load back."""

from __future__ import annotations

from pathlib import Path

from tests.support.rank_pool import RankPool

PROGRAMS = "tests.rank_programs.written_states"


def test_one_rank_alone_changes_no_state(pool: RankPool) -> None:
    for raised in pool.run(2, f"{PROGRAMS}:change_alone"):
        for way, message in raised.items():
            assert message.startswith("RuntimeError"), way
            assert "write_states" in message
            assert "reset_state" in message


def test_own_state_dict_is_written_if_a_rank_has_another_tensor(
    pool: RankPool, tmp_path: Path
) -> None:
    for (unchanged, copied), was_reset in pool.run(2, f"{PROGRAMS}:load_own", tmp_path / "run"):
        assert unchanged == 0
        assert copied > 0
        assert was_reset
