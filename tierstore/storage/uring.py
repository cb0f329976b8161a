"""Direct I/O through io_uring: pages move between memory and device, past the page cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore._native import Ticket, UringEngine
from tierstore.errors import StoreClosedError
from tierstore.storage.base import Transfer
from tierstore.storage.checks import checked_bytes
from tierstore.storage.files import FileStorage
from tierstore.storage.paths import OPEN_FLAGS, storage_error, storage_errors
from tierstore.units import Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# One request is large enough to amortize its cost and small enough that several of them
# share a page; enough are in flight to keep several devices busy.
REQUEST_BYTES = 8 << 20
QUEUE_DEPTH = 16


@dataclass(slots=True)
class _Held:
    """What must stay until a ticket has ended: descriptors, and memory through its export."""

    fds: list[int]
    memory: npt.NDArray[np.uint8] | None = None


class UringTransfer:
    """One read or write in flight. The storage holds its descriptor and its buffer."""

    def __init__(
        self, storage: UringStorage, what: str, path: Path, extent: Extent, ticket: Ticket
    ) -> None:
        self._storage = storage
        self._what = what
        self._path = path
        self._extent = extent
        self._ticket = ticket

    def wait(self) -> None:
        """See Transfer.wait."""
        error, stopped_at = self._storage.wait_for(self._ticket)
        if error:
            what = f"{self._what} (stopped at byte {stopped_at})"
            raise storage_error(what, self._path, error, self._extent)

    def done(self) -> bool:
        """See Transfer.done."""
        return self._ticket.ended


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
        # What tickets not yet seen to have ended need, even if the caller drops or never
        # gets the transfer. Only single dict operations are used.
        self._held: dict[Ticket, _Held] = {}
        # Makes "held, then submitted" one act to drain(). A forked child never takes it.
        self._submit_mutex = threading.Lock()
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

    def drain(self) -> None:
        """See Storage.drain."""
        self._check_owner()
        with self._submit_mutex:
            tickets = list(self._held)
        for ticket in tickets:
            # Never submitted, if an interrupt came in between: there is nothing to wait for.
            with suppress(ValueError):
                self._engine.wait(ticket)
            self._forget(ticket)

    def wait_for(self, ticket: Ticket) -> tuple[int, int]:
        """Block until a transfer or sync of this storage has ended.

        Returns:
            (errno or 0, where it failed: the file offset, or for a sync the file's index).

        Raises:
            StoreClosedError: in a forked child.
        """
        self._check_owner()
        outcome = self._engine.wait(ticket)
        self._forget(ticket)
        return outcome

    def _start(self, what: str, name: str, extent: Extent, buffer: memoryview) -> UringTransfer:
        path = self._path(name)
        is_write = what == "write"
        memory = checked_bytes(buffer, extent, written_to=not is_write)
        for earlier in list(self._held):
            if earlier.ended:
                self._forget(earlier)
        flags = (os.O_WRONLY if is_write else os.O_RDONLY) | os.O_DIRECT | OPEN_FLAGS
        with storage_errors(what, path, extent):
            fd = os.open(path, flags)
        address, nbytes, offset = memory.ctypes.data, extent.nbytes, extent.offset
        ticket = Ticket()
        self._submit(
            ticket,
            _Held([fd], memory),
            lambda: self._engine.submit(ticket, is_write, fd, address, nbytes, offset),
        )
        return UringTransfer(self, what, path, extent, ticket)

    def _submit(self, ticket: Ticket, held: _Held, submit: Callable[[], None]) -> None:
        with self._submit_mutex:
            # Held before it is submitted: an interrupt in between must not free the buffer.
            self._held[ticket] = held
            try:
                submit()
            except RuntimeError as error:
                self._forget(ticket)
                raise StoreClosedError(f"{self.location}: {error}") from error

    def _forget(self, ticket: Ticket) -> None:
        held = self._held.pop(ticket, None)
        if held is not None:
            _close_all(held.fds)

    def _sync_files(self, paths: Sequence[Path]) -> None:
        fds: list[int] = []
        try:
            for path in paths:
                with storage_errors("flush", path):
                    fds.append(os.open(path, os.O_RDONLY | OPEN_FLAGS))
        except BaseException:
            _close_all(fds)
            raise
        ticket = Ticket()
        self._submit(ticket, _Held(fds), lambda: self._engine.submit_sync(ticket, fds))
        error, index = self.wait_for(ticket)
        if error:
            raise storage_error("flush", paths[index], error)

    def _close_engine(self) -> None:
        self._engine.close()
        for ticket in list(self._held):
            self._forget(ticket)

    def _abandon_engine(self) -> None:
        self._engine.abandon()
        for ticket in list(self._held):
            self._forget(ticket)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
