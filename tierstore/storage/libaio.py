"""Direct I/O through the kernel's older asynchronous interface, where io_uring is forbidden."""

from __future__ import annotations

from pathlib import Path

from tierstore.storage.direct import QUEUE_DEPTH, REQUEST_BYTES, DirectStorage
from tierstore.storage.libaio_engine import LibaioEngine, LibaioTicket


class LibaioStorage(DirectStorage[LibaioTicket]):
    """Files of one directory, opened with O_DIRECT, moved by one AIO context.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        OSError: the kernel refuses the context (EAGAIN, ENOSYS, EPERM, ...).
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, LibaioEngine(QUEUE_DEPTH, REQUEST_BYTES), LibaioTicket)

    def __del__(self) -> None:
        self._close_dropped()

    @property
    def engine(self) -> str:
        """Always "libaio"."""
        return "libaio"
