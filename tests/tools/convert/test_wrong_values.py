"""Values of foreign files that the system would not write: a clear error, or no difference."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.deepspeed_files import classes_of_deepspeed
from tierstore.tools.convert.convert import convert

FIXTURES = Path(__file__).parent / "fixtures"
SOURCES = [
    "deepspeed/zero2-muon/checkpoint/step3",
    "deepspeed/zero3-adamw/checkpoint/step3",
    "universal/zero1-adamw/step3_universal",
    "universal/zero3-adamw/step3_universal",
]
WRONG = (None, 5, -1, 2**62, "x", (), [], {}, [1], {"a": 1}, torch.ones(2, 2))
_DEPTH_MAX = 5
_ITEMS_MAX = 3


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indices that lead to values, of long lists and dicts the first ones."""
    if path:
        yield path
    if len(path) < _DEPTH_MAX and isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if not path else keys[:_ITEMS_MAX]:
            yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """Return a copy of a value with another one at a place."""
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = wrong
    return made


def try_wrong_values(source: str, tmp_path: Path, count: int) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(FIXTURES / source, folder)
    names = ["*rank_0*optim_states.pt", "*model_states.pt", "zero/*.pt", "zero/lm_head.weight/*.pt"]
    outcomes = set()
    numbers = random.Random(source)
    with classes_of_deepspeed():
        values = {
            path: torch.load(path, weights_only=False)
            for name in names
            for path in sorted(folder.glob(name))
        }
        changes = [
            (path, place, wrong)
            for path, value in values.items()
            for place in places(value)
            for wrong in WRONG
        ]
        for path, place, wrong in numbers.sample(changes, min(count, len(changes))):
            torch.save(replaced(values[path], place, wrong), path)
            try:
                convert(folder, tmp_path / "out", to="dcp", dry_run=True)
            except tierstore.CheckpointError:
                outcomes.add("refused")
            except tierstore.CorruptionError:
                outcomes.add("damaged")
            else:
                outcomes.add("means nothing")
            torch.save(values[path], path)
    assert "damaged" in outcomes
    assert "means nothing" in outcomes


@pytest.mark.quick(1)
@pytest.mark.parametrize("source", SOURCES)
def test_wrong_values(source: str, tmp_path: Path) -> None:
    try_wrong_values(source, tmp_path, count=80)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("source", SOURCES)
def test_all_wrong_values(source: str, tmp_path: Path) -> None:
    try_wrong_values(source, tmp_path, count=10**6)
