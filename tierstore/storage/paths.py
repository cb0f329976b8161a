"""Calls of the operating system on paths, as everything on a filesystem here makes them.

Files are closed to other users, and no name is followed that turns out to be a link.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tierstore.errors import RunDirectoryError, StorageError
from tierstore.units import Extent

OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
"""With every open: follow no link, and pass nothing on to programs we start."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_MAP_FIXED = 0x10

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


@contextmanager
def storage_errors(what: str, path: Path, extent: Extent | None = None) -> Iterator[None]:
    """Turn an OSError of the block into the StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise storage_error(what, path, error.errno or errno.EIO, extent) from error


def storage_error(what: str, path: Path, error: int, extent: Extent | None = None) -> StorageError:
    """Return the StorageError of ``errno`` ``error`` for one file."""
    return StorageError(
        what,
        path=str(path),
        errno=error,
        offset=None if extent is None else extent.offset,
        nbytes=None if extent is None else extent.nbytes,
    )


def make_directory(directory: Path) -> None:
    """Make ``directory`` and what is absent above it, durably, closed to other users.

    Raises:
        RunDirectoryError: it cannot be made, or is something else than a directory.
    """
    try:
        absent = []
        for candidate in (directory, *directory.parents):
            if candidate.exists():
                break
            absent.append(candidate)
        for candidate in reversed(absent):
            # Another process may have made it since.
            with suppress(FileExistsError):
                os.mkdir(candidate, DIRECTORY_MODE)
            sync_path(candidate.parent)
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise RunDirectoryError(
            f"{directory} cannot be used as a directory: {error.strerror} (errno {error.errno}); "
            "make it writable for this user, or name another one"
        ) from error


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, made with FILE_MODE where O_CREAT says so, for the length of a block."""
    fd = os.open(path, flags, FILE_MODE)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_path(directory: Path) -> None:
    """Make the names in a directory durable."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` at the descriptor's position, or raise OSError."""
    rest = memoryview(data)
    while rest:
        count = os.write(fd, rest)
        if count == 0:
            raise OSError(errno.EIO, "no progress")
        rest = rest[count:]


def put_file(path: Path, data: bytes) -> None:
    """Make a file that holds ``data``, durable but for its name, or raise StorageError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | OPEN_FLAGS
    with storage_errors("put", path), opened(path, flags) as fd:
        write_all(fd, data)
        os.fsync(fd)


def get_file(path: Path, nbytes_max: int | None = None) -> bytes:
    """Return the content of a file, or raise StorageError.

    Whatever has the name: EINVAL where it is no file, and none of it is waited for, EFBIG
    where it has more than ``nbytes_max`` bytes.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS
    with storage_errors("get", path), opened(path, flags) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file")
        if nbytes_max is not None and status.st_size > nbytes_max:
            raise OSError(errno.EFBIG, "too large")
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)


def map_file(fd: int, nbytes: int, *, shared: bool) -> mmap.mmap:
    """Return readable and writable memory over a file, or raise OSError.

    Unlike ``mmap.mmap(fd, nbytes)`` it keeps no descriptor, of which a process may have few.

    Args:
        fd: an open file of ``nbytes`` or more, not needed afterwards.
        nbytes: length, at least 1.
        shared: whether what is written to the memory goes to the file.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = _MAP_FIXED | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    # The file takes the place of the anonymous memory, which Python unmaps as its own.
    mapped = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory
