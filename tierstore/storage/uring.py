"""Direct I/O through io_uring: pages move between memory and device, past the page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore._native import Ticket, UringEngine
from tierstore.errors import StoreClosedError
from tierstore.storage.base import Transfer
from tierstore.storage.checks import checked_bytes
from tierstore.storage.files import OPEN_FLAGS, FileStorage, storage_error, storage_errors
from tierstore.units import Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# One request is large enough to amortize its cost and small enough that several of them
# share a page; enough are in flight to keep several devices busy.
REQUEST_BYTES = 8 << 20
QUEUE_DEPTH = 16


class UringTransfer:
    """One read or write in flight; owns its descriptor and the export of its buffer."""

    def __init__(
        self,
        storage: UringStorage,
        what: str,
        path: Path,
        extent: Extent,
        memory: npt.NDArray[np.uint8],
    ) -> None:
        self.ticket = Ticket()
        self._storage = storage
        self._what = what
        self._path = path
        self._extent = extent
        self._memory = memory

    def wait(self) -> None:
        """See Transfer.wait."""
        error, stopped_at = self._storage.wait_for(self)
        if error:
            what = f"{self._what} (stopped at byte {stopped_at})"
            raise storage_error(what, self._path, error, self._extent)

    def done(self) -> bool:
        """See Transfer.done."""
        return self.ticket.ended


class UringStorage(FileStorage):
    """Files of one directory, opened with O_DIRECT, moved by one ring.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        OSError: the kernel refuses the ring (EPERM, ENOSYS, ENOMEM, ...).
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._engine = UringEngine(QUEUE_DEPTH, REQUEST_BYTES)
        # Descriptors of transfers not yet seen to have ended. The keys keep transfers,
        # and so their buffers, alive even if the caller drops them. Only single dict
        # operations are used, so that no lock is held when another thread forks.
        self._descriptors: dict[UringTransfer, int] = {}
        super().__init__(directory)

    def __del__(self) -> None:
        # Transfers of a storage that was dropped unclosed end before their buffers go.
        self.close()

    @property
    def engine(self) -> str:
        """Always "io_uring"."""
        return "io_uring"

    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.read."""
        return self._start("read", name, extent, buffer)

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        return self._start("write", name, extent, buffer)

    def wait_for(self, transfer: UringTransfer) -> tuple[int, int]:
        """Block until a transfer of this storage has ended.

        Returns:
            (errno or 0, file offset where it failed).

        Raises:
            StoreClosedError: in a forked child.
        """
        try:
            outcome = self._engine.wait(transfer.ticket)
        except RuntimeError as error:
            raise StoreClosedError(f"{self.location}: {error}") from error
        self._forget(transfer)
        return outcome

    def _start(self, what: str, name: str, extent: Extent, buffer: memoryview) -> UringTransfer:
        path = self._path(name)
        is_write = what == "write"
        memory = checked_bytes(buffer, extent, written_to=not is_write)
        for earlier in list(self._descriptors):
            if earlier.ticket.ended:
                self._forget(earlier)
        transfer = UringTransfer(self, what, path, extent, memory)
        flags = (os.O_WRONLY if is_write else os.O_RDONLY) | os.O_DIRECT | OPEN_FLAGS
        with storage_errors(what, path, extent):
            fd = os.open(path, flags)
        # Known before it is submitted: an interrupt in between must not free the buffer.
        self._descriptors[transfer] = fd
        try:
            self._engine.submit(
                transfer.ticket, is_write, fd, memory.ctypes.data, extent.nbytes, extent.offset
            )
        except RuntimeError as error:
            self._forget(transfer)
            raise StoreClosedError(f"{self.location}: {error}") from error
        return transfer

    def _forget(self, transfer: UringTransfer) -> None:
        fd = self._descriptors.pop(transfer, None)
        if fd is not None:
            os.close(fd)

    def _sync_files(self, paths: Sequence[Path]) -> None:
        fds: list[int] = []
        try:
            for path in paths:
                with storage_errors("flush", path):
                    fds.append(os.open(path, os.O_RDONLY | OPEN_FLAGS))
            ticket = Ticket()
            try:
                self._engine.submit_sync(ticket, fds)
                error, index = self._engine.wait(ticket)
            except RuntimeError as closed:
                raise StoreClosedError(f"{self.location}: {closed}") from closed
        finally:
            for fd in fds:
                os.close(fd)
        if error:
            raise storage_error("flush", paths[index], error)

    def _close_engine(self) -> None:
        self._engine.close()
        for transfer in list(self._descriptors):
            self._forget(transfer)

    def _abandon_engine(self) -> None:
        self._engine.abandon()
        for transfer in list(self._descriptors):
            self._forget(transfer)
