"""Operating system calls on files, shared by all code that works on a filesystem.

Files and directories are made private to the user, and symbolic links are not followed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tierstore.errors import CorruptionError, RunDirectoryError, StorageError, errno_text
from tierstore.storage.checks import WHOLE_FILE_BYTES_MAX
from tierstore.units import SECTOR_BYTES, Extent, format_bytes

NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""Errors of a filesystem without O_DIRECT, or without O_DIRECT for such a transfer."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk, or of an exhausted quota."""

NO_CALL = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
"""Errors of a filesystem that lacks a call."""

NO_LOCKS = NO_CALL | {errno.ENOLCK}
"""Errors of flock() on a filesystem without locks, such as Lustre without ``-o flock``."""

NO_MODES = NO_CALL | {errno.EPERM}
"""Errors of chmod() on a filesystem where all files have one mode, such as a Windows mount."""

NO_LINKS = NO_CALL | {errno.EPERM, errno.EMLINK}
"""Errors of link() on a filesystem without links, or with too few."""

OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of every open() of a file: do not follow links, do not pass it to started programs."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_MAP_FIXED = 0x10
_WRITE, _WRITE_AND_WAIT = 2, 7
"""Flags of sync_file_range(): write; all flags: wait before, write, wait after."""

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or directory: its place for system calls, and its path for errors."""

    path: Path
    """Path in errors."""
    name: str
    """Name relative to ``directory``."""
    directory: int | None
    """A descriptor (``dir_fd``); None: ``name`` is a path."""

    @classmethod
    def of(cls, path: Path) -> Entry:
        """Return the entry of a path. The path is resolved anew in each call."""
        return cls(path, os.fspath(path), None)


@contextmanager
def storage_errors(what: str, path: Path, extent: Extent | None = None) -> Iterator[None]:
    """Convert an OSError of the block to a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise storage_error(what, path, error.errno or errno.EIO, extent) from error


def storage_error(what: str, path: Path, error: int, extent: Extent | None = None) -> StorageError:
    """Return the StorageError for errno ``error`` of a file."""
    return StorageError(
        what,
        path=str(path),
        errno=error,
        offset=None if extent is None else extent.offset,
        nbytes=None if extent is None else extent.nbytes,
    )


def make_directory(directory: Path) -> None:
    """Make ``directory`` and its absent parents, durably and private to the user.

    Raises:
        RunDirectoryError: the directory cannot be made, or is not a directory.
    """
    try:
        absent = takewhile(lambda path: not is_there(path), (directory, *directory.parents))
        for candidate in reversed(list(absent)):
            # Another process may have made it meanwhile.
            with suppress(FileExistsError):
                os.mkdir(candidate, DIRECTORY_MODE)
            sync_path(candidate.parent)
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise unusable_directory(directory, error) from error


