"""Models that differ between ranks are refused on every rank, before a step."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other values", "ranks 0 and 2 hold the same elements of parameter 'matrix'"),
        ("other partition", "rank 2 has 'matrix'.*partition 'flat'"),
        ("other shape", r"rank 0 has 'matrix'.*\[6, 4\].*rank 2 has 'matrix'.*\[6, 5\]"),
    ],
)
def test_different_parameters(pool: RankPool, kind: str, message: str) -> None:
    for name, text in pool.run(3, "tests.rank_programs.refusals:refusal", kind):
        assert name == "RunMismatchError"
        assert re.search(message, text), text


def test_a_mesh_without_some_of_the_ranks(pool: RankPool) -> None:
    found = pool.run(3, "tests.rank_programs.refusals:refusal", "on some ranks")
    assert [name for name, _ in found] == ["PeerFailed", "PeerFailed", "ValueError"]
    for _, text in found:
        assert "its mesh has ranks [0, 1] and not this rank, 2" in text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("parts that overlap", "have 7 elements together, but it has 6"),
        ("parts that leave rows out", "have 5 elements together, but it has 6"),
    ],
)
def test_parts_that_are_not_the_whole(pool: RankPool, kind: str, message: str) -> None:
    for name, text in pool.run(3, "tests.rank_programs.refusals:refusal", kind):
        assert name == "ValueError"
        expected = f"parameter 'matrix' cannot be paged: along dimension 0 its ranks {message}"
        assert text == expected


def test_parts_in_another_order_than_the_ranks(pool: RankPool) -> None:
    found = pool.run(3, "tests.rank_programs.refusals:refusal", "parts in another order")
    assert [name for name, _ in found] == ["ValueError", "ValueError", "PeerFailed"]
    for _, text in found:
        assert "'matrix' cannot be paged: by its chunk list this rank holds [Chunk(" in text


def test_a_rank_with_rows_and_no_column_of_normuon(pool: RankPool) -> None:
    found = pool.run(3, "tests.rank_programs.refusals:refusal", "a row without a column")
    assert [name for name, _ in found] == ["PeerFailed", "PeerFailed", "ValueError"]
    for _, text in found:
        assert "cut its dimension 1 over 2 ranks or fewer" in text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other hooks", r"has the hooks \[\] .* the hooks \[Hyperball\]"),
        ("large for whole steps", "gather_memory is 64 bytes, but 3 matrices such as 'matrix'"),
    ],
)
def test_options_are_checked_at_the_first_step(pool: RankPool, kind: str, message: str) -> None:
    for name, text in pool.run(3, "tests.rank_programs.refusals:refusal", kind):
        assert name == "ValueError"
        assert re.search(message, text), text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", 0.5, "lr of param group 0 is 0.001 on rank 0 and 0.5 on rank 2"),
        ("nesterov", False, "nesterov of param group 0 is True on rank 0 and False on rank 2"),
        ("name", None, "name of param group 0 is absent on rank 0 and None on rank 2"),
    ],
)
def test_different_hyperparameters(pool: RankPool, key: str, value: object, message: str) -> None:
    """No rank steps, and all go on when the ranks agree."""
    parameter = torch.nn.Parameter(torch.ones(6, 4))
    parameter.grad = torch.ones_like(parameter)
    optimizer = muon.Muon([("matrix", parameter)])
    optimizer.step()
    optimizer.param_groups[0][key] = value
    optimizer.step()
    for raised, found in pool.run(
        3, "tests.rank_programs.refusals:other_hyperparameters", key, value
    ):
        assert len(raised) == 2
        assert all(message in text for text in raised)
        assert torch.equal(found, parameter)


def test_a_move_that_one_rank_has_no_room_for(pool: RankPool, tmp_path: Path) -> None:
    """No rank moves anything."""
    memory = [94300, 60000]
    work = "tests.rank_programs.refusals:move_where_one_has_no_room"
    for text, went_on in pool.run(2, work, tmp_path, memory):
        assert "host_memory is 60000 bytes" in text
        assert went_on


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("page_bytes", [4096, 8192], "page_bytes is 4096 on rank 0 and 8192 on rank 1"),
        ("commit_every", [1, 2], "commit_every is 1 on rank 0 and 2 on rank 1"),
        ("overwrite", [False, True], "resume is True on rank 0 and False on rank 1"),
    ],
)
def test_different_options(
    pool: RankPool, tmp_path: Path, key: str, values: list[Any], message: str
) -> None:
    """Nothing of the run is lost."""
    work = "tests.rank_programs.refusals:other_options"
    for text, step in pool.run(2, work, tmp_path / "run", key, values):
        assert message in text
        assert step == 2


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lr", "lr of param group 0 is 0.25 on rank 0 and 0.5 on rank 1"),
        ("alone", "rank 1 calls commit()"),
    ],
)
def test_different_commits(pool: RankPool, tmp_path: Path, how: str, message: str) -> None:
    """No rank waits for long, and what was committed before is there."""
    for text, step in pool.run(
        3, "tests.rank_programs.refusals:other_commit", tmp_path / "run", how
    ):
        assert message in text
        assert step == 3


def test_a_store_of_one_rank_with_a_part(pool: RankPool) -> None:
    for text in pool.run(2, "tests.rank_programs.refusals:cut_over_more_ranks"):
        assert "'matrix' cannot be paged: its shape [6, 4] is sharded over ranks" in text


def test_what_is_replaced_may_differ(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(2, "tests.rank_programs.refusals:begin_with_other_values", tmp_path)
    assert first == second


@pytest.mark.parametrize(("world_size", "warns"), [(None, False), ("1", False), ("2", True)])
def test_a_store_of_a_launched_rank_without_a_process_group(
    world_size: str | None,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with caplog.at_level(logging.WARNING, "tierstore"), tierstore.TierStore(tmp_path / "run"):
        pass
    assert ("call torch.distributed.init_process_group() before" in caplog.text) == warns
