"""Buffered I/O through aiofiles. It is slower, but works on any filesystem and any machine.

One thread runs an asyncio loop. Each transfer is a task on it, and aiofiles makes the blocking
calls in the engine's pool of threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import selectors
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import aiofiles
from typing_extensions import override

from tierstore.storage.engine_storage import EngineStorage
from tierstore.storage.threaded_engine import ThreadedEngine, ThreadedTicket
from tierstore.threads import Threads


class AiofilesTicket(ThreadedTicket):
    """One read, write or sync."""

    move: Callable[[], Awaitable[tuple[int, int]]]
    """The transfer. Its result is the outcome that Engine.wait returns."""
    task: asyncio.Task[None]  # The loop itself keeps only a weak reference.


class _Pool(ThreadPoolExecutor):
    """The engine's threads as an executor for asyncio. Only the engine's thread uses it."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(1)  # It gets no call, so it starts no thread.
        self._of_engine = threads

    @override
    def submit(self, act: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._of_engine.submit(_settle, future, partial(act, *arguments, **options))
        return future


def _settle(future: Future[Any], act: Callable[[], Any]) -> None:
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
        del future, act  # As in Result.settle().


class AiofilesEngine(ThreadedEngine[AiofilesTicket]):
    """An asyncio loop and the thread that runs it."""

    def __init__(self) -> None:
        # Created here, so that a forked child can close its copy of the descriptor.
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        super().__init__()

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
        ticket.offset, ticket.move = offset, partial(_move, is_write, fd, memory, offset)
        self._enqueue(ticket)

    @override
    def abandon(self) -> None:
        # The loop counts as running here, so it cannot be closed. Its pair of wake-up sockets stays
        # open until the process ends. The sockets reach no file.
        self._selector.close()

    @override
    def _run(self) -> None:
        self._loop.set_default_executor(_Pool(self._pool))
        self._loop.run_forever()

    @override
    def _send_wake_up(self) -> None:
        self._loop.call_soon_threadsafe(self._look)

    @override
    def _release_wake_up(self) -> None:
        self._loop.close()

    def _look(self) -> None:
        """Start new work, or end the thread after the last ticket."""
        for ticket in self._new_transfers():
            ticket.task = self._loop.create_task(self._serve(ticket))
        if self._may_stop():
            self._loop.stop()

    async def _serve(self, ticket: AiofilesTicket) -> None:
        ticket.outcome = (errno.EIO, ticket.offset)  # Stays after an error that asyncio logs.
        try:
            ticket.outcome = await ticket.move()
        except RuntimeError:  # The interpreter is ending, and the pool takes no further call.
            ticket.outcome = (errno.ECANCELED, ticket.offset)
        finally:
            self._end(ticket)
            self._look()


class AiofilesStorage(EngineStorage[AiofilesTicket]):
    """Files of one directory, moved through the page cache by aiofiles.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        RunDirectoryError: the directory cannot be made.
        ThreadError: the system starts no further thread.
    """

    engine = "aiofiles"
    direct = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, AiofilesEngine, AiofilesTicket)


async def _move(is_write: bool, fd: int, memory: memoryview, offset: int) -> tuple[int, int]:
    """Move all bytes between memory and file; return (errno or 0, file offset reached)."""
    bytes_done = 0
    try:
        # The mode only determines which methods exist. The descriptor allows one direction.
        async with aiofiles.open(fd, "r+b", buffering=0, closefd=False) as file:
            await file.seek(offset)
            while bytes_done < len(memory):
                rest = memory[bytes_done:]
                count = await (file.write(rest) if is_write else file.readinto(rest))
                if not count:  # The file ends inside the extent, or the write made no progress.
                    return errno.EIO, offset + bytes_done
                bytes_done += count
        if is_write:
            # A failed write-back is reported only to descriptors that are open at that time.
            await asyncio.get_running_loop().run_in_executor(None, os.fdatasync, fd)
    except OSError as error:
        return error.errno or errno.EIO, offset + bytes_done
    return 0, 0
