"""Ranks that are about to commit different scalars are refused, however many are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.thread_ranks import ThreadJob
from tests.support.toy import Toy
from tierstore.ranks.peers import Ranks


def committed(directory: Path, *rank_scalars: dict[str, dict[str, float]]) -> list[object]:
    """For each rank, the step that is durable, or what commit() raised."""

    def act(ranks: Ranks) -> int:
        toy = Toy(directory, process_group=ranks)
        with toy.store as store:
            toy.step()
            store.pages.scalars.update(rank_scalars[ranks.rank])
            store.commit()
            store.synchronize()
            return store.committed.step

    return ThreadJob(len(rank_scalars)).run(act)


def test_the_order_of_scalars_may_differ(tmp_path: Path) -> None:
    one = {"first": {"step": 1.0}, "second": {"step": 1.0}, "third": {"step": 2.0}}
    assert committed(tmp_path, one, dict(reversed(one.items()))) == [1, 1]


@pytest.mark.parametrize("other", [{"step": 2.0}, {"step": 1}, {"step": -1.0}, {}, {"count": 1.0}])
def test_other_scalars_on_one_rank_are_refused(other: dict[str, float], tmp_path: Path) -> None:
    one = {"first": {"step": 1.0}, "second": {"step": 1.0}}
    for error in committed(tmp_path, one, one | {"second": other}):
        assert isinstance(error, ValueError)
        assert str(error).startswith("the scalars differ between ranks")