def unusable_directory(directory: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a directory that cannot be made, opened or synced."""
    advice = "make it writable for this user, or name another one"
    if error.errno in NO_CALL:
        advice = (
            "its filesystem cannot make the names in a directory durable: name a directory on "
            "another filesystem"
        )
    return RunDirectoryError(
        f"{directory} cannot be used as a directory: {errno_text(error.errno or errno.EIO)}; "
        f"{advice}"
    )


def no_locks_error(where: str, error: OSError) -> RunDirectoryError:
    """Return the error for a filesystem that cannot lock out other processes."""
    return RunDirectoryError(
        f"{where}: the filesystem has no locks ({errno_text(error.errno or errno.EIO)}). Two "
        "processes that write one run would destroy it: mount it with locks (Lustre with -o flock, "
        "NFS with lockd), or name a directory on another filesystem"
    )


def works(call: Callable[[], None], *, absent: Collection[int]) -> bool:
    """Make a call; return False if the filesystem does not support it.

    Args:
        call: the call.
        absent: errors that mean "not supported", such as NO_LOCKS.

    Raises:
        OSError: another error.
    """
    try:
        call()
    except OSError as error:
        if error.errno not in absent:
            raise
        return False
    return True


def set_mode(path: Path, mode: int) -> None:
    """Set the mode of a file or directory, if the filesystem has modes."""
    works(lambda: os.chmod(path, mode), absent=NO_MODES)


@contextmanager
def opened(what: str, entry: Entry, flags: int) -> Iterator[int]:
    """Keep a file open during the block; convert OSErrors to StorageErrors.

    ``flags`` are combined with OPEN_FLAGS. O_CREAT makes the file with FILE_MODE.
    """
    with storage_errors(what, entry.path), _opened(entry, flags | OPEN_FLAGS) as fd:
        yield fd


@contextmanager
def _opened(entry: Entry, flags: int) -> Iterator[int]:
    fd = os.open(entry.name, flags, FILE_MODE, dir_fd=entry.directory)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_path(directory: Path) -> None:
    """Make the names in a directory durable. Symbolic links are followed."""
    with _opened(Entry.of(directory), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        sync_names(Entry(directory, ".", fd))


def sync_names(directory: Entry) -> None:
    """Make the names in a directory durable. Its entry is ``"."``, relative to itself."""
    assert directory.directory is not None
    os.fsync(directory.directory)
    # After an error of its log, XFS lets fsync() of a directory succeed, but open() fails.
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC):
        pass


def begin_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Start to write dirty bytes in the page cache to the disk, or raise OSError."""
    _sync_file_range(fd, offset, nbytes, _WRITE)


def write_back(fd: int, extent: Extent) -> None:
    """Block until the page cache holds no dirty bytes of an extent, or raise OSError.

    Also raises an error of an earlier write-back if this descriptor was open at that time.
    """
    _sync_file_range(fd, extent.offset, extent.nbytes, _WRITE_AND_WAIT)


def _sync_file_range(fd: int, offset: int, nbytes: int, flags: int) -> None:
    if _libc.sync_file_range(fd, offset, nbytes, flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_from_disk(entry: Entry, extent: Extent, buffer: memoryview) -> int:
    """Fill ``buffer`` with an extent of a file. Bypasses the page cache if possible.

    Returns:
        The number of bytes. Fewer than in the extent only if the file ends there.

    Raises:
        StorageError: the disk refuses.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS
    with storage_errors("read", entry.path, extent):
        try:
            with _opened(entry, flags | os.O_DIRECT) as fd:
                return _read_to_end(fd, extent, buffer)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
        with _opened(entry, flags) as fd:
            os.posix_fadvise(fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)
            return _read_to_end(fd, extent, buffer)


def _read_to_end(fd: int, extent: Extent, buffer: memoryview) -> int:
    """Fill ``buffer`` with an extent of an open file; return the number of bytes."""
    done = 0
    while done < extent.nbytes:
        count = os.preadv(fd, [buffer[done:]], extent.offset + done)
        done += count
        # The file ends. O_DIRECT could not continue from within a sector.
        if count == 0 or done % SECTOR_BYTES:
            break
    return done


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` at the descriptor's position, or raise OSError."""
    rest = memoryview(data)
    while rest:
        count = os.write(fd, rest)
        if count == 0:
            raise OSError(errno.EIO, "no progress")
        rest = rest[count:]


def put_file(entry: Entry, data: bytes) -> None:
    """Make a file with content ``data``, or raise StorageError. Its name is not yet durable.

    An existing file is removed first: after a failed write or flush the kernel may report the data
    of this inode as durable although it is not.

    EFBIG if get_file() would refuse the file. An existing file is then unchanged.
    """
    if len(data) > WHOLE_FILE_BYTES_MAX:
        raise storage_error("put", entry.path, errno.EFBIG)
    with storage_errors("put", entry.path), suppress(FileNotFoundError):
        os.unlink(entry.name, dir_fd=entry.directory)
    with opened("put", entry, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        write_all(fd, data)
        os.fsync(fd)


def get_file(entry: Entry) -> bytes:
    """Return the content of a file.

    Raises:
        StorageError: EINVAL if the name is not a regular file (does not wait for a named pipe).
        CorruptionError: the file has more than WHOLE_FILE_BYTES_MAX bytes.
    """
    # Without O_NONBLOCK the open of a named pipe would wait for a writer.
    with opened("get", entry, os.O_RDONLY | os.O_NONBLOCK) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a file")
        fault = whole_file_fault(status.st_size)
        if fault is not None:
            raise CorruptionError(f"{entry.path} {fault}")
        with open(fd, "rb", closefd=False) as file:
            return file.read(status.st_size)


def whole_file_fault(nbytes: int) -> str | None:
    """Return the fault of a file that is read whole if it is too long; else None."""
    if nbytes <= WHOLE_FILE_BYTES_MAX:
        return None
    return (
        f"has {format_bytes(nbytes)}: no file of its kind has more than "
        f"{format_bytes(WHOLE_FILE_BYTES_MAX)}"
    )


def has_file(entry: Entry) -> bool:
    """Return whether a name is taken, or raise StorageError if the disk does not answer."""
    with storage_errors("look for", entry.path):
        try:
            os.lstat(entry.name, dir_fd=entry.directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def is_there(path: Path) -> bool:
    """Return whether a path exists, or raise OSError if the disk does not answer.

    In this case, ``Path.exists()`` is False from Python 3.14 on.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def map_file(fd: int, nbytes: int, *, shared: bool) -> mmap.mmap:
    """Return readable and writable memory over a file, or raise OSError.

    Unlike ``mmap.mmap(fd, nbytes)`` it does not keep a duplicate of the descriptor. From Python
    3.13 on ``mmap.mmap(fd, nbytes, trackfd=False)`` does the same.

    Args:
        fd: an open file of ``nbytes`` or more, not needed afterwards.
        nbytes: length, at least 1.
        shared: whether writes to the memory reach the file.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = _MAP_FIXED | (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE)
    # The mapped file replaces anonymous memory. Python unmaps that memory later.
    mapped = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory
