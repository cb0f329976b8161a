"""Direct I/O, past the page cache: what its engines have in common.

A transfer needs its descriptor and its buffer until the kernel has let go of them, whatever
becomes of the caller. The storage holds both, by the engine's ticket for the transfer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tierstore.errors import StoreClosedError
from tierstore.storage.base import Transfer
from tierstore.storage.checks import checked_bytes
from tierstore.storage.files import OPEN_FILES_MAX, FileStorage
from tierstore.storage.paths import OPEN_FLAGS, storage_error, storage_errors
from tierstore.units import Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# One request is large enough to amortize its cost and small enough that several of them
# share a page. More of them in flight than a device needs let one call submit and one wake-up
# look at several: 32 took three quarters of the processor time of 16, and half that of 8.
REQUEST_BYTES = 8 << 20
QUEUE_DEPTH = 32


class Ticket(Protocol):
    """One transfer or sync, made before it is submitted so that it can be held first."""

    @property
    def ended(self) -> bool:
        """Whether the kernel has stopped using the memory and the descriptors."""


TicketT = TypeVar("TicketT", bound=Ticket)
_SubmittedT = TypeVar("_SubmittedT", bound=Ticket, contravariant=True)


class Engine(Protocol[_SubmittedT]):
    """What moves bytes for a DirectStorage; UringEngine in _native.pyi says more."""

    def submit(
        self, ticket: _SubmittedT, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        """Start a transfer; RuntimeError where the engine is closed."""

    def submit_sync(self, ticket: _SubmittedT, fds: list[int]) -> None:
        """Start an fdatasync of every descriptor; RuntimeError where the engine is closed."""

    def wait(self, ticket: _SubmittedT) -> tuple[int, int]:
        """Block until it has ended; return (errno or 0, where it failed)."""

    def close(self) -> None:
        """Wait for all transfers, then release everything. May be called again."""

    def abandon(self) -> None:
        """Close this forked child's descriptors of the engine, and nothing else."""


@dataclass(slots=True)
class Held:
    """What must stay until a ticket has ended: descriptors, and memory through its export."""

    fds: list[int]
    memory: npt.NDArray[np.uint8] | None = None


class _DirectTransfer(Generic[TicketT]):
    """One read or write in flight. The storage holds its descriptor and its buffer."""

    def __init__(
        self,
        storage: DirectStorage[TicketT],
        what: str,
        path: Path,
        extent: Extent,
        ticket: TicketT,
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


class DirectStorage(FileStorage, Generic[TicketT]):
    """Files of one directory, opened with O_DIRECT, moved by one engine.

    Args:
        directory: made with mode 0700 where absent.
        engine: used by this storage alone, and closed with it.
        new_ticket: makes a ticket of this engine.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(
        self, directory: Path, engine: Engine[TicketT], new_ticket: Callable[[], TicketT]
    ) -> None:
        self._engine = engine
        self._new_ticket = new_ticket
        # What tickets not yet seen to have ended need, even if the caller drops or never
        # gets the transfer. Only single dict operations are used.
        self._held: dict[TicketT, Held] = {}
        # Makes "held, then submitted" one act to drain(). A forked child never takes it.
        self._submit_mutex = threading.Lock()
        try:
            super().__init__(directory)
        except BaseException:
            engine.close()
            raise

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
            self._wait_until_ended(ticket)

    def wait_for(self, ticket: TicketT) -> tuple[int, int]:
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

    def _start(
        self, what: str, name: str, extent: Extent, buffer: memoryview
    ) -> _DirectTransfer[TicketT]:
        path = self._path(name)
        is_write = what == "write"
        memory = checked_bytes(buffer, extent, written_to=not is_write)
        self._make_room()
        flags = (os.O_WRONLY if is_write else os.O_RDONLY) | os.O_DIRECT | OPEN_FLAGS
        with storage_errors(what, path, extent):
            fd = os.open(path, flags)
        address, nbytes, offset = memory.ctypes.data, extent.nbytes, extent.offset
        ticket = self._new_ticket()
        self._submit(
            ticket,
            Held([fd], memory),
            lambda: self._engine.submit(ticket, is_write, fd, address, nbytes, offset),
        )
        return _DirectTransfer(self, what, path, extent, ticket)

    def _make_room(self) -> None:
        """Give back what ended transfers held; wait for some where too many have not."""
        for ticket in list(self._held):
            if ticket.ended:
                self._forget(ticket)
        while len(self._held) >= OPEN_FILES_MAX:
            with self._submit_mutex:
                oldest = next(iter(self._held), None)
            if oldest is not None:
                self._wait_until_ended(oldest)

    def _wait_until_ended(self, ticket: TicketT) -> None:
        # Never submitted, if an interrupt came in between: there is nothing to wait for.
        with suppress(ValueError):
            self._engine.wait(ticket)
        self._forget(ticket)

    def _submit(self, ticket: TicketT, held: Held, submit: Callable[[], None]) -> None:
        with self._submit_mutex:
            # Held before it is submitted: an interrupt in between must not free the buffer.
            self._held[ticket] = held
            try:
                submit()
            except RuntimeError as error:
                self._forget(ticket)
                raise StoreClosedError(f"{self.location}: {error}") from error

    def _forget(self, ticket: TicketT) -> None:
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
        ticket = self._new_ticket()
        self._submit(ticket, Held(fds), lambda: self._engine.submit_sync(ticket, fds))
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
