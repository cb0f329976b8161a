"""The check of orders that tests of several ranks rely on sees what it should."""

from __future__ import annotations

import pytest

from tests.rank_programs.collective_order import Issued, assert_one_order

ALL = Issued(kind="all-to-all", ranks=(0, 1, 2))
FIRST = Issued(kind="broadcast", ranks=(0, 1))
SECOND = Issued(kind="broadcast", ranks=(1, 2))
THIRD = Issued(kind="broadcast", ranks=(0, 2))


def test_one_order() -> None:
    assert_one_order([[ALL, FIRST, THIRD], [ALL, FIRST, SECOND], [ALL, SECOND, THIRD]])
    assert_one_order([[], [], []])


@pytest.mark.parametrize(
    "of_ranks",
    [
        [[ALL, FIRST], [FIRST, ALL], [ALL]],
        [[ALL], [ALL], []],
        [[ALL], [Issued(kind="all-to-all", ranks=(0, 1, 2), what=(1,))], [ALL]],
        # Each pair agrees, and yet each rank waits for the next.
        [[FIRST, THIRD], [SECOND, FIRST], [THIRD, SECOND]],
    ],
)
def test_other_orders(of_ranks: list[list[Issued]]) -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        assert_one_order(of_ranks)
