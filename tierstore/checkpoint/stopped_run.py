"""What all ranks have in the directories of a run that no job uses."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierstore.checkpoint.retention import remove
from tierstore.errors import RunDirectoryError, StorageError, TierstoreError
from tierstore.run.directories import (
    RESHARDED_REMOVED,
    left_by_reshard,
    open_directories,
    open_run_directory,
    rank_directory,
)
from tierstore.run.file_names import (
    MARKER_NAME,
    RESHARDED_NAME,
    folder_rank,
    manifest_revision,
    rank_folder,
)
from tierstore.run.opening import LOCK_TIMEOUT_S
from tierstore.run.recovery import erase, erase_commits
from tierstore.run.sealed import unseal
from tierstore.storage.base import Storage
from tierstore.storage.folder import LocalFolder
from tierstore.storage.paths import get_file
from tierstore.units import SECTOR_BYTES

logger = logging.getLogger("tierstore")


@contextlib.contextmanager
def whole_run(
    directories: Sequence[Path],
    *,
    find_others: bool = False,
    first_rank: int = 0,
    overwrite: bool = False,
) -> Iterator[dict[int, Storage]]:
    """Open and lock what ranks have in a run; yield it by rank, in order.

    Args:
        directories: those of the run, in order.
        find_others: whether only the first of them is given, and the others are where they
            were when they were last used.
        first_rank: leave those before it alone.
        overwrite: whether all of it is going to be removed, whatever it is of.

    Raises:
        RunDirectoryError, RunLockedError, StorageError, CorruptionError: it cannot be used, or
            they are not of one run.
    """
    found = {rank for name in os.listdir(directories[0]) if (rank := folder_rank(name)) is not None}
    with contextlib.ExitStack() as opened:
        storages = {}
        for rank in sorted(rank for rank in found if rank >= first_rank):
            rank_directory(directories[0], rank)
            if find_others:
                storages[rank] = open_run_directory(directories[0], rank)
            else:
                storages[rank] = open_directories(
                    directories, rank, page_bytes=SECTOR_BYTES, overwrite=overwrite
                )
            opened.callback(storages[rank].close)
            storages[rank].lock(LOCK_TIMEOUT_S)
        yield storages


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
            folder = directory / rank_folder(rank)
            if folder.exists():
                shutil.rmtree(folder)


def has_resharded(run: Path) -> bool:
    """Return whether there is the checkpoint that a run on other ranks begins from.

    Raises:
        RunDirectoryError: something else has its name.
        StorageError: it cannot be read.
    """
    place = run / RESHARDED_NAME
    if not os.path.lexists(place):
        return False
    try:
        marker = unseal("checkpoint", get_file(place / MARKER_NAME), f"{place}/{MARKER_NAME}")
    except TierstoreError as error:
        if isinstance(error, StorageError) and error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        marker = {"name": error}
    if marker["name"] != RESHARDED_NAME:
        raise RunDirectoryError(
            f"{place} is not what reshard=True leaves under this name, but {marker['name']}: move "
            "it somewhere else"
        )
    return True


def end_reshard(run: Path) -> None:
    """Remove that checkpoint, if there is one.

    Raises:
        RunDirectoryError, StorageError: it is something else, or keeps its name.
    """
    folder = LocalFolder(run)
    if has_resharded(run):
        # First out of the way, so that no part of it is taken for the whole.
        folder.rename(RESHARDED_NAME, f"{RESHARDED_REMOVED}{secrets.token_hex(4)}")
        folder.sync_children()
    for name in left_by_reshard(run):
        try:
            remove(folder, name)
        except StorageError as error:
            logger.warning("what reshard=True does not need any more stays: %s", error)


def remove_surplus(directories: Sequence[Path], world_size: int, *, overwrite: bool) -> None:
    """Remove what jobs of more ranks left in directories where a new run of fewer begins.

    Where that fails the log says so: this run does not need the place.

    Args:
        directories: those of the run.
        world_size: its number of ranks.
        overwrite: whether also what they had committed, and what reshard=True left.

    Raises:
        RunDirectoryError, StorageError: what reshard=True left keeps its name, and would be taken
            for the run.
    """
    if overwrite:
        for directory in directories:
            end_reshard(directory)
    try:
        with whole_run(directories, first_rank=world_size, overwrite=overwrite) as storages:
            removed = {
                rank: storage
                for rank, storage in storages.items()
                if overwrite or not any(map(manifest_revision, storage.list()))
            }
            remove_ranks(directories, removed)
    except (TierstoreError, OSError) as error:
        logger.warning("what further ranks had in %s stays there: %s", directories[0], error)
