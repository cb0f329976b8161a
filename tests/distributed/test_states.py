"""State dicts of several ranks equal the state dict of one process, in parts or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.rank_programs.training import FEW, SHAPES, Case
from tests.support.rank_pool import RankPool
from tests.support.training import Shapes

long = pytest.mark.long
PLAIN: list[Any] = [
    (2, "plain", {"partition": "by_parameter"}),
    pytest.param(3, "plain", {"partition": "flat"}, marks=long),
]
CUT: list[Any] = [
    pytest.param(2, "copies", {}, marks=long),
    pytest.param(1, "fsdp", {}, marks=long),
    (3, "fsdp", {}),
    pytest.param(3, "columns", {}, marks=long),
    (4, "hsdp", {}),
]
# Of NorMuon, whose states have an element for each row.
ROWS: Shapes = {
    "embedding": ((53, 16), 1),
    "bias": ((13,), 1),
    "wide": ((12, 40), 10),
    "tall": ((65, 12), 10),
    "nothing": ((0, 4), 10),
    "experts": ((4, 8, 10), 11),
}
STACKED: list[Any] = [
    pytest.param(4, "fsdp and tp", {}, marks=long),
    (4, "experts", {}),
    (3, "uneven", {}),
    (4, "uneven", {}),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout", "options"), [*PLAIN, *CUT, *STACKED])
def test_saved_loaded_and_gone_on_from(
    ranks: int, layout: str, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    case = Case(layout=layout, options=options)
    pool.run(ranks, "tests.rank_programs.states:round_trip", case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "layout", "options"), [*PLAIN, *CUT, *STACKED])
def test_states_of_rows_are_saved_and_loaded(
    ranks: int, layout: str, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    """Also where ranks cut rows, and have copies of their elements."""
    case = Case(layout=layout, shapes=ROWS, options=options)
    pool.run(ranks, "tests.rank_programs.states:round_trip", case, tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout", "options"), [*PLAIN, *CUT])
def test_helpers_of_torch(
    ranks: int, layout: str, options: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    case = Case(layout=layout, options=options)
    pool.run(ranks, "tests.rank_programs.states:helpers", case, tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("shapes", [SHAPES, ROWS, FEW], ids=["all", "rows", "few"])
def test_states_of_uneven_parts_are_saved_by_stock_pytorch(
    ranks: int, shapes: Shapes, pool: RankPool, tmp_path: Path
) -> None:
    case = Case(layout="uneven", shapes=shapes)
    found = pool.run(ranks, "tests.rank_programs.states:save_by_stock", case, tmp_path / "saved")
    loaded = {name: torch.full_like(tensor, 7) for name, tensor in found[0].items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    for name, tensor in found[0].items():
        assert torch.equal(loaded[name], tensor), name


def test_states_of_other_rows_are_refused(pool: RankPool) -> None:
    found = pool.run(2, "tests.rank_programs.states:load_states_of_other_rows")
    for rank, (text, values) in enumerate(found):
        rows = 5 - 2 * rank
        assert text == (
            "ValueError: the local tensor of state 'momentum_buffer' of 'matrix' has shape "
            f"[{rows}, 3] on this rank, expected [4, 3]: pass the whole state, or shard it like "
            "the parameter"
        )
        assert not values.any()


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout", "options"), [*PLAIN, *CUT])
def test_adamw_of_torch(ranks: int, layout: str, options: dict[str, Any], pool: RankPool) -> None:
    pool.run(ranks, "tests.rank_programs.states:stock_adamw", Case(layout=layout, options=options))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout", "options"), [*PLAIN, *CUT])
def test_muon_of_torch(ranks: int, layout: str, options: dict[str, Any], pool: RankPool) -> None:
    pool.run(ranks, "tests.rank_programs.states:stock_muon", Case(layout=layout, options=options))


@pytest.mark.parametrize(("ranks", "layout"), [(2, "plain"), (2, "fsdp")])
def test_what_one_rank_does_otherwise_is_refused_on_all(
    ranks: int, layout: str, pool: RankPool
) -> None:
    """And changes nothing."""
    first, second = pool.run(ranks, "tests.rank_programs.states:refused", Case(layout=layout))
    for messages in (first, second):
        if layout == "plain":
            refusal = "RuntimeError: 'momentum_buffer' of parameter 'wide'"
            assert messages["alone"].startswith(refusal)
            assert "wide" in messages["names"]
        else:  # Each rank has its own states, and needs no other rank.
            assert messages["alone"] == messages["names"] == ""
        assert messages["calls"].startswith("RollCallError: rank ")
        assert "rank 0 calls load_state_dict()" in messages["calls"]
        assert "rank 1 calls step()" in messages["calls"]
        assert "ranks 0 and 1 differ" in messages["missing"]
        if layout == "fsdp":
            assert messages["placement"].startswith("ValueError: state 'momentum_buffer' of 'wide'")
    assert first["wrong_shape"].startswith("PeerFailed: rank 1")
    assert second["wrong_shape"].startswith("ValueError: state 'momentum_buffer'")
