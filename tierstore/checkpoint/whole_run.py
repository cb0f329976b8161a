"""What all ranks have in the directories of a run that no job uses."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierstore.checkpoint.retention import remove
from tierstore.dealing import DEALING_NAME, Dealing
from tierstore.directories import (
    RESHARDED_NAME,
    open_directories,
    open_run_directory,
    rank_directory,
)
from tierstore.errors import TierstoreError
from tierstore.manifest import manifest_revision
from tierstore.run import LOCK_TIMEOUT_S, erase, erase_commits
from tierstore.storage.base import Storage
from tierstore.storage.folder import LocalFolder
from tierstore.storage.paths import get_file
from tierstore.units import SECTOR_BYTES

logger = logging.getLogger("tierstore")

_RANK_FOLDER = re.compile(r"rank-(\d{5})")


@contextlib.contextmanager
def whole_run(
    directories: Sequence[Path], *, find_others: bool = False, first_rank: int = 0
) -> Iterator[dict[int, Storage]]:
    """Open and lock what ranks have in a run; yield it by rank, in order.

    Args:
        directories: those of the run, in order.
        find_others: whether only the first of them is given, and the others are where they
            were when they were last used.
        first_rank: leave those before it alone.

    Raises:
        RunDirectoryError, RunLockedError, StorageError, CorruptionError: it cannot be used, or
            they are not of one run.
    """
    found = filter(None, map(_RANK_FOLDER.fullmatch, os.listdir(directories[0])))
    with contextlib.ExitStack() as opened:
        storages = {}
        for rank in sorted(rank for match in found if (rank := int(match[1])) >= first_rank):
            rank_directory(directories[0], rank)
            if find_others:
                storages[rank] = open_run_directory(directories[0], rank)
            else:
                storages[rank] = open_directories(directories, rank, page_bytes=SECTOR_BYTES)
            opened.callback(storages[rank].close)
            storages[rank].lock(LOCK_TIMEOUT_S)
        yield storages


def in_order(directories: Sequence[Path]) -> list[Path]:
    """Return directories with the one that has what is not dealt first, if a run is in them.

    Raises:
        StorageError, CorruptionError: what says so cannot be read.
    """

    def index(directory: Path) -> int:
        place = rank_directory(directory, 0) / DEALING_NAME
        return Dealing.from_bytes(get_file(place), str(place)).index if place.exists() else 0

    return sorted(directories, key=index)


def remove_ranks(directories: Sequence[Path], storages: dict[int, Storage]) -> None:
    """Remove all that some ranks have in the directories of a run, commits first.

    Args:
        directories: those that the storages are opened in.
        storages: by rank.
    """
    for storage in storages.values():
        erase_commits(storage)
        erase(storage)
    for directory in directories:
        for rank in storages:
            folder = directory / f"rank-{rank:05d}"
            if folder.exists():
                shutil.rmtree(folder)


def end_reshard(run: Path) -> None:
    """Remove the checkpoint, if there is one."""
    if (run / RESHARDED_NAME).exists():
        folder = LocalFolder(run)
        remove(folder, RESHARDED_NAME)
        folder.sync_children()


def remove_surplus(directories: Sequence[Path], world_size: int, *, overwrite: bool) -> None:
    """Remove what jobs of more ranks left in directories where a new run of fewer begins.

    Where that fails the log says so: this run does not need the place.

    Args:
        directories: those of the run.
        world_size: its number of ranks.
        overwrite: whether also what they had committed, and what reshard=True left.

    Raises:
        StorageError: what reshard=True left could not be removed, and would be taken for the run.
    """
    if overwrite:
        for directory in directories:
            end_reshard(directory)
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
