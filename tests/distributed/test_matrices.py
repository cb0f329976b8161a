"""Parameters that hold several matrices: the same bits on ranks as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank_programs.checks import assert_as_one_process
from tests.rank_programs.training import Case, States, Tensors, one_process
from tests.support.rank_pool import RankPool
from tests.support.training import Shapes

# name -> (shape, param group of training.make_groups()).
SHAPES: Shapes = {
    "experts": ((12, 16, 20), 5),
    "bias": ((13,), 1),
    "gate_up": ((24, 10), 7),
    "qkv": ((32, 20), 6),
    "more experts": ((5, 6, 14), 5),
    "convolution": ((9, 4, 3, 3), 8),
    "dense": ((12, 20), 0),
    "again": ((12, 16, 20), 5),
}
MATRICES = {(16, 20): 24, (10, 12): 2, (4, 20): 8, (6, 14): 5, (9, 36): 1, (12, 20): 1}
TOTAL_FLOPS = sum(n * (20 * r**2 * c + 10 * r**3) for (r, c), n in MATRICES.items())
SMALL_PAGES = {"page_bytes": 8192, "buffers": 5}


@pytest.fixture(scope="module")
def expected() -> tuple[Tensors, States]:
    return one_process(SHAPES, {})


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        *((2, layout) for layout in ("plain", "rows", "columns", "fsdp")),
        *((3, layout) for layout in ("rows", "columns", "fsdp")),
        *((4, layout) for layout in ("plain", "rows", "fsdp", "hsdp", "fsdp and tp", "experts")),
    ],
)
def test_one_result_on_every_partition(
    ranks: int, layout: str, pool: RankPool, expected: tuple[Tensors, States], tmp_path: Path
) -> None:
    case = Case(layout=layout, shapes=SHAPES, directory=tmp_path / "run", store=SMALL_PAGES)
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, expected)
    for trained in of_ranks:
        assert trained.flops == of_ranks[0].flops
        assert sum(trained.flops) == TOTAL_FLOPS


def test_a_rank_needs_nothing_of_whole_experts(pool: RankPool) -> None:
    """Twelve experts on three ranks, cut between experts: no matrix travels."""
    shapes: Shapes = {"experts": SHAPES["experts"]}
    of_ranks = pool.run(3, "tests.rank_programs.training:train", Case(layout="rows", shapes=shapes))
    assert [trained.bytes_exchanged for trained in of_ranks] == [0, 0, 0]
    of_an_expert = 20 * 16**2 * 20 + 10 * 16**3
    assert [trained.flops for trained in of_ranks] == [[4 * of_an_expert] * 3] * 3
    assert_as_one_process(of_ranks, shapes, one_process(shapes, {}))
