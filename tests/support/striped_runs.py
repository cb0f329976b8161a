"""A run that is striped over several directories, and looks at where its pages are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tierstore.run.directories
from tests.support.toy import RANK, Spec, Toy

# Six pages of about 8 KiB, and two that are shorter.
MODEL: list[list[Spec]] = [
    [(f"matrix{i}", (30, 30), torch.float32, {"momentum": torch.float32}, False) for i in range(6)],
    [(f"vector{i}", (50,), torch.bfloat16, {"average": torch.float32}, True) for i in range(2)],
    [("last", (7, 3), torch.float32, {}, False)],
]
PAGES = 8


@contextmanager
def known_bandwidths() -> Iterator[None]:
    """Two pages to the first of two directories, and one to the other, in new runs."""

    def known(storages: Sequence[Any], page_bytes: int) -> list[float]:
        return [2e9, 1e9, 1e9][: len(storages)]

    with mock.patch.object(tierstore.run.directories, "measured_bandwidths", known):
        yield


def toy(directories: Any, **options: Any) -> Toy:
    with known_bandwidths():
        return Toy(directories, MODEL, page_bytes=8192, **options)


def made(directories: Sequence[Path], steps: int = 3, **options: Any) -> Sequence[Path]:
    """Leave a committed run behind."""
    run = toy(directories, **options)
    for _ in range(steps):
        run.step()
    run.store.close()
    return directories


def resumed(directories: Sequence[Path] | Path, step: int = 3) -> Toy:
    run = toy(directories, resume=True)
    assert run.store.restore() == step
    run.assert_at(step)
    return run


def numbers(directory: Path) -> list[int]:
    """Return the numbers of the pages in a directory."""
    return [int(path.name[5:11]) for path in sorted((directory / RANK).glob("page-*.a"))]
