"""Runs that go on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.rank_programs.checkpoints import Job
from tests.support.published import names_in
from tierstore.tools.inspect.verify import verify

WORK = "tests.rank_programs.checkpoints:work"
RESUMED = {"resume": True}


def job_of(directory: Path, layout: str, *steps: int, **options: Any) -> Job:
    return Job(
        run=directory / "run",
        layout=layout,
        steps=steps,
        dtype=torch.bfloat16,
        awkward=False,
        **options,
    )


def assert_run(run: Path, ranks: int) -> None:
    assert names_in(run) == [f"rank-{rank:05d}" for rank in range(ranks)]
    assert verify(run).faults == ()
