"""Direct I/O through the kernel's older asynchronous interface, where io_uring is forbidden.

One Python thread owns the AIO context. It sleeps on an eventfd that the kernel counts up with
every completion and callers with every submission; its work per request of several MiB is
small compared with the device's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Literal

from libaio import AIOBLOCK_MODE_READ, AIOBLOCK_MODE_WRITE, AIOBlock, AIOContext
from typing_extensions import override

from tierstore.storage.engine_storage import (
    QUEUE_DEPTH,
    REQUEST_BYTES,
    THREAD_NAME,
    Engine,
    EngineStorage,
)
from tierstore.storage.request import RETRIES_MAX, Request, Verdict

_REFUSED_PAUSE_S = 0.01
# Several files are synced at a time, so that their data reaches the device together.
_SYNC_THREADS = 8


class _Context(AIOContext):  # type: ignore[misc]
    """A context that a forked child, which does not inherit it, does not destroy."""

    def __init__(self, requests: int) -> None:
        self._owner_pid = os.getpid()
        super().__init__(requests)

    def close(self) -> None:
        """Wait for requests in flight and destroy the context. Called by its destructor, too."""
        if os.getpid() == self._owner_pid:
            super().close()


class LibaioTicket:
    """One read, write or sync. Serves once; all but ``ended`` belongs to the engine."""

    def __init__(self) -> None:
        self.kind: Literal["read", "write", "sync"] = "sync"
        self.fds: list[int] = []
        self.address = 0
        self.offset = 0
        self.nbytes = 0
        self.position = 0  # Bytes covered by requests so far.
        self.parts_in_flight = 0
        self.started = False  # The engine's thread has seen it.
        self.queued = False  # Some part may still need a request.
        self.workers: list[threading.Thread] = []
        self.outcome = (0, 0)
        self.end = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether the kernel has stopped using the memory and the descriptors."""
        return self.end.is_set()


class _Part:
    """One request of a transfer."""

    def __init__(self, ticket: LibaioTicket, offset: int, nbytes: int) -> None:
        self.ticket = ticket
        self.request = Request(offset, nbytes)

    def block(self, eventfd: int) -> AIOBlock:
        """Return the remaining range in the form that the kernel takes."""
        ticket, request = self.ticket, self.request
        memory = ctypes.c_char * request.bytes_remaining
        address = ticket.address + request.offset - ticket.offset
        return AIOBlock(
            AIOBLOCK_MODE_WRITE if ticket.kind == "write" else AIOBLOCK_MODE_READ,
            ticket.fds[0],
            [memory.from_address(address)],
            request.offset,
            eventfd,
        )


