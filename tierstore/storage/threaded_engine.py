"""Base of the engines whose work one Python thread does."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from typing_extensions import override

from tierstore.storage.engine import THREAD_NAME, Engine

# Several files are synced at a time, so that their data reaches the device together.
_SYNC_THREADS = 8


class ThreadedTicket:
    """One read, write or sync. Serves once; all but ``ended`` belongs to the engine."""

    def __init__(self) -> None:
        self.offset = 0  # First byte of a transfer.
        self.started = False  # Set by the engine's thread.
        self.outcome = (0, 0)
        self.end = threading.Event()

    @property
    def ended(self) -> bool:
        """True when the kernel has stopped using the memory and the descriptors."""
        return self.end.is_set()


ThreadedTicketT = TypeVar("ThreadedTicketT", bound=ThreadedTicket)


class ThreadedEngine(Engine[ThreadedTicketT], ABC):
    """A thread and the tickets that it works on.

    A subclass sets its fields before it calls this constructor, which starts the thread.

    Raises:
        RuntimeError: the system does not start another thread.
    """

    def __init__(self) -> None:
        # Every ticket that was submitted and has not ended, oldest first.
        self._unfinished: dict[ThreadedTicketT, None] = {}
        self._mutex = threading.Lock()
        self._stopping = False
        self._can_wake = True
        self._thread_ended = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name=THREAD_NAME, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._release_wake_up()
            raise

    @override
    def wait(self, ticket: ThreadedTicketT) -> tuple[int, int]:
        # Checked in this order, because a ticket is removed after its end.
        if ticket not in self._unfinished and not ticket.ended:
            raise ValueError("the ticket was never submitted")
        if not ticket.started:
            self._wake()  # An interrupt may have prevented the wake-up in submit().
        ticket.end.wait()
        return ticket.outcome

    @override
    def close(self) -> None:
        with self._mutex:
            self._stopping = True
        self._wake()
        # After an interrupt, join() alone would return at once though the thread runs.
        self._thread_ended.wait()
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """Work in the engine's thread until _may_stop()."""

    @abstractmethod
    def _send_wake_up(self) -> None:
        """Make the engine's thread call _new_tickets() and _may_stop(). Called with the mutex."""

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
        with self._mutex:  # The thread must not end meanwhile.
            if self._can_wake:
                self._send_wake_up()

    def _new_tickets(self) -> list[ThreadedTicketT]:
        """Return the tickets submitted since the last call, and mark them as started."""
        new = [ticket for ticket in list(self._unfinished) if not ticket.started]
        for ticket in new:
            ticket.started = True
        return new

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
            with self._mutex:
                self._stopping, self._can_wake = True, False
                self._release_wake_up()
            # Empty unless an error ended the thread. The kernel no longer uses the memory.
            for ticket in list(self._unfinished):
                ticket.outcome = (errno.EIO, ticket.offset)
                self._end(ticket)
            self._thread_ended.set()


def sync_files(fds: Sequence[int]) -> tuple[int, int]:
    """Sync all files, in several threads; return (errno or 0, index of the first that failed).

    Every file is synced once: the kernel reports an error of writing back to the first sync alone.
    """
    waiting, errors = deque(enumerate(fds)), [errno.EIO] * len(fds)  # Until a sync has ended.

    def sync() -> None:
        while waiting:
            with contextlib.suppress(IndexError):  # Another thread took the last one.
                index, fd = waiting.popleft()
                errors[index] = _fdatasync(fd)

    threads = []
    for _ in range(min(_SYNC_THREADS, len(fds)) - 1):
        thread = threading.Thread(target=sync, name=THREAD_NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # No more threads can be started, or the interpreter is ending.
            break
        threads.append(thread)
    sync()
    for thread in threads:
        thread.join()
    return next(((error, index) for index, error in enumerate(errors) if error), (0, 0))


def _fdatasync(fd: int) -> int:
    """Return 0 or an errno."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
