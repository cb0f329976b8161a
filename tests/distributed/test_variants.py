"""Blocks, NorMuon, hooks and QK-clip: the same result on ranks as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import muon
from examples.matrix_statistics import MatrixStatistics
from tests.rank_programs.checks import assert_as_one_process
from tests.rank_programs.training import Case, Heads, one_process
from tests.support.rank_pool import RankPool
from tests.support.training import Shapes

# name -> (shape, param group of training.make_groups()).
SHAPES: Shapes = {
    "wide": ((12, 40), 9),
    "queries": ((24, 20), 0),
    "bias": ((24,), 1),
    "high": ((40, 12), 9),
    "keys": ((16, 20), 9),
    "experts": ((4, 8, 10), 5),
    "square": ((16, 16), 9),
    "rows": ((12, 40), 10),
    "columns": ((40, 13), 10),
    "more experts": ((4, 8, 10), 11),
    "one row": ((1, 9), 10),
}
HEADS: Heads = {"queries": (6, 1.0), "bias": (6, 1.0), "keys": (4, 0.5)}
SMALL_PAGES = {"page_bytes": 4096, "buffers": 5}
LAYOUTS = [
    *((2, layout) for layout in ("plain", "rows", "columns", "fsdp")),
    *((3, layout) for layout in ("rows", "columns", "fsdp")),
    *((4, layout) for layout in ("plain", "rows", "fsdp", "hsdp", "fsdp and tp", "experts")),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_blocks_rows_and_clips_do_not_depend_on_the_partition(
    ranks: int, layout: str, pool: RankPool, tmp_path: Path
) -> None:
    case = Case(
        layout=layout,
        shapes=SHAPES,
        directory=tmp_path / "run",
        store=SMALL_PAGES,
        heads=dict(HEADS),
    )
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, one_process(SHAPES, {}, heads=HEADS))


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_flat_ranges_cut(ranks: int, pool: RankPool, tmp_path: Path) -> None:
    """Pages and ranks cut rows anywhere; each part has a copy of the average of its row."""
    case = Case(
        layout="plain",
        shapes=SHAPES,
        directory=tmp_path / "run",
        store=SMALL_PAGES,
        options={"partition": "flat"},
    )
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, SHAPES, one_process(SHAPES, {}))


def test_blocks_that_no_rank_cuts_do_not_travel(pool: RankPool) -> None:
    """Two ranks with half of the rows each: only whole steps, three in ten, send anything."""
    shapes: Shapes = {"square": SHAPES["square"]}
    sent = []
    for last in (2, 3, 5, 10):
        case = Case(layout="rows", shapes=shapes, last=last)
        of_ranks = pool.run(2, "tests.rank_programs.training:train", case)
        sent.append([trained.bytes_exchanged for trained in of_ranks])
    nbytes = 16 * 16 // 2 * 2  # Half of the matrix there, and as much of the update back.
    assert sent == [[0, 0], [nbytes] * 2, [nbytes] * 2, [3 * nbytes] * 2]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_hyperball_agrees_on_every_partition(ranks: int, layout: str, pool: RankPool) -> None:
    """Sums of squares are added in another order, in float64; then float32 rounds the rest.

    A last bit of float32 that differs (2^-24) grows little in ten steps, because the gradients do
    not depend on the weights.
    """
    options = {"hooks": [muon.Hyperball()], "adjust_lr_fn": "unit", "weight_decay": 0.0}
    case = Case(layout=layout, shapes=SHAPES, options=options, uniform=True)
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    expected, _ = one_process(SHAPES, options, uniform=True)
    for trained in of_ranks:
        for name, values in trained.values.items():
            whole = expected[name].flatten()[trained.positions[name]]
            torch.testing.assert_close(values, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_statistics_equal_one_process(ranks: int, layout: str, pool: RankPool) -> None:
    """One rank sees the whole input of each matrix, and all its ranks add up the update."""
    hook = MatrixStatistics()
    hook.is_on = True
    case = Case(layout=layout, shapes=SHAPES, options={"hooks": [hook]}, uniform=True, last=1)
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    one_process(SHAPES, {"hooks": [hook]}, steps=1, uniform=True)
    expected = hook.take()
    assert {name for name, _ in expected} == {n for n, (_, group) in SHAPES.items() if group != 1}
    places = [place for trained in of_ranks for place in trained.statistics]
    assert sorted(places) == sorted(expected)
    for trained in of_ranks:
        for place, found in trained.statistics.items():
            # The inputs are the same bits, in batches of the same order; sums are of float64.
            assert found == pytest.approx(expected[place], rel=1e-9), place
