"""What is not one model of all ranks is refused on all of them, before a step."""

from __future__ import annotations

import re

import pytest

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
