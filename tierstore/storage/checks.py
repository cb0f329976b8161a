"""Checks of arguments and state that all storages share, and the text of the lock."""

from __future__ import annotations

import os
import socket

import numpy as np
import numpy.typing as npt

from tierstore.errors import RunLockedError, StoreClosedError
from tierstore.units import SECTOR_BYTES, Extent

LOCK_NAME = "lock"

WHOLE_FILE_BYTES_MAX = 2**30
"""Most bytes of a file that is read or written whole: a damaged file may have any length."""


def check_name(name: str) -> str:
    """Return ``name``.

    Raises:
        ValueError: the name is not a plain file name, or it is the name of the lock.
    """
    if name in ("", ".", "..", LOCK_NAME) or "/" in name or "\0" in name:
        raise ValueError(f"a name must be a plain file name other than {LOCK_NAME!r}, got {name!r}")
    return name


def check_nbytes(nbytes: int) -> None:
    """Refuse a negative file length with ValueError."""
    if nbytes < 0:
        raise ValueError(f"a file's length must not be negative, got {nbytes}")


def checked_bytes(buffer: memoryview, extent: Extent, *, written_to: bool) -> npt.NDArray[np.uint8]:
    """Return the memory of ``buffer`` as uint8 of shape (extent.nbytes,).

    The array holds an export of the buffer: while the array lives, the memory can be neither
    released nor resized.

    Args:
        buffer: the argument of read() or write().
        extent: range of the file. The buffer must have the same length.
        written_to: whether the transfer writes to this memory. A read does.

    Raises:
        ValueError: the buffer is written to but read-only, is not contiguous, differs in length
            from the extent, or does not start at a multiple of SECTOR_BYTES.
    """
    if written_to and buffer.readonly:
        raise ValueError("a read needs a writable buffer, got a read-only one")
    if not buffer.c_contiguous:
        raise ValueError("a buffer must be contiguous, got one with gaps")
    if buffer.nbytes != extent.nbytes:
        raise ValueError(f"a buffer must be as long as its {extent}, got {buffer.nbytes} bytes")
    memory = np.frombuffer(buffer, dtype=np.uint8)
    if memory.ctypes.data % SECTOR_BYTES:
        raise ValueError(
            f"a buffer must start at a multiple of {SECTOR_BYTES} in memory, "
            f"got address {memory.ctypes.data:#x}; allocate it with mmap"
        )
    return memory


def check_usable(location: str, *, closed: bool, owner_pid: int) -> None:
    """Raise StoreClosedError if a storage is closed or was inherited through a fork."""
    if closed:
        raise StoreClosedError(f"the storage of {location} was closed")
    if os.getpid() != owner_pid:
        raise StoreClosedError(
            f"the storage of {location} belongs to process {owner_pid}, which forked this one"
        )


def lock_text() -> str:
    """Return the content of the lock file. It names the process that holds the lock."""
    return f"process {os.getpid()} on host {socket.gethostname()}"


def locked_error(location: str, holder: str, timeout_s: float) -> RunLockedError:
    """Return the error for a lock that ``holder`` still holds after ``timeout_s`` seconds."""
    return RunLockedError(
        f"{location} is in use by {holder or 'an unknown process'}; waited {timeout_s:g} s. "
        "Stop that process, or give this run another directory"
    )
