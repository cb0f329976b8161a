"""Run directories: their validation, and a storage over the directories of a rank."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tierstore.errors import RunDirectoryError
from tierstore.run.bandwidth import measured_bandwidths
from tierstore.run.file_names import RESHARDED_NAME, STRIPING_NAME, folder_rank, rank_folder
from tierstore.run.opening import lock
from tierstore.run.striped_storage import StripedStorage
from tierstore.run.striping import Striping
from tierstore.storage.base import Storage
from tierstore.storage.paths import Entry, get_file, has_file, is_there
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
        engine: engine of all directories; see open_storage().
        page_bytes: approximate size of pages, to measure the directories of a new run.
        overwrite: whether the caller will remove everything in the directories.

    Raises:
        RunDirectoryError: a directory cannot be used, is missing, or is given twice.
        StorageError: the disk cannot tell whether a file exists.
        ValueError: no directory is given, or the engine is unknown.
    """
    if not directories:
        raise ValueError("name one directory or more, got an empty list")
    paths = [rank_directory(directory, rank) for directory in directories]
    absent = [path for path in paths if not has_file(Entry.of(path))]
    striped = [path for path in paths if has_file(Entry.of(path / STRIPING_NAME))]
    if absent and striped and not overwrite:
        raise RunDirectoryError(
            f"{absent[0]} is missing, and {striped[0]} belongs to a run that is striped over "
            "several directories: name the directories where they are now, and mount their disks"
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

    The other directories of a striped run must be where they were when the run was last opened.

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
    """Return the striping of the run with this directory of a rank, or None.

    Raises:
        StorageError, CorruptionError, RunDirectoryError: the file cannot be read.
    """
    entry = Entry.of(folder / STRIPING_NAME)
    return Striping.from_bytes(get_file(entry), str(entry.path)) if has_file(entry) else None


@contextlib.contextmanager
def whole_run(
    directories: Sequence[Path],
    *,
    find_others: bool = False,
    first_rank: int = 0,
    overwrite: bool = False,
) -> Iterator[dict[int, Storage]]:
    """Open and lock the files of all ranks in the directories of a run.

    Args:
        directories: the directories of the run, in order.
        find_others: open a run of several directories given the first directory; see
            open_run_directory().
        first_rank: the first rank to open.
        overwrite: whether the caller is going to remove everything in the directories.

    Yields:
        Rank -> storage, in order of rank.

    Raises:
        RunDirectoryError, RunLockedError, StorageError, CorruptionError: a directory cannot be
            used, or is of another run.
    """
    with looking_into(Path(directories[0])):
        ranks = [folder_rank(name) for name in os.listdir(directories[0])]
    with contextlib.ExitStack() as opened:
        storages = {}
        for rank in sorted(rank for rank in ranks if rank is not None and rank >= first_rank):
            if find_others:
                storages[rank] = open_run_directory(directories[0], rank)
            else:
                storages[rank] = open_directories(
                    directories, rank, page_bytes=SECTOR_BYTES, overwrite=overwrite
                )
            opened.callback(storages[rank].close)
            lock(storages[rank])
        yield storages


def _compare(paths: Sequence[Path]) -> None:
    """Refuse a directory that is given twice, also by two names. Log directories on one device."""
    for other, path in itertools.combinations(paths, 2):
        with looking_into(path):
            is_same = other.samefile(path)
            is_on_one_device = other.stat().st_dev == path.stat().st_dev
        if is_same:
            raise RunDirectoryError(
                f"{other} and {path} are the same directory: name every directory once"
            )
        if is_on_one_device:
            message = "%s and %s are on one device: striping over both gains nothing"
            logger.info(message, other, path)


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
            if is_there(existing):
                _check_owner(existing)
        if is_there(directory) and not is_there(path):
            _check_empty(directory)
        _check_filesystem(directory)
    return path


@contextlib.contextmanager
def looking_into(directory: Path) -> Iterator[None]:
    """Convert an OSError of the block to a RunDirectoryError with advice."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or directory} cannot be accessed: {error.strerror} (errno "
            f"{error.errno}); make it accessible for this user, or name another directory"
        ) from error


def _check_empty(directory: Path) -> None:
    # List once, because other ranks may add their folders meanwhile.
    names = sorted(entry.name for entry in directory.iterdir())
    is_run = any(folder_rank(name) is not None for name in names)
    unknown = [name for name in names if name not in ("lost+found", RESHARDED_NAME)]
    if unknown and not is_run:
        raise RunDirectoryError(
            f"{directory} holds no tierstore run but other files ({', '.join(unknown[:3])}"
            f"{', ...' if len(unknown) > 3 else ''}): name an empty or a new directory"
        )


def _check_owner(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise RunDirectoryError(f"{path} is not a directory: name an empty or a new one")
    owner = found.st_uid
    if owner != os.geteuid():
        raise RunDirectoryError(
            f"{path} belongs to user {owner}, this process runs as user {os.geteuid()}: "
            "run as its owner, or name another directory"
        )


def _check_filesystem(directory: Path) -> None:
    """Refuse filesystems in memory. They do not survive a restart."""
    existing = next(filter(is_there, (directory, *directory.absolute().parents)))
    device = existing.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # Not Linux: a list of mounts does not exist.
        return
    for mount in mounts:
        fields, _, kind = mount.partition(" - ")
        if fields.split()[2] == number and kind.split()[0] in _MEMORY_FILESYSTEMS:
            raise RunDirectoryError(
                f"{directory} is on {kind.split()[0]}, which is memory and does not survive a "
                "restart: name a directory on a disk"
            )
