"""Buffered I/O through aiofiles: slower, but works on any filesystem and any machine.

One thread runs an asyncio loop. Each transfer is a task on it, and aiofiles runs the blocking
calls in a pool of threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import aiofiles
from typing_extensions import override

from tierstore.storage.engine_storage import THREAD_NAME, Engine, EngineStorage

_THREADS = 8

_Work = Callable[[], Coroutine[None, None, tuple[int, int]]]
"""A transfer or sync, to run on the loop; gives the outcome that Engine.wait returns."""


class AiofilesTicket:
    """One read, write or sync. Serves once; all but ``ended`` belongs to the engine."""

    def __init__(self) -> None:
        self.work: _Work | None = None  # Until the loop has begun it.
        self.task: asyncio.Task[None] | None = None
        self.outcome = (errno.EIO, 0)  # Stays after an unexpected error, which asyncio logs.
        self.end = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether the kernel has stopped using the memory and the descriptors."""
        return self.end.is_set()


class AiofilesEngine(Engine[AiofilesTicket]):
    """An asyncio loop and the thread that runs it."""

    def __init__(self) -> None:
        # Created here, so that a forked child can close its copy of the descriptor.
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix=THREAD_NAME)
        self._loop.set_default_executor(self._executor)
        # Every ticket that was submitted and has not ended, oldest first.
        self._unfinished: dict[AiofilesTicket, None] = {}
        self._mutex = threading.Lock()
        self._stopping = False
        self._thread_ended = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @override
    def submit(
        self,
        ticket: AiofilesTicket,
        is_write: bool,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
    ) -> None:
        memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        self._enqueue(ticket, partial(_move, is_write, fd, memory, offset))

    @override
    def submit_sync(self, ticket: AiofilesTicket, fds: list[int]) -> None:
        self._enqueue(ticket, partial(_sync, fds))

    @override
    def wait(self, ticket: AiofilesTicket) -> tuple[int, int]:
        # In this order: a ticket is removed after it has ended.
        if ticket not in self._unfinished and not ticket.ended:
            raise ValueError("the ticket was never submitted")
        if ticket.work is not None:
            # An interrupt may have kept submit() from telling the loop.
            self._tell_loop(partial(self._begin, ticket))
        ticket.end.wait()
        return ticket.outcome

    @override
    def close(self) -> None:
        with self._mutex:
            self._stopping = True
        for ticket in list(self._unfinished):
            self.wait(ticket)
        self._tell_loop(self._loop.stop)
        # After an interrupt join() would take the thread for ended.
        self._thread_ended.wait()
        self._thread.join()
        self._executor.shutdown()

    @override
    def abandon(self) -> None:
        # The loop counts as running here, so it cannot be closed; its pair of wake-up
        # sockets, which reach no file, goes with the process.
        self._selector.close()

    def _enqueue(self, ticket: AiofilesTicket, work: _Work) -> None:
        with self._mutex:
            if self._stopping:
                ticket.outcome = (errno.ECANCELED, 0)
                ticket.end.set()
                raise RuntimeError("the engine is closed")
            ticket.work = work
            self._unfinished[ticket] = None
        self._tell_loop(partial(self._begin, ticket))

    def _tell_loop(self, callback: Callable[[], object]) -> None:
        with self._mutex:  # The loop must not be closed meanwhile.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(callback)

    def _begin(self, ticket: AiofilesTicket) -> None:
        """Start the work of a ticket, once however often it is called."""
        work, ticket.work = ticket.work, None
        if work is not None:
            ticket.task = self._loop.create_task(self._run(ticket, work))

    async def _run(self, ticket: AiofilesTicket, work: _Work) -> None:
        try:
            ticket.outcome = await work()
        except RuntimeError:
            # No thread can be started, or the interpreter is ending. A call that is queued
            # all the same must not run later, when its memory and descriptor are gone.
            self._executor.shutdown(cancel_futures=True)
            ticket.outcome = (errno.EAGAIN, 0)
        finally:
            ticket.end.set()
            del self._unfinished[ticket]

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            with self._mutex:
                self._loop.close()
            self._thread_ended.set()


class AiofilesStorage(EngineStorage[AiofilesTicket]):
    """Files of one directory, moved through the page cache by aiofiles.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "aiofiles", AiofilesEngine(), AiofilesTicket, direct=False)


async def _move(is_write: bool, fd: int, memory: memoryview, offset: int) -> tuple[int, int]:
    """Move all bytes between memory and file; return (errno or 0, file offset reached)."""
    bytes_done = 0
    try:
        # The mode decides which methods exist; what may be done the descriptor decides.
        async with aiofiles.open(fd, "r+b", buffering=0, closefd=False) as file:
            await file.seek(offset)
            while bytes_done < len(memory):
                rest = memory[bytes_done:]
                count = await (file.write(rest) if is_write else file.readinto(rest))
                if not count:  # The file ends inside the extent, or the write made no progress.
                    return errno.EIO, offset + bytes_done
                bytes_done += count
        if is_write:
            # Only descriptors open at the time of a failed write-back are told of it.
            await asyncio.get_running_loop().run_in_executor(None, os.fdatasync, fd)
    except OSError as error:
        return error.errno or errno.EIO, offset + bytes_done
    return 0, 0


async def _sync(fds: list[int]) -> tuple[int, int]:
    """Sync all files; return (errno or 0, index of the first that failed)."""
    loop = asyncio.get_running_loop()
    syncs = (loop.run_in_executor(None, os.fdatasync, fd) for fd in fds)
    for index, error in enumerate(await asyncio.gather(*syncs, return_exceptions=True)):
        if isinstance(error, OSError):
            return error.errno or errno.EIO, index
        if isinstance(error, BaseException):
            raise error
    return 0, 0
