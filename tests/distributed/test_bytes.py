"""Bytes that ranks send to each other, against the formulas of docs/internals/exchange.md."""

from __future__ import annotations

import pytest

from tests.rank_programs.training import Case, Shapes, Trained
from tests.support.rank_pool import RankPool

# Eleven equal matrices, and a table; shards are equal on 2, 3 and 4 ranks.
ROWS, COLUMNS, COUNT = 12, 8, 11
EQUAL: Shapes = {f"matrix{n}": ((ROWS, COLUMNS), 0) for n in range(COUNT)} | {"table": ((48, 4), 1)}
MATRIX = ROWS * COLUMNS
ELEMENTS = COUNT * MATRIX
ALL_ELEMENTS = ELEMENTS + 48 * 4
STEPS = 2
WIRE = 2  # Bytes of an element of a matrix, and
HELD = 4  # of a parameter.


def trained(pool: RankPool, world_size: int, layout: str, **options: str) -> list[Trained]:
    case = Case(layout=layout, shapes=EQUAL, uniform=True, last=STEPS, options=options)
    return pool.run(world_size, "tests.rank_programs.training:train", case)


def exchanged(of_ranks: list[Trained]) -> float:
    return sum(each.bytes_exchanged for each in of_ranks) / STEPS


def spread(of_ranks: list[Trained]) -> float:
    return sum(each.bytes_spread for each in of_ranks) / STEPS


def gathered_everywhere(world_size: int) -> int:
    """Bytes that an all-gather of every matrix sends."""
    return (world_size - 1) * ELEMENTS * WIRE


@pytest.mark.quick(3)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["rows", "fsdp"])
def test_sharded(pool: RankPool, world_size: int, layout: str) -> None:
    found = trained(pool, world_size, layout)
    sent = exchanged(found)
    assert sent * world_size == 2 * ELEMENTS * WIRE * (world_size - 1)
    assert sent < gathered_everywhere(world_size) or world_size == 2
    assert spread(found) == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicated_by_parameter(pool: RankPool, world_size: int) -> None:
    found = trained(pool, world_size, "plain", partition="by_parameter")
    assert exchanged(found) == 0
    assert spread(found) == (world_size - 1) * ALL_ELEMENTS * HELD


@pytest.mark.parametrize(
    ("world_size", "away"),
    # Elements that their matrix's owner lacks. On 2 and on 4 ranks the sixth matrix is cut
    # in halves; on 4, a quarter of the third and of the ninth lies on the other rank.
    [(2, MATRIX // 2), (4, MATRIX // 4 + MATRIX // 2 + MATRIX // 4)],
)
def test_flat(pool: RankPool, world_size: int, away: int) -> None:
    found = trained(pool, world_size, "plain", partition="flat")
    assert exchanged(found) == 2 * away * WIRE
    # One subgroup has fewer cuts than ranks.
    assert exchanged(found) <= 2 * (world_size - 1) * MATRIX * WIRE
    assert spread(found) == (world_size - 1) * ALL_ELEMENTS * HELD


def test_hsdp(pool: RankPool) -> None:
    found = trained(pool, 4, "hsdp")
    replicas = 2
    assert exchanged(found) * 4 == 2 * ELEMENTS * WIRE * 3
    assert spread(found) == (replicas - 1) * ALL_ELEMENTS * HELD


def test_nothing_is_sent_to_oneself(pool: RankPool) -> None:
    for layout in ("plain", "rows"):
        found = trained(pool, 1, layout)
        assert (exchanged(found), spread(found)) == (0, 0)
