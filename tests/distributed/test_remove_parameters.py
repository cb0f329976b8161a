"""Parameters that all ranks remove together, and runs that go on without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_programs.checks import assert_as_one_process
from tests.rank_programs.training import SHAPES, STEPS, Case, one_process
from tests.support.independent_reader import read_checkpoint, read_run
from tests.support.rank_pool import RankPool
from tierstore.checkpoint.publish_stopped import publish_run
from tierstore.inspection.verify import verify

WORK = "tests.rank_programs.removal:train"
# Of pages with others, of all of a group, of one rank alone, and without elements.
REMOVED = ["wide", "tall", "square", "two", "embedding", "nothing", "last"]
long = pytest.mark.long


@pytest.mark.parametrize(
    ("world_size", "layout", "options", "page_bytes"),
    [
        pytest.param(2, "plain", {"partition": "by_parameter"}, 40000, marks=long),
        (3, "plain", {}, 6000),
        pytest.param(3, "plain", {"partition": "flat"}, 6000, marks=long),
        (3, "rows", {}, 6000),
        pytest.param(3, "fsdp", {}, 40000, marks=long),
        pytest.param(4, "hsdp", {}, 6000, marks=long),
        pytest.param(4, "fsdp and tp", {}, 6000, marks=long),
        pytest.param(4, "experts", {}, 6000, marks=long),
    ],
)
def test_the_others_go_on_as_before(
    world_size: int,
    layout: str,
    options: dict[str, Any],
    page_bytes: int,
    pool: RankPool,
    tmp_path: Path,
) -> None:
    parameters, states = one_process(SHAPES, options)
    kept = {name: shape for name, shape in SHAPES.items() if name not in REMOVED}
    expected = (
        {name: parameters[name] for name in kept},
        {key: value for key, value in states.items() if key[0] in kept},
    )
    case = Case(
        layout=layout,
        directory=tmp_path / "whole",
        store={"page_bytes": page_bytes, "buffers": 5},
        options=options,
    )
    whole = pool.run(world_size, WORK, case, REMOVED, 4)
    assert_as_one_process(whole, kept, expected)
    assert verify(tmp_path / "whole").good
    case = replace(case, directory=tmp_path / "run")
    pool.run(world_size, WORK, replace(case, last=6), REMOVED, 4)
    assert verify(tmp_path / "run").good
    assert read_run(tmp_path / "run").states.keys() == kept.keys()
    publish_run(tmp_path / "run", tmp_path / "published")
    assert verify(tmp_path / "published").good
    assert read_checkpoint(tmp_path / "published").states.keys() == kept.keys()
    refused = pool.run(
        world_size, "tests.rank_programs.removal:resume_other", replace(case, last=6), REMOVED
    )
    for text in refused:
        assert "no longer has parameter 'embedding'" in text
    rest = pool.run(world_size, WORK, replace(case, first=7, last=STEPS), REMOVED, 4)
    assert_as_one_process(rest, kept, expected)
    for one, other in zip(whole, rest, strict=True):
        assert one.pages == other.pages
        for name, values in one.values.items():
            assert torch.equal(values, other.values[name])
