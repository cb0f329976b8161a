"""What all ranks have in the directories of a run that no job uses."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierstore.dealing import DEALING_NAME
from tierstore.directories import open_directories, open_run_directory, rank_directory
from tierstore.errors import TierstoreError
from tierstore.manifest import manifest_revision
from tierstore.run import LOCK_TIMEOUT_S, erase, erase_commits
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES

logger = logging.getLogger("tierstore")

_RANK_FOLDER = re.compile(r"rank-(\d{5})")


@contextlib.contextmanager
def whole_run(directories: Sequence[Path], *, first_rank: int = 0) -> Iterator[dict[int, Storage]]:
    """Open and lock what ranks have in a run; yield it by rank, in order.

    Args:
        directories: those of the run, or only the first of them if the others are where they
            were when they were last used.
        first_rank: leave those before it alone.

    Raises:
        RunDirectoryError, RunLockedError, StorageError, CorruptionError: it cannot be used.
    """
    found = filter(None, map(_RANK_FOLDER.fullmatch, os.listdir(directories[0])))
    with contextlib.ExitStack() as opened:
        storages = {}
        for rank in sorted(rank for match in found if (rank := int(match[1])) >= first_rank):
            storages[rank] = _open(directories, rank)
            opened.callback(storages[rank].close)
            storages[rank].lock(LOCK_TIMEOUT_S)
        yield storages


def _open(directories: Sequence[Path], rank: int) -> Storage:
    first = rank_directory(directories[0], rank)
    if len(directories) > 1 and (first / DEALING_NAME).exists():
        return open_directories(directories, rank, page_bytes=SECTOR_BYTES)
    return open_run_directory(directories[0], rank)


def remove_ranks(directories: Sequence[Path], storages: dict[int, Storage]) -> None:
    """Remove all that some ranks have in the directories of a run, commits first."""
    for storage in storages.values():
        erase_commits(storage)
        erase(storage)
    for directory in directories:
        for rank in storages:
            folder = directory / f"rank-{rank:05d}"
            if folder.exists():
                shutil.rmtree(folder)


def remove_surplus(directories: Sequence[Path], world_size: int, *, overwrite: bool) -> None:
    """Remove what jobs of more ranks left in directories where a new run of fewer begins.

    Where that fails the log says so: it is of no use, and in nobody's way.

    Args:
        directories: those of the run.
        world_size: its number of ranks.
        overwrite: whether also what they had committed.
    """
    try:
        with whole_run(directories, first_rank=world_size) as storages:
            removed = {
                rank: storage
                for rank, storage in storages.items()
                if overwrite or not any(map(manifest_revision, storage.list()))
            }
            remove_ranks(directories, removed)
    except (TierstoreError, OSError) as error:
        logger.warning("what further ranks had in %s stays there: %s", directories[0], error)
