"""A storage on a filesystem whose transfers are moved by an engine.

A transfer needs its descriptor and its buffer until the kernel no longer uses them, even if
the caller drops the transfer. The storage keeps both, by the engine's ticket for the transfer.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from typing_extensions import override

from tierstore.errors import StoreClosedError
from tierstore.storage.base import Transfer
from tierstore.storage.checks import checked_bytes
from tierstore.storage.files import FileStorage
from tierstore.storage.paths import OPEN_FLAGS, storage_error, storage_errors
from tierstore.units import Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

THREAD_NAME = "tierstore-io"
"""Prefix of the names of all Python threads that an engine starts."""

# Request size and queue depth of the engines with direct I/O. One request is large enough to
# amortize its cost and small enough that several requests share a page. With more requests in
# flight than a device needs, one call submits several of them and one wake-up completes
# several: a depth of 32 took three quarters of the processor time of 16, and half that of 8.
REQUEST_BYTES = 8 << 20
QUEUE_DEPTH = 32

# Most descriptors of transfers in flight: a start waits for a free one. Every engine has far
# fewer requests in flight, so the limit costs no speed.
_OPEN_FILES_MAX = 64


class Ticket(Protocol):
    """One transfer or sync, made before its submission so that it can be registered first."""

    @property
    def ended(self) -> bool:
        """Whether the kernel has stopped using the memory and the descriptors."""


TicketT = TypeVar("TicketT", bound=Ticket)
_SubmittedT = TypeVar("_SubmittedT", bound=Ticket, contravariant=True)


class Engine(Protocol[_SubmittedT]):
    """Moves the bytes of one EngineStorage. A ticket serves once."""

    @abstractmethod
    def submit(
        self, ticket: _SubmittedT, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        """Start a transfer; memory and descriptor must stay valid until it has ended.

        Raises:
            RuntimeError: the engine is closed.
        """

    @abstractmethod
    def submit_sync(self, ticket: _SubmittedT, fds: list[int]) -> None:
        """Start an fdatasync of every descriptor; errors as submit()."""

    @abstractmethod
    def wait(self, ticket: _SubmittedT) -> tuple[int, int]:
        """Block until the ticket has ended.

        A KeyboardInterrupt passes to the caller, and the transfer continues.

        Returns:
            (errno or 0, where it failed): the file offset, or for a sync the descriptor's
            index.

        Raises:
            ValueError: the ticket was never submitted.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for all transfers, then release everything. Called again after an interrupt."""

    @abstractmethod
    def abandon(self) -> None:
        """Close the engine's descriptors in a forked child, and nothing else."""


@dataclass(slots=True)
class InUse:
    """The descriptors and the memory (kept by its export) that a ticket needs until it ends."""

    fds: list[int]
    memory: npt.NDArray[np.uint8] | None = None


