"""Direct I/O through the kernel's older asynchronous interface, for systems without io_uring.

One Python thread owns the AIO context. It sleeps on an eventfd. The kernel increments the eventfd
with every completion, and callers with every submission. The work of the thread for a request of
several MiB is small compared with the work of the device.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from libaio import AIOBLOCK_MODE_READ, AIOBLOCK_MODE_WRITE, AIOBlock, AIOContext
from typing_extensions import override

from tierstore.storage.engine import QUEUE_DEPTH, REQUEST_BYTES
from tierstore.storage.engine_storage import EngineStorage
from tierstore.storage.request import RETRIES_MAX, Request, Verdict
from tierstore.storage.threaded_engine import ThreadedEngine, ThreadedTicket

_REFUSED_PAUSE_S = 0.01


class _Context(AIOContext):  # type: ignore[misc]
    """A context that only its own process destroys. Forked children do not inherit it."""

    _owner_pid: int | None = None  # Of an object whose making was interrupted.

    def __init__(self, requests: int) -> None:
        self._owner_pid = os.getpid()
        super().__init__(requests)

    def close(self) -> None:
        """Wait for requests in flight and destroy the context. The destructor also calls it."""
        if os.getpid() == self._owner_pid:
            super().close()


class LibaioTicket(ThreadedTicket):
    """One read, write or sync."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[_Part] = []  # Parts of a transfer, until the engine's thread takes them.
        self.parts_left = 0


@dataclass(slots=True, eq=False)
class _Part:
    """One request of a transfer."""

    ticket: LibaioTicket
    mode: int
    fd: int
    base: int
    """Address of the byte that moves from or to file offset 0."""
    request: Request

    def block(self, eventfd: int) -> AIOBlock:
        """Return the remaining range in the form that the kernel takes."""
        memory = ctypes.c_char * self.request.bytes_remaining
        address = self.base + self.request.offset
        return AIOBlock(
            self.mode, self.fd, [memory.from_address(address)], self.request.offset, eventfd
        )


class LibaioEngine(ThreadedEngine[LibaioTicket]):
    """One AIO context and the thread that owns it.

    Args:
        queue_depth: requests in flight.
        request_bytes: most bytes of one request, a multiple of SECTOR_BYTES.

    Raises:
        OSError: the kernel refused the context (EAGAIN if all of fs.aio-max-nr is in
            use, ENOSYS, EPERM, ...).
        ThreadError: the system starts no further thread.
    """

    def __init__(self, queue_depth: int, request_bytes: int) -> None:
        self._queue_depth = queue_depth
        self._request_bytes = request_bytes
        self._context = _Context(queue_depth)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        # Used by the thread only.
        self._ready: deque[_Part] = deque()  # Requests to submit.
        self._in_flight: dict[AIOBlock, _Part] = {}
        self._refusals = 0
        super().__init__()

    @override
    def submit(
        self, ticket: LibaioTicket, is_write: bool, fd: int, address: int, nbytes: int, offset: int
    ) -> None:
        mode = AIOBLOCK_MODE_WRITE if is_write else AIOBLOCK_MODE_READ
        end, step = offset + nbytes, self._request_bytes
        ticket.offset = offset
        ticket.parts = [
            _Part(ticket, mode, fd, address - offset, Request(start, min(step, end - start)))
            for start in range(offset, end, step)
        ]
        ticket.parts_left = len(ticket.parts)
        self._enqueue(ticket)

    @override
    def abandon(self) -> None:
        if self._can_wake:
            os.close(self._wake_fd)

    @override
    def _send_wake_up(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    @override
    def _release_wake_up(self) -> None:
        os.close(self._wake_fd)

    @override
    def _run(self) -> None:
        try:
            while True:
                for ticket in self._new_transfers():
                    self._ready += ticket.parts
                    ticket.parts = []  # A part refers to its ticket.
                while len(self._in_flight) < self._queue_depth and self._ready and self._submit():
                    pass
                if self._may_stop():
                    return
                os.eventfd_read(self._wake_fd)
                self._reap()
        finally:
            self._context.close()

    def _submit(self) -> bool:
        """Give ready requests to the kernel in one call; return whether to submit more now."""
        room = self._queue_depth - len(self._in_flight)
        blocks = [part.block(self._wake_fd) for part in islice(self._ready, room)]
        try:
            count = self._context.submit(blocks)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR):
                # The error concerns the first request.
                self._complete(self._ready.popleft(), -(error.errno or errno.EIO))
            elif self._in_flight:
                return False  # Retry when a request in flight has completed.
            else:
                self._pause_or_fail(error.errno)
            return True
        self._refusals = 0
        for block in blocks[:count]:
            self._in_flight[block] = self._ready.popleft()
        return True

    def _pause_or_fail(self, error: int) -> None:
        """Pause, because no completion would wake the thread. Fail after too many pauses."""
        self._refusals += 1
        if self._refusals <= RETRIES_MAX:
            time.sleep(_REFUSED_PAUSE_S)
        else:
            part = self._ready.popleft()
            self._end_part(part.ticket, error, part.request.offset)

    def _reap(self) -> None:
        for block, result, _ in self._context.getEvents(min_nr=0, timeout=0):
            self._complete(self._in_flight.pop(block), result)

    def _complete(self, part: _Part, result: int) -> None:
        verdict = part.request.complete(result)
        if verdict is Verdict.RESUBMIT and not part.ticket.outcome[0]:
            self._ready.appendleft(part)
        else:
            self._end_part(part.ticket, part.request.error, part.request.offset)

    def _end_part(self, ticket: LibaioTicket, error: int, where: int) -> None:
        ticket.parts_left -= 1
        if error and not ticket.outcome[0]:  # Only the first error is kept.
            ticket.outcome = (error, where)
            kept = [part for part in self._ready if part.ticket is not ticket]
            ticket.parts_left -= len(self._ready) - len(kept)
            self._ready = deque(kept)
        if ticket.parts_left == 0:
            self._end(ticket)


class LibaioStorage(EngineStorage[LibaioTicket]):
    """Files of one directory, opened with O_DIRECT, moved by one AIO context.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        OSError: the kernel refuses the context (EAGAIN, ENOSYS, EPERM, ...).
        ThreadError: the system starts no further thread.
        RunDirectoryError: the directory cannot be made.
    """

    engine = "libaio"
    direct = True

    def __init__(self, directory: Path) -> None:
        new_engine = partial(LibaioEngine, QUEUE_DEPTH, REQUEST_BYTES)
        super().__init__(directory, new_engine, LibaioTicket)
