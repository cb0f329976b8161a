"""The table of classes in the reference, made from the installed torch."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.optim.test_paged import twins

PAGE = Path(__file__).parents[2] / "docs/reference/torch-classes.md"

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"amsgrad": True}],
    "RMSprop": [{}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}],
}
"""Options that choose the states."""

CLASSES = {
    name: cls
    for name, cls in sorted(vars(torch.optim).items())
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
}


def bytes_of_a_step(paged: tierstore.Paged) -> tuple[int, int]:
    """Return the bytes that a step reads and writes for each element of a large parameter."""
    [spec] = [parameter.spec for group in paged.paged_groups() for parameter in group.parameters]
    numel = spec.shape[0] * spec.shape[1]
    written = spec.nbytes // numel
    # A float32 parameter is written for commits, and a step has it in memory.
    return written - (4 if spec.stores_parameter else 0), written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_these_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Counted by the store, where no page rests in memory; files are multiples of 4 KiB."""
    parameters = [nn.Parameter(torch.ones(512, 512, dtype=dtype)) for _ in range(4)]
    counted = []
    with tierstore.TierStore(tmp_path, page_bytes="1MiB", buffers=3) as store:
        paged = tierstore.Paged(parameters, torch.optim.AdamW, store=store)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            paged.step()
            store.synchronize()
            stats = store.stats()
            counted.append((stats.bytes_read, stats.bytes_written))
    expected = bytes_of_a_step(tierstore.Paged(parameters[:1], torch.optim.AdamW))
    for found, nbytes in zip(zip(*counted, strict=True), expected, strict=True):
        assert found[1] - found[0] == pytest.approx(4 * 512 * 512 * nbytes, rel=0.02)


def row(name: str, options: dict[str, Any]) -> str:
    """Return the line of a class in the table."""
    cls = CLASSES[name]
    chosen = ", ".join(f"{key}={value!r}" for key, value in options.items() if key != "lr")
    call = f"`{name}({chosen})`" if chosen else f"`{name}`"
    try:
        paged = tierstore.Paged([nn.Parameter(torch.ones(4, 4))], cls, **options)
    except ValueError as error:
        return f"| {call} | refused: {error} | | | | |"
    _, _, step = twins(cls, **options)
    for number in range(1, 8):
        step(number)  # Raises if the bits differ.
    [parameter] = paged.paged_groups()[0].parameters
    scalars = [n for n in paged.scalars_of(paged.param_groups[0]) if n != "stepped"]
    states = ", ".join(f"`{state}`" for state in (*parameter.states, *scalars))
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        of_dtype = tierstore.Paged([nn.Parameter(torch.ones(64, 64, dtype=dtype))], cls, **options)
        moved.append(" + ".join(map(str, bytes_of_a_step(of_dtype))))
    cut = "anywhere" if parameter.elementwise else "whole"
    return f"| {call} | equal | {cut} | {states} | {' | '.join(moved)} |"


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_has_the_rows(name: str) -> None:
    """Copy the rows from the failed comparison to the page."""
    expected = [row(name, options) for options in OPTIONS.get(name, [{}])]
    found = re.findall(rf"^\| `{name}\b.*$", PAGE.read_text(), re.MULTILINE)
    assert "\n".join(found) == "\n".join(expected)


def test_the_page_has_no_other_class() -> None:
    found = re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE)
    assert sorted({*found}) == sorted(CLASSES)
