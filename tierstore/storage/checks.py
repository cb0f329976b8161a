"""What every storage refuses before it touches a file: bad names and bad buffers."""

from __future__ import annotations

import os
import socket

import numpy as np
import numpy.typing as npt

from tierstore.errors import RunLockedError, StoreClosedError
from tierstore.units import SECTOR_BYTES, Extent

LOCK_NAME = "lock"


def check_name(name: str) -> str:
    """Return ``name``.

    Raises:
        ValueError: it is not a plain file name, or is the name of the lock.
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

    The array holds the buffer's export: while it lives, the memory can be neither
    released nor resized.

    Args:
        buffer: what the caller of read() or write() gave.
        extent: the range it must fit.
        written_to: whether a read will write to this memory.

    Raises:
        ValueError: the buffer is read-only though written to, not contiguous, of another
            length than the extent, or does not start at a multiple of SECTOR_BYTES.
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
    """Refuse a closed storage, and one inherited through a fork, with StoreClosedError."""
    if closed:
        raise StoreClosedError(f"the storage of {location} was closed")
    if os.getpid() != owner_pid:
        raise StoreClosedError(
            f"the storage of {location} belongs to process {owner_pid}, which forked this one"
        )


def lock_text() -> str:
    """Return what the holder of a lock leaves for others to read."""
    return f"process {os.getpid()} on host {socket.gethostname()}"


def locked_error(location: str, holder: str, timeout_s: float) -> RunLockedError:
    """Return the error of a lock that ``holder`` kept for ``timeout_s`` seconds."""
    return RunLockedError(
        f"{location} is in use by {holder or 'an unknown process'}; waited {timeout_s:g} s. "
        "Stop that process, or give this run another directory"
    )