class _EngineTransfer(Transfer, Generic[TicketT]):
    """One read or write in flight."""

    def __init__(
        self,
        storage: EngineStorage[TicketT],
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

    @override
    def wait(self) -> None:
        error, stopped_at = self._storage.wait_for(self._ticket)
        if error:
            what = f"{self._what} (stopped at byte {stopped_at})"
            raise storage_error(what, self._path, error, self._extent)

    @override
    def done(self) -> bool:
        return self._ticket.ended


class EngineStorage(FileStorage, Generic[TicketT]):
    """Files of one directory, moved by one engine.

    Args:
        directory: made with mode 0700 where absent.
        name: what ``engine`` returns.
        engine: used by this storage alone, and closed with it.
        new_ticket: makes a ticket of this engine.
        direct: whether files are opened for direct I/O (O_DIRECT).

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        engine: Engine[TicketT],
        new_ticket: Callable[[], TicketT],
        *,
        direct: bool,
    ) -> None:
        self._name = name
        self._engine = engine
        self._new_ticket = new_ticket
        self.direct = direct
        # What each ticket that may not have ended needs. Only single dict operations are
        # used, so that a forked child finds it whole.
        self._in_use: dict[TicketT, InUse] = {}
        # Makes "registered, then submitted" one act for drain(). A forked child never takes it.
        self._submit_mutex = threading.Lock()
        try:
            super().__init__(directory)
        except BaseException:
            engine.close()
            raise

    def __del__(self) -> None:
        """Close a storage that was dropped unclosed, whose engine has Python threads."""
        # When the interpreter ends, its threads have stopped already, and the system takes
        # everything back.
        if sys.is_finalizing():
            return
        if threading.current_thread().name.startswith(THREAD_NAME):
            # The collector ran in a thread that close() would wait for.
            threading.Thread(target=self.close).start()
        else:
            self.close()

    @property
    @override
    def engine(self) -> str:
        return self._name

    @override
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._start("read", name, extent, buffer)

    @override
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._start("write", name, extent, buffer)

    @override
    def drain(self) -> None:
        self._check_owner()
        with self._submit_mutex:
            tickets = list(self._in_use)
        for ticket in tickets:
            self._wait_until_ended(ticket)

    def wait_for(self, ticket: TicketT) -> tuple[int, int]:
        """Block until a transfer or sync of this storage has ended; see Engine.wait.

        Raises:
            StoreClosedError: in a forked child.
        """
        self._check_owner()
        outcome = self._engine.wait(ticket)
        self._release(ticket)
        return outcome

    def _start(self, what: str, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        path = self._path(name)
        is_write = what == "write"
        memory = checked_bytes(buffer, extent, written_to=not is_write)
        self._make_room()
        flags = (os.O_WRONLY if is_write else os.O_RDONLY) | OPEN_FLAGS
        with storage_errors(what, path, extent):
            fd = os.open(path, flags | os.O_DIRECT if self.direct else flags)
        address, nbytes, offset = memory.ctypes.data, extent.nbytes, extent.offset
        ticket = self._new_ticket()
        self._submit(
            ticket,
            InUse([fd], memory),
            lambda: self._engine.submit(ticket, is_write, fd, address, nbytes, offset),
        )
        return _EngineTransfer(self, what, path, extent, ticket)

    def _make_room(self) -> None:
        """Release what ended transfers used; wait for some while too many have not ended."""
        for ticket in list(self._in_use):
            if ticket.ended:
                self._release(ticket)
        while len(self._in_use) >= _OPEN_FILES_MAX:
            with self._submit_mutex:
                oldest = next(iter(self._in_use), None)
            if oldest is not None:
                self._wait_until_ended(oldest)

    def _wait_until_ended(self, ticket: TicketT) -> None:
        # After an interrupt in between, the ticket was never submitted: nothing to wait for.
        with suppress(ValueError):
            self._engine.wait(ticket)
        self._release(ticket)

    def _submit(self, ticket: TicketT, in_use: InUse, submit: Callable[[], None]) -> None:
        with self._submit_mutex:
            # Registered before submitted: an interrupt in between must not free the buffer.
            self._in_use[ticket] = in_use
            try:
                submit()
            except RuntimeError as error:
                self._release(ticket)
                raise StoreClosedError(f"{self.location}: {error}") from error

    def _release(self, ticket: TicketT) -> None:
        in_use = self._in_use.pop(ticket, None)
        if in_use is not None:
            _close_all(in_use.fds)

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
        self._submit(ticket, InUse(fds), lambda: self._engine.submit_sync(ticket, fds))
        error, index = self.wait_for(ticket)
        if error:
            raise storage_error("flush", paths[index], error)

    def _close_engine(self) -> None:
        self._engine.close()
        self._release_all()

    def _abandon_engine(self) -> None:
        self._engine.abandon()
        self._release_all()

    def _release_all(self) -> None:
        for ticket in list(self._in_use):
            self._release(ticket)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
