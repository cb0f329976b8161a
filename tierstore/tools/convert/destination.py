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
from tierstore.storage.paths import (
    DIRECTORY_MODE,
    FILE_MODE,
    NO_CALL,
    NO_LINKS,
    NO_LOCKS,
    make_directory,
    set_mode,
    storage_errors,
    sync_path,
    works,
)
from tierstore.tools.convert.replaceable import refuse_to_replace
from tierstore.units import format_bytes

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
# Of renameat2() where the kernel or the filesystem does not know the flags.

Identity = tuple[int, int, int]
"""Device, inode and mode of a file or directory."""


def require_room(destination: Path, nbytes: int) -> None:
    """Refuse a disk with less free space than a conversion needs.

    Raises:
        StorageError: ENOSPC.
    """
    parent = next(path for path in destination.absolute().parents if path.exists())
    with storage_errors("look for free space", parent):
        status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    # A filesystem without blocks, as ramfs or one on a network, does not tell its space.
    if status.f_blocks and free < nbytes:
        raise StorageError(
            f"reserving {format_bytes(nbytes)} where {format_bytes(free)} are free",
            path=str(destination),
            errno=errno.ENOSPC,
        )


@contextlib.contextmanager
def temporary_directory(destination: Path, *, exchanged: bool = False) -> Iterator[Path]:
    """Make a hidden directory beside the destination, and remove it at the end of the block.

    The files of a killed conversion to the same destination are removed first. An error in the
    block also removes the parents of the destination that were made.

    Args:
        destination: the destination.
        exchanged: whether take_name() replaces something.

    Raises:
        CheckpointError: ``exchanged``, and the filesystem cannot exchange names.
        RunDirectoryError, StorageError: the directory cannot be made.
    """
    absent = [path for path in destination.parents if not path.exists()]
    with contextlib.ExitStack() as on_error:
        for parent in reversed(absent):
            on_error.callback(_remove_empty, parent)
        make_directory(destination.parent)
        _remove_leftovers(destination)
        path, fd = _locked_directory(destination)
        try:
            if exchanged:
                _require_exchange(path)
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink()  # A file that take_name() replaced with a directory.
            os.close(fd)
        on_error.pop_all()


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _locked_directory(destination: Path) -> tuple[Path, int]:
    """Make a temporary directory; return its descriptor, which is locked while it is open.

    Until it is locked, another conversion takes the directory for the rest of a killed one.
    """
    while True:
        path = destination.with_name(f"{_prefix(destination)}{secrets.token_hex(4)}")
        with storage_errors("making a directory in it", path.parent):
            os.mkdir(path, DIRECTORY_MODE)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            _lock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                stack.pop_all()
                return path, fd


def _lock(fd: int, flags: int) -> bool:
    """Lock a directory; return False where the filesystem has no locks."""
    return works(lambda: fcntl.flock(fd, flags), absent=NO_LOCKS)


def _prefix(destination: Path) -> str:
    return f".{destination.name}.tmp-"


def _remove_leftovers(destination: Path) -> None:
    """Remove temporary directories that no process uses."""
    pattern = re.compile(re.escape(_prefix(destination)) + "[0-9a-f]{8}")
    for path in destination.parent.iterdir():
        if not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        if path.is_file():  # A replaced file, see temporary_directory().
            path.unlink(missing_ok=True)
            continue
        try:
            with storage_errors("open", path):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except StorageError as error:
            if error.errno == errno.ENOENT:  # Its conversion has ended.
                continue
            raise
        try:
            if _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # Another conversion to the same destination has it, or has just removed it.
        finally:
            os.close(fd)


def make_durable(directory: Path) -> None:
    """Flush all files of a directory tree, private to the user, and drop them from the page cache.

    Raises:
        StorageError: a flush fails, for example because the disk is full.
    """
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            path = Path(folder, name)
            with storage_errors("flush", path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    set_mode(path, FILE_MODE)
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)
        with storage_errors("flush", Path(folder)):
            set_mode(Path(folder), DIRECTORY_MODE)
            sync_path(Path(folder))


def take_name(made: Path, destination: Path, old: Identity | None) -> None:
    """Give a file or directory its final name, durably; exchange it with the one that is replaced.

    Args:
        made: the file or directory, in the temporary directory.
        destination: the final name.
        old: result of refuse_destination(). Only this file or directory is replaced.

    Raises:
        CheckpointError: another file has the name now. It is kept.
        RunLockedError: a process uses the run that would be replaced.
        StorageError: the disk refuses.
    """
    with storage_errors("rename", destination):
        found = _identity(destination)
        if found != old:
            raise _taken(destination)
        try:
            if found is None:
                _rename_to_free(made, destination)
            else:
                refuse_to_replace(destination)
                _renameat2(made, destination, _RENAME_EXCHANGE)
        except (FileExistsError, FileNotFoundError):
            raise _taken(destination) from None
        sync_path(destination.parent)


def _identity(path: Path) -> Identity | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mode


def _taken(destination: Path) -> CheckpointError:
    return CheckpointError(
        f"{destination} was made or changed by another process during the conversion, and is left "
        "as it is: convert again, to another destination"
    )


def _rename_to_free(made: Path, destination: Path) -> None:
    """Rename; FileExistsError if the destination exists by now."""
    try:
        _renameat2(made, destination, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in NO_CALL:
            raise
        if made.is_dir():
            os.rename(made, destination)  # Replaces nothing but an empty directory.
        elif not works(lambda: os.link(made, destination), absent=NO_LINKS):
            if os.path.lexists(destination):
                raise FileExistsError from error
            os.rename(made, destination)


def _renameat2(one: Path, other: Path, flags: int) -> None:
    one_bytes, other_bytes = os.fsencode(one), os.fsencode(other)
    if _libc.renameat2(_AT_FDCWD, one_bytes, _AT_FDCWD, other_bytes, flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _require_exchange(directory: Path) -> None:
    """Refuse a filesystem that cannot exchange two names.

    Raises:
        CheckpointError: the filesystem cannot.
    """
    one, other = directory / "one", directory / "other"
    for path in (one, other):
        path.mkdir()
    try:
        _renameat2(one, other, _RENAME_EXCHANGE)
    except OSError as error:
        raise CheckpointError(
            f"the filesystem of {directory.parent} cannot exchange two names ({error.strerror}), "
            "which --force needs: name another destination"
        ) from error
    for path in (one, other):
        path.rmdir()


def refuse_destination(destination: Path, sources: list[Path], *, force: bool) -> Identity | None:
    """Refuse a destination that exists, or that contains a source or is in one.

    Args:
        destination: the destination.
        sources: the sources.
        force: whether a checkpoint that is there is replaced.

    Returns:
        The file or directory to replace, for take_name().

    Raises:
        CheckpointError: the destination cannot be used.
        RunLockedError: it is a run in use.
    """
    for source in sources:
        one, other = source.resolve(), destination.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise CheckpointError(
                f"{destination} contains the source {source} or is in it: name another destination"
            )
    with storage_errors("look at", destination):
        old = _identity(destination)
    if old is None:
        return None
    if not force:
        raise CheckpointError(
            f"{destination} exists: name another one, or pass --force to replace it"
        )
    refuse_to_replace(destination)
    return old
