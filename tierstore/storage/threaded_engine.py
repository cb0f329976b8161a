"""Base of the engines that work in Python threads."""

from __future__ import annotations

import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TypeVar

from typing_extensions import override

from tierstore.errors import ThreadError
from tierstore.storage.engine import THREAD_NAME, Engine
from tierstore.threads import Latch, Threads, start_thread

# Sync several files at a time, so that their data reaches the device together.
_POOL_THREADS = 8


class ThreadedTicket:
    """One read, write or sync. Serves once. All fields except ``ended`` belong to the engine."""

    def __init__(self) -> None:
        self.offset = 0  # First byte of a transfer.
        self.fds: list[int] | None = None  # Descriptors of a sync.
        self.started = False  # Set by the engine's thread.
        self.outcome = (0, 0)
        self.end = Latch()

    @property
    def ended(self) -> bool:
        """True if the kernel has finished with the memory and the descriptors."""
        return self.end.is_set


ThreadedTicketT = TypeVar("ThreadedTicketT", bound=ThreadedTicket)


class ThreadedEngine(Engine[ThreadedTicketT], ABC):
    """A thread, the tickets that it works on, and a pool of threads for calls that block.

    The constructor starts the threads. A subclass sets its fields before it calls it.

    Raises:
        ThreadError: the system starts no further thread.
    """

    def __init__(self) -> None:
        # Every ticket that was submitted and has not ended, oldest first.
        self._unfinished: dict[ThreadedTicketT, None] = {}
        self._mutex = threading.Lock()
        self._stopping = False
        self._can_wake = True
        self._thread_ended = Latch()
        self._thread = threading.Thread(target=self._run_thread, name=THREAD_NAME, daemon=True)
        try:
            self._pool = Threads(_POOL_THREADS, THREAD_NAME)
        except BaseException:
            self._release_wake_up()
            raise
        try:
            start_thread(self._thread)
        except ThreadError:
            self._pool.close()
            self._release_wake_up()
            raise
        except BaseException:  # An interrupt. If the thread runs already, it releases everything.
            self._stopping = True
            self._wake()
            self._pool.close()
            raise

    @override
    def wait(self, ticket: ThreadedTicketT) -> tuple[int, int]:
        # Check in this order, because a ticket is removed after its end.
        if ticket not in self._unfinished and not ticket.ended:
            raise ValueError("the ticket was never submitted")
        if not ticket.started:
            self._wake()  # An interrupt may have prevented the wake-up in submit().
        ticket.end.wait()
        return ticket.outcome

    @override
    def submit_sync(self, ticket: ThreadedTicketT, fds: list[int]) -> None:
        ticket.fds = fds
        self._enqueue(ticket)

    @override
    def close(self) -> None:
        with self._mutex:
            self._stopping = True
        self._wake()
        # After an interrupt, join() alone would return at once although the thread runs.
        self._thread_ended.wait()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Work in the engine's thread until _may_stop()."""

    @abstractmethod
    def _send_wake_up(self) -> None:
        """Make the engine's thread call _new_transfers() and _may_stop(). Called with the mutex."""

    @abstractmethod
    def _release_wake_up(self) -> None:
        """Release the resources of _send_wake_up()."""

    def _enqueue(self, ticket: ThreadedTicketT) -> None:
        with self._mutex:
            if self._stopping:
                ticket.outcome = (errno.ECANCELED, ticket.offset)
                ticket.end.set()
                raise RuntimeError("the engine is closed")
            self._unfinished[ticket] = None
        self._wake()

    def _wake(self) -> None:
        with self._mutex:  # The thread must not end during the call.
            if self._can_wake:
                self._send_wake_up()

    def _new_transfers(self) -> list[ThreadedTicketT]:
        """Start the syncs that were submitted since the last call, and return the transfers."""
        new = [ticket for ticket in list(self._unfinished) if not ticket.started]
        for ticket in new:
            ticket.started = True
            if ticket.fds is not None:
                self._start_sync(ticket, ticket.fds)
        return [ticket for ticket in new if ticket.fds is None]

    def _start_sync(self, ticket: ThreadedTicketT, fds: list[int]) -> None:
        """Sync every file once: the kernel reports a failed write-back to only one sync."""
        waiting, errors = deque(enumerate(fds)), [errno.EIO] * len(fds)  # Until a sync has ended.
        turns = list(range(min(_POOL_THREADS, len(fds)) or 1))

        def sync() -> None:
            try:
                while waiting:
                    with suppress(IndexError):  # Another thread has taken the last one.
                        index, fd = waiting.popleft()
                        errors[index] = _fdatasync(fd)
            finally:
                if turns.pop() == 0:  # The others have ended.
                    failed = ((error, index) for index, error in enumerate(errors) if error)
                    ticket.outcome = next(failed, (0, 0))
                    self._end(ticket)
                    self._wake()

        for _ in range(len(turns)):
            try:
                self._pool.submit(sync)
            except RuntimeError:  # The interpreter is ending.
                sync()

    def _end(self, ticket: ThreadedTicketT) -> None:
        ticket.end.set()
        del self._unfinished[ticket]

    def _may_stop(self) -> bool:
        with self._mutex:
            return self._stopping and not self._unfinished

    def _run_thread(self) -> None:
        try:
            self._run()
        finally:
            self._pool.close()
            with self._mutex:
                self._stopping, self._can_wake = True, False
                self._release_wake_up()
            # Empty, unless an error ended the thread. The kernel has finished with the memory.
            for ticket in list(self._unfinished):
                ticket.outcome = (errno.EIO, ticket.offset)
                self._end(ticket)
            self._thread_ended.set()


def _fdatasync(fd: int) -> int:
    """Return 0 or an errno."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
