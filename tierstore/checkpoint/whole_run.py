"""What all ranks have in the directories of a run that no job uses."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierstore.dealing import DEALING_NAME
from tierstore.directories import open_directories, open_run_directory, rank_directory
from tierstore.run import LOCK_TIMEOUT_S, erase, erase_commits
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES

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
