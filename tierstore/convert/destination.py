"""The destination of a conversion, from its temporary name to its final one."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tierstore.errors import CheckpointError, StorageError
from tierstore.storage.paths import DIRECTORY_MODE, make_directory, storage_errors, sync_path
from tierstore.units import format_bytes

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def require_room(destination: Path, nbytes: int) -> None:
    """Refuse a disk with less free space than a conversion needs.

    Raises:
        StorageError: ENOSPC.
    """
    parent = next(path for path in destination.absolute().parents if path.exists())
    with storage_errors("look for free space", parent):
        status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise StorageError(
            f"reserving {format_bytes(nbytes)} where {format_bytes(free)} are free",
            path=str(destination),
            errno=errno.ENOSPC,
        )


@contextlib.contextmanager
def temporary_directory(destination: Path) -> Iterator[Path]:
    """Make a hidden directory beside the destination, and remove it at the end of the block.

    What a killed conversion to the same destination left is removed first.

    Raises:
        RunDirectoryError, StorageError: the directory cannot be made.
    """
    make_directory(destination.parent)
    _remove_leftovers(destination)
    path = destination.with_name(f"{_prefix(destination)}{secrets.token_hex(4)}")
    with storage_errors("make", path):
        os.mkdir(path, DIRECTORY_MODE)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # As long as this process lives.
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _prefix(destination: Path) -> str:
    return f".{destination.name}.tmp-"


def _remove_leftovers(destination: Path) -> None:
    """Remove temporary directories that no process has any more."""
    pattern = re.compile(re.escape(_prefix(destination)) + "[0-9a-f]{8}")
    for path in destination.parent.iterdir():
        if not pattern.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with storage_errors("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        except BlockingIOError:  # Another conversion to the same destination.
            continue
        finally:
            os.close(fd)


def make_durable(directory: Path) -> None:
    """Flush all files of a directory tree and their names, and drop them from the page cache.

    Raises:
        StorageError: the disk is full, say.
    """
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(folder, name)
            with storage_errors("flush", path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
        with storage_errors("flush", Path(folder)):
            sync_path(Path(folder))


def take_name(made: Path, destination: Path) -> None:
    """Give a file or directory its final name, durably; what had the name gets the other one.

    Raises:
        StorageError: the disk refuses.
    """
    with storage_errors("rename", destination):
        if os.path.lexists(destination):
            _exchange(made, destination)
        else:
            os.rename(made, destination)
        sync_path(destination.parent)


def _exchange(one: Path, other: Path) -> None:
    """Exchange two names at once, so that a crash leaves no moment without the destination."""
    one_bytes, other_bytes = os.fsencode(one), os.fsencode(other)
    if _libc.renameat2(_AT_FDCWD, one_bytes, _AT_FDCWD, other_bytes, _RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def refuse_destination(destination: Path, sources: list[Path], *, known: bool, force: bool) -> None:
    """Refuse a destination that is taken, or that has to do with a source.

    Args:
        destination: the destination.
        sources: the sources.
        known: whether what is there is a checkpoint of a format that is known.
        force: whether such a checkpoint is replaced.

    Raises:
        CheckpointError: the destination cannot be used.
    """
    for source in sources:
        one, other = source.resolve(), destination.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise CheckpointError(
                f"{destination} and the source {source} are in each other: name another destination"
            )
    if not os.path.lexists(destination):
        return
    if not force:
        raise CheckpointError(
            f"{destination} is there already: name another one, or pass --force to replace it"
        )
    if not known or destination.is_symlink():
        raise CheckpointError(
            f"{destination} is not a checkpoint, and is not replaced: name another destination"
        )