class LibaioEngine(Engine[LibaioTicket]):
    """One AIO context and the thread that owns it.

    Args:
        queue_depth: requests in flight.
        request_bytes: most bytes of one request, a multiple of SECTOR_BYTES.

    Raises:
        OSError: the kernel refused the context (EAGAIN if all of fs.aio-max-nr is in
            use, ENOSYS, EPERM, ...).
    """

    def __init__(self, queue_depth: int, request_bytes: int) -> None:
        self._queue_depth = queue_depth
        self._request_bytes = request_bytes
        self._context = _Context(queue_depth)
        # Shared with callers: every ticket that was submitted and has not ended, oldest first.
        self._unfinished: dict[LibaioTicket, None] = {}
        self._mutex = threading.Lock()
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        # Used by the thread only.
        self._started_count = 0  # Unfinished tickets that are started; they come first.
        self._active: deque[LibaioTicket] = deque()  # Tickets whose requests are not all made.
        self._ready: deque[_Part] = deque()  # Requests to be submitted.
        self._in_flight: dict[AIOBlock, _Part] = {}
        self._refusals = 0
        self._synced: deque[tuple[LibaioTicket, int, int]] = deque()  # (ticket, index, errno)
        self._thread_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake_fd)
            raise

    @override
    def submit(
        self, ticket: LibaioTicket, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        ticket.kind = "write" if is_write else "read"
        ticket.fds = [fd]
        ticket.address, ticket.nbytes, ticket.offset = address, nbytes, offset
        self._enqueue(ticket)

    @override
    def submit_sync(self, ticket: LibaioTicket, fds: list[int]) -> None:
        ticket.fds = fds
        self._enqueue(ticket)

    @override
    def wait(self, ticket: LibaioTicket) -> tuple[int, int]:
        # In this order: a ticket is removed after it has ended.
        if ticket not in self._unfinished and not ticket.ended:
            raise ValueError("the ticket was never submitted")
        if not ticket.started:
            self._wake()  # An interrupt may have kept submit() from doing so.
        ticket.end.wait()
        return ticket.outcome

    @override
    def close(self) -> None:
        with self._mutex:
            self._stopping = True
        self._wake()
        # After an interrupt join() would take the thread for ended.
        self._thread_ended.wait()
        self._thread.join()

    @override
    def abandon(self) -> None:
        if self._wake_fd >= 0:
            os.close(self._wake_fd)

    def _enqueue(self, ticket: LibaioTicket) -> None:
        with self._mutex:
            if self._stopping:
                ticket.outcome = (errno.ECANCELED, ticket.offset)
                ticket.end.set()
                raise RuntimeError("the engine is closed")
            self._unfinished[ticket] = None
        self._wake()

    def _wake(self) -> None:
        with self._mutex:  # The descriptor must not be closed meanwhile.
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            while True:
                self._take_new_work()
                self._fill()
                while self._ready and self._submit():
                    self._fill()
                with self._mutex:
                    if self._stopping and not self._unfinished:
                        return
                os.eventfd_read(self._wake_fd)
                self._reap()
        finally:
            try:
                self._context.close()
            finally:
                self._end_thread()

    def _end_thread(self) -> None:
        with self._mutex:
            self._stopping = True
            wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)
        # Empty unless an error ended the thread. The kernel no longer uses their memory.
        for ticket in list(self._unfinished):
            self._fail(ticket, errno.EIO, ticket.offset)
            self._end(ticket)
        self._thread_ended.set()

    def _take_new_work(self) -> None:
        with self._mutex:
            new = list(self._unfinished)[self._started_count :]
        for ticket in new:
            ticket.started = True
            self._started_count += 1
            if ticket.kind == "sync":
                self._start_sync(ticket)
            else:
                ticket.queued = True
                self._active.append(ticket)

    def _fill(self) -> None:
        """Cut the oldest transfers into requests until the queue is full."""
        while self._active and len(self._in_flight) + len(self._ready) < self._queue_depth:
            ticket = self._active[0]
            bytes_left = ticket.nbytes - ticket.position
            if ticket.outcome[0] or not bytes_left:
                self._active.popleft()
                ticket.queued = False
                self._end_if_done(ticket)
                continue
            nbytes = min(self._request_bytes, bytes_left)
            self._ready.append(_Part(ticket, ticket.offset + ticket.position, nbytes))
            ticket.position += nbytes
            ticket.parts_in_flight += 1

    def _submit(self) -> bool:
        """Give all ready requests to the kernel in one call; return whether to submit more now."""
        blocks = [part.block(self._wake_fd) for part in self._ready]
        try:
            count = self._context.submit(blocks)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR):
                # The error concerns the first request.
                self._complete(self._ready.popleft(), -(error.errno or errno.EIO))
            elif self._in_flight:
                return False  # Retried when one of these has completed.
            else:
                self._pause_or_fail(error.errno)
            return True
        self._refusals = 0
        for block in blocks[:count]:
            self._in_flight[block] = self._ready.popleft()
        return True

    def _pause_or_fail(self, error: int) -> None:
        """Pause, because nothing in flight would wake us; after too many pauses fail a request."""
        self._refusals += 1
        if self._refusals <= RETRIES_MAX:
            time.sleep(_REFUSED_PAUSE_S)
            return
        part = self._ready.popleft()
        self._fail(part.ticket, error, part.request.offset)
        self._forget_part(part.ticket)

    def _reap(self) -> None:
        for block, result, _ in self._context.getEvents(min_nr=0, timeout=0):
            self._complete(self._in_flight.pop(block), result)
        while self._synced:
            ticket, index, error = self._synced.popleft()
            if error:
                self._fail(ticket, error, index)
            self._forget_part(ticket)

    def _complete(self, part: _Part, result: int) -> None:
        verdict = part.request.complete(result)
        if verdict is Verdict.RESUBMIT and not part.ticket.outcome[0]:
            self._ready.append(part)
            return
        if verdict is Verdict.FAILED:
            self._fail(part.ticket, part.request.error, part.request.offset)
        self._forget_part(part.ticket)

    def _start_sync(self, ticket: LibaioTicket) -> None:
        """Sync in new threads: most filesystems do not support an asynchronous fdatasync."""
        todo = deque(enumerate(ticket.fds))
        ticket.parts_in_flight = len(todo)

        def work() -> None:
            with suppress(IndexError):
                while True:
                    index, fd = todo.popleft()
                    self._synced.append((ticket, index, _fdatasync(fd)))
                    self._wake()

        for _ in range(min(_SYNC_THREADS, len(todo))):
            worker = threading.Thread(target=work, name=THREAD_NAME, daemon=True)
            with suppress(RuntimeError):  # No more threads can be started.
                worker.start()
                ticket.workers.append(worker)
        if not ticket.workers:
            work()
        self._end_if_done(ticket)

    def _fail(self, ticket: LibaioTicket, error: int, where: int) -> None:
        """Record an error of a ticket; only the first is kept."""
        if not ticket.outcome[0]:
            ticket.outcome = (error, where)

    def _forget_part(self, ticket: LibaioTicket) -> None:
        ticket.parts_in_flight -= 1
        self._end_if_done(ticket)

    def _end_if_done(self, ticket: LibaioTicket) -> None:
        if ticket.parts_in_flight == 0 and not ticket.queued:
            for worker in ticket.workers:
                worker.join()  # Ends at once: all descriptors are synced.
            self._started_count -= 1
            self._end(ticket)

    def _end(self, ticket: LibaioTicket) -> None:
        ticket.end.set()
        del self._unfinished[ticket]


class LibaioStorage(EngineStorage[LibaioTicket]):
    """Files of one directory, opened with O_DIRECT, moved by one AIO context.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        OSError: the kernel refuses the context (EAGAIN, ENOSYS, EPERM, ...).
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        engine = LibaioEngine(QUEUE_DEPTH, REQUEST_BYTES)
        super().__init__(directory, "libaio", engine, LibaioTicket, direct=True)


def _fdatasync(fd: int) -> int:
    """Return 0 or an errno."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
