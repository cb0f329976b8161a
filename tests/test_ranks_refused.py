"""What is not one model of all ranks is refused on all of them, before a step."""

from __future__ import annotations

import re

import pytest
import torch

import muon
from tests.rank_pool import RankPool


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other values", "ranks 0 and 2 hold the same elements of parameter 'matrix'"),
        ("other partition", "rank 2 has 'matrix'.*partition 'flat'"),
        ("other shape", r"rank 0 has 'matrix'.*\[6, 4\].*rank 2 has 'matrix'.*\[6, 5\]"),
    ],
)
def test_different_parameters(pool: RankPool, kind: str, message: str) -> None:
    for name, text in pool.run(3, "tests.rank_refusals:refusal", kind):
        assert name == "RunMismatchError"
        assert re.search(message, text), text


def test_a_mesh_without_some_of_the_ranks(pool: RankPool) -> None:
    found = pool.run(3, "tests.rank_refusals:refusal", "on some ranks")
    assert [name for name, _ in found] == ["PeerFailed", "PeerFailed", "ValueError"]
    for _, text in found:
        assert "its mesh has ranks [0, 1] and not this one, 2" in text


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
    for raised, found in pool.run(3, "tests.rank_refusals:other_hyperparameters", key, value):
        assert len(raised) == 2
        assert all(message in text for text in raised)
        assert torch.equal(found, parameter)
