"""Run directories: validation, and opening the directories of a rank as one storage."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tierstore.errors import RunDirectoryError
from tierstore.run.bandwidth import measured_bandwidths
from tierstore.run.file_names import RESHARDED_NAME, STRIPING_NAME, folder_rank, rank_folder
from tierstore.run.opening import LOCK_TIMEOUT_S
from tierstore.run.striped_storage import StripedStorage
from tierstore.run.striping import Striping
from tierstore.storage.base import Storage
from tierstore.storage.paths import get_file
from tierstore.storage.select import open_storage
from tierstore.units import SECTOR_BYTES

logger = logging.getLogger("tierstore")

_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


def open_directories(
    directories: Sequence[Path],
    rank: int,
    *,
    engine: str = "auto",
    page_bytes: int,
    overwrite: bool = False,
) -> Storage:
    """Open the files of one rank in the directories of a run, as one storage.

    Args:
        directories: one or more, in any order; made if absent.
        rank: the rank.
        engine: of all directories; see open_storage().
        page_bytes: about how large pages are, to measure the directories of a new run.
        overwrite: whether everything in the directories is going to be removed.

    Raises:
        RunDirectoryError: a directory cannot be used, is missing, or is given twice.
        ValueError: there is no directory, or no such engine.
    """
    if not directories:
        raise ValueError("name one directory or more, got an empty list")
    paths = [rank_directory(directory, rank) for directory in directories]
    absent = [path for path in paths if not path.exists()]
    striped = [path for path in paths if (path / STRIPING_NAME).exists()]
    if absent and striped and not overwrite:
        raise RunDirectoryError(
            f"{absent[0]} is missing, and {striped[0]} is of a run that is striped over several "
            "directories: name those where they are now, and mount the disks that they are on"
        )
    with contextlib.ExitStack() as opened:
        parts: list[Storage] = []
        for path in paths:
            parts.append(open_storage(path, engine))
            opened.callback(parts[-1].close)
        _compare(paths)
        opened.pop_all()
    if len(parts) == 1 and not striped:
        return parts[0]
    measure = partial(measured_bandwidths, page_bytes=page_bytes)
    return StripedStorage(parts, measure, overwrite=overwrite)


def open_run_directory(directory: Path, rank: int) -> Storage:
    """Open the files of one rank of an existing run, given the first of its directories.

    The other directories of a striped run are where they were when they were last used.

    Raises:
        RunDirectoryError: a directory cannot be used, or is not of the run.
        CorruptionError, StorageError: the file that names the directories cannot be read.
    """
    directories = [directory]
    striping = striping_in(rank_directory(directory, rank))
    if striping is not None:
        if striping.index:
            raise RunDirectoryError(
                f"{directory} is number {striping.index + 1} of the directories of a run: name "
                f"the first, {Path(striping.directories[0]).parent}"
            )
        directories += [Path(other).parent for other in striping.directories[1:]]
    return open_directories(directories, rank, page_bytes=SECTOR_BYTES)


def striping_in(folder: Path) -> Striping | None:
    """Return how the run with this directory of a rank is striped; None if it is not."""
    path = folder / STRIPING_NAME
    return Striping.from_bytes(get_file(path), str(path)) if path.exists() else None


@contextlib.contextmanager
def whole_run(
    directories: Sequence[Path],
    *,
    find_others: bool = False,
    first_rank: int = 0,
    overwrite: bool = False,
) -> Iterator[dict[int, Storage]]:
    """Open and lock what all ranks have in the directories of a run; yield it by rank, in order.

    Args:
        directories: of the run, in order.
        find_others: open a run of several directories given its first one; see
            open_run_directory().
        first_rank: the first rank to open.
        overwrite: whether everything in the directories is going to be removed.

    Raises:
        RunDirectoryError, RunLockedError, StorageError, CorruptionError: a directory cannot be
            used, or is of another run.
    """
    ranks = (folder_rank(name) for name in os.listdir(directories[0]))
    with contextlib.ExitStack() as opened:
        storages = {}
        for rank in sorted(rank for rank in ranks if rank is not None and rank >= first_rank):
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


def _compare(paths: Sequence[Path]) -> None:
    """Refuse a directory that is given twice under any names; log two on one device."""
    seen: dict[tuple[int, int], Path] = {}
    devices: dict[int, Path] = {}
    for path in paths:
        status = path.stat()
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other is not path:
            raise RunDirectoryError(
                f"{other} and {path} are one and the same directory: name each once"
            )
        other = devices.setdefault(status.st_dev, path)
        if other is not path:
            logger.info(
                "%s and %s are on one device: striping over both gains nothing", other, path
            )


def rank_directory(directory: Path, rank: int) -> Path:
    """Return the directory of one rank's files, after checking that it can be used.

    Raises:
        RunDirectoryError: ``directory`` is not a directory, may not be entered, belongs to
            another user, is in memory, or holds files that are not of a run.
    """
    path = directory / rank_folder(rank)
    with looking_into(directory):
        if path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a symbolic link: remove it, or name another directory"
            )
        for existing in (directory, path):
            if existing.exists():
                _check_owner(existing)
        if directory.exists() and not path.exists():
            _check_empty(directory)
        _check_filesystem(directory)
    return path


@contextlib.contextmanager
def looking_into(directory: Path) -> Iterator[None]:
    """Turn an OSError of the block into a RunDirectoryError that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or directory} cannot be looked into: {error.strerror} (errno "
            f"{error.errno}); make it accessible for this user, or name another directory"
        ) from error


def _check_empty(directory: Path) -> None:
    # Listed once, because other ranks may add their folders meanwhile.
    names = sorted(entry.name for entry in directory.iterdir())
    if any(folder_rank(name) is not None for name in names):
        return  # It is a run directory already.
    unknown = [name for name in names if name not in ("lost+found", RESHARDED_NAME)]
    if unknown:
        raise RunDirectoryError(
            f"{directory} holds no tierstore run but other files ({', '.join(unknown[:3])}"
            f"{', ...' if len(unknown) > 3 else ''}): name an empty or a new directory"
        )


def _check_owner(path: Path) -> None:
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is not a directory: name an empty or a new one")
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise RunDirectoryError(
            f"{path} belongs to user {owner}, this process runs as user {os.geteuid()}: "
            "run as its owner, or name another directory"
        )


def _check_filesystem(directory: Path) -> None:
    """Refuse filesystems in memory, which do not survive a restart."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    device = existing.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # Not Linux: there is no list of mounts.
        return
    for mount in mounts:
        fields, _, kind = mount.partition(" - ")
        if fields.split()[2] == number and kind.split()[0] in _MEMORY_FILESYSTEMS:
            raise RunDirectoryError(
                f"{directory} is on {kind.split()[0]}, which is memory and does not survive a "
                "restart: name a directory on a disk"
            )
