"""Direct I/O through io_uring: a native thread moves pages and never takes the GIL."""

from __future__ import annotations

from pathlib import Path

from tierstore._native import Ticket, UringEngine
from tierstore.storage.direct import QUEUE_DEPTH, REQUEST_BYTES, DirectStorage


class UringStorage(DirectStorage[Ticket]):
    """Files of one directory, opened with O_DIRECT, moved by one ring.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        OSError: the kernel refuses the ring (EPERM, ENOSYS, ENOMEM, ...).
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, UringEngine(QUEUE_DEPTH, REQUEST_BYTES), Ticket)

    def __del__(self) -> None:
        # Transfers of a storage that was dropped unclosed end before their buffers go.
        self.close()

    @property
    def engine(self) -> str:
        """Always "io_uring"."""
        return "io_uring"
