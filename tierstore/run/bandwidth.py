"""Bandwidth of directories, measured by moving a few pages in all directories at once."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from tierstore.errors import RunDirectoryError, StorageError
from tierstore.storage.base import Storage, Transfer
from tierstore.storage.paths import FULL
from tierstore.threads import at_once
from tierstore.units import SECTOR_BYTES, Extent, align_up

_TRANSFERS_MAX = 8
_TRANSFER_BYTES_MAX = 8 << 20
_IN_FLIGHT = 4
_SECONDS_MAX = 0.3  # After this time in each direction, no more transfers are started.


def measured_bandwidths(storages: Sequence[Storage], page_bytes: int) -> list[float]:
    """Return the bytes per second of each directory while all directories are busy.

    A step reads and writes each page. The bandwidth is therefore the bytes of both directions
    divided by their time. At most 64 MiB are written to each directory, and then removed.

    Raises:
        RunDirectoryError: a directory is full.
        StorageError: an operation failed; the message names the directory.
    """
    nbytes = min(align_up(page_bytes, SECTOR_BYTES), _TRANSFER_BYTES_MAX)
    data = mmap.mmap(-1, nbytes)
    data[:] = os.urandom(nbytes)  # Some disks write zeros faster.
    calls = [partial(_measured, storage, memoryview(data)) for storage in storages]
    return at_once(calls, "tierstore-bandwidth")


def _measured(storage: Storage, data: memoryview) -> float:
    # If this process is killed, the next probe of the directory removes a file of this name.
    name = f"probe-{secrets.token_hex(8)}.tmp"
    buffer = memoryview(mmap.mmap(-1, data.nbytes))
    extents = [Extent(i * data.nbytes, data.nbytes) for i in range(_TRANSFERS_MAX)]
    try:
        storage.create(name, _TRANSFERS_MAX * data.nbytes)
        started = time.perf_counter()
        written = _moved(lambda extent: storage.write(name, extent, data), extents)
        storage.flush([name])
        read = _moved(lambda extent: storage.read(name, extent, buffer), extents[:written])
        seconds = time.perf_counter() - started
    except StorageError as error:
        if error.errno not in FULL:
            raise
        raise RunDirectoryError(
            f"{storage.location} has no room for a measurement with "
            f"{_TRANSFERS_MAX * data.nbytes} bytes: {error}; free more space, or name another "
            "directory"
        ) from error
    finally:
        with suppress(StorageError):
            storage.unlink(name)
    return (written + read) * data.nbytes / seconds


def _moved(start: Callable[[Extent], Transfer], extents: Sequence[Extent]) -> int:
    """Move extents, several at a time, for _SECONDS_MAX; return the number of moved extents."""
    started = time.perf_counter()
    moving: deque[Transfer] = deque()
    count = 0
    for extent in extents:
        if count and time.perf_counter() - started > _SECONDS_MAX:
            break
        if len(moving) == _IN_FLIGHT:
            moving.popleft().wait()
        moving.append(start(extent))
        count += 1
    for transfer in moving:
        transfer.wait()
    return count
