"""Files of a destination, whose data goes to the disk while they are written."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from typing_extensions import override

from tierstore.storage.paths import begin_write_back, write_back
from tierstore.units import SECTOR_BYTES, Extent

_STEP_BYTES = 32 * 2**20


def open_written(path: Path, mode: str = "wb") -> BinaryIO:
    """Open a file that is written from its beginning to its end.

    At most about 64 MiB of it are in the page cache: the disk writes while the conversion reads,
    and the same memory is used again. The flush at the end is short.
    """
    return io.BufferedWriter(_WrittenFile(path, mode))


class _WrittenFile(io.FileIO):
    """The file without a buffer."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._begun = self.tell() // SECTOR_BYTES * SECTOR_BYTES
        """Write-back of the bytes before this one has begun."""
        self._previous: Extent | None = None

    @override
    def write(self, data: Any) -> int:
        count = super().write(data)
        nbytes = (self.tell() - self._begun) // SECTOR_BYTES * SECTOR_BYTES
        if nbytes >= _STEP_BYTES:
            begin_write_back(self.fileno(), self._begun, nbytes)
            if self._previous is not None:
                _to_disk(self.fileno(), self._previous)
            self._previous = Extent(self._begun, nbytes)
            self._begun += nbytes
        return count


def _to_disk(fd: int, extent: Extent) -> None:
    """Wait until the disk has an extent, and drop it from the page cache."""
    write_back(fd, extent)
    os.posix_fadvise(fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)
