"""Checkpoints that a toy run publishes, and which of them are marked or whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tierstore
from tests.support.commands import call
from tests.support.faults import FaultyStorage
from tests.support.originals import committed_pages, flip
from tests.support.toy import RANK, Toy
from tierstore.storage.select import open_storage

MARK = "rank-00000.whole"


def step_durably(toy: Toy) -> None:
    toy.step()
    toy.store.synchronize()


def publish(toy: Toy, path: Path, keep_last: int | None = None) -> None:
    toy.store.checkpoint(path, keep_last=keep_last).wait()


def publish_steps(toy: Toy, folder: Path, *names: str, keep_last: int | None = None) -> None:
    for name in names:
        toy.step()
        publish(toy, folder / name, keep_last)


def whole_ones(folder: Path) -> set[str]:
    """The names of the checkpoints in a folder that `tierstore verify` finds whole."""
    return {path.name for path in folder.iterdir() if call("verify", path)[0] == 0}


def marked_ones(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if (path / MARK).exists()}


@contextlib.contextmanager
def faulty_toy(run: Path, **options: Any) -> Iterator[tuple[Toy, FaultyStorage]]:
    """A run whose disk fails on command. The store is closed at the end, whatever it says."""
    storage = FaultyStorage(open_storage(run / RANK), **options)
    toy = Toy(storage)
    try:
        yield toy, storage
    finally:
        with contextlib.suppress(tierstore.TierstoreError):
            toy.store.close()


def damage_first_page(run: Path, step: int) -> None:
    """Flip a bit of the page that a step committed, in a section that restore() does not read."""
    flip(run / committed_pages(run, step)[0], -1)
