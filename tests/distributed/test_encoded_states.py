"""Encoded states: the same result on ranks as in one process, on every partition of the grid."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_programs.checks import assert_as_one_process
from tests.rank_programs.training import STEPS, Case, one_process
from tests.support.rank_pool import RankPool
from tests.support.training import Shapes

# Blocks have 256 columns: 2, 3 or 4 ranks may cut these, and rows of more bytes than a page.
SHAPES: Shapes = {
    "wide": ((6, 3072), 0),
    "narrow": ((6, 3072), 0),
    "short": ((40, 24), 0),
    "experts": ((4, 3, 3072), 5),
    "more experts": ((4, 3, 3072), 5),
    "bias": ((24,), 1),
    "embedding": ((9, 3072), 1),
}
ROWS: Shapes = {"uneven": ((7, 300), 0), "tail": ((35, 1000), 0), **SHAPES}
OPTIONS: list[dict[str, Any]] = [
    {"momentum_dtype": torch.int8},
    {"momentum_dtype": torch.int8, "master": "24bit", "moments_dtype": torch.int8},
]
LAYOUTS = [
    *((2, layout, ROWS) for layout in ("plain", "rows", "fsdp", "copies")),
    *((3, layout, ROWS) for layout in ("rows", "fsdp")),
    *((4, layout, ROWS) for layout in ("plain", "fsdp", "hsdp")),
    *((ranks, "columns", SHAPES) for ranks in (2, 3, 4)),
    (4, "fsdp and tp", SHAPES),
    (4, "experts", SHAPES),
]
SMALL_PAGES = {"page_bytes": 8192, "buffers": 5}


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("ranks", "layout", "shapes"), LAYOUTS, ids=[f"{n}-{layout}" for n, layout, _ in LAYOUTS]
)
def test_the_partition_does_not_matter(
    ranks: int,
    layout: str,
    shapes: Shapes,
    options: dict[str, Any],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = Case(
        layout=layout,
        shapes=shapes,
        directory=tmp_path / "run",
        store=SMALL_PAGES,
        options=options,
    )
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, shapes, one_process(shapes, options))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_flat_ranges_are_cut_between_blocks(ranks: int, pool: RankPool, tmp_path: Path) -> None:
    options = {"partition": "flat", **OPTIONS[1]}
    case = Case(
        layout="plain",
        shapes=ROWS,
        directory=tmp_path / "run",
        store=SMALL_PAGES,
        options=options,
    )
    of_ranks = pool.run(ranks, "tests.rank_programs.training:train", case)
    assert_as_one_process(of_ranks, ROWS, one_process(ROWS, options))
    cuts = {
        chunk.offsets[-1]
        for trained in of_ranks
        for (name, state), chunks in trained.states.items()
        if state == "momentum_buffer" and ROWS[name][0][-1] >= 128
        for chunk, _ in chunks
    }
    assert len(cuts) > 1
    assert all(cut % 256 == 0 for cut in cuts)


@pytest.mark.long
def test_it_resumes(pool: RankPool, tmp_path: Path) -> None:
    case = Case(
        layout="fsdp",
        shapes=ROWS,
        directory=tmp_path / "run",
        store=SMALL_PAGES,
        options=OPTIONS[1],
        last=4,
    )
    pool.run(3, "tests.rank_programs.training:train", case)
    later = dataclasses.replace(case, first=5, last=STEPS)
    of_ranks = pool.run(3, "tests.rank_programs.training:train", later)
    expected = one_process(ROWS, OPTIONS[1])
    assert_as_one_process(of_ranks, ROWS, expected)


def test_a_tensor_cut_off_the_grid_is_refused(pool: RankPool) -> None:
    shapes: Shapes = {"odd": ((6, 1000), 0)}
    case = Case(layout="columns", shapes=shapes, options=OPTIONS[0])
    expected = r"'odd' cannot be paged: a rank has its columns 0 to 500, .* multiples of 256"
    with pytest.raises(AssertionError, match=expected):
        pool.run(2, "tests.rank_programs.training:train", case)
