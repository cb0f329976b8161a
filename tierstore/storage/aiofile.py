"""Buffered I/O through aiofiles: slower, but on any filesystem and any machine."""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import aiofiles

from tierstore.storage.base import Transfer
from tierstore.storage.checks import checked_bytes
from tierstore.storage.files import OPEN_FILES_MAX, THREAD_NAME, FileStorage
from tierstore.storage.paths import OPEN_FLAGS, storage_error, storage_errors
from tierstore.units import Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_THREADS = 8


class AiofilesTransfer:
    """One read or write in flight; its task owns the descriptor and the buffer's export."""

    def __init__(
        self, storage: AiofilesStorage, what: str, path: Path, extent: Extent, task: Future[None]
    ) -> None:
        self._storage = storage
        self._what = what
        self._path = path
        self._extent = extent
        self._task = task

    def wait(self) -> None:
        """See Transfer.wait."""
        error = self._storage.wait_for(self._task)
        if error:
            raise storage_error(self._what, self._path, error, self._extent)

    def done(self) -> bool:
        """See Transfer.done."""
        return self._task.done()


class _LoopThread:
    """An event loop and the thread that runs it. Knows no storage, so that one can be dropped.

    A task is given out as a Future that ends after the task's descriptor was closed.
    """

    def __init__(self) -> None:
        # Our own selector, so that a forked child can close its copy of the descriptor.
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix=THREAD_NAME)
        self._loop.set_default_executor(self._executor)
        # Tasks not yet ended, and the descriptors they use. Only single operations are
        # used, so that no lock is held when another thread forks.
        self._tasks: dict[Future[None], asyncio.Task[None] | None] = {}
        self._descriptors: set[int] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def start(self, fd: int, work: Coroutine[None, None, None]) -> Future[None]:
        """Run ``work`` on the loop, then close ``fd``."""
        self._descriptors.add(fd)
        ended: Future[None] = Future()
        ended.add_done_callback(self._tasks.pop)
        try:
            # Known before it is started: an interrupt in between must not hide it.
            self._tasks[ended] = None
            self._loop.call_soon_threadsafe(self._begin, ended, fd, work)
        except BaseException:
            if ended.cancel():  # Then the loop has not taken it and never will.
                work.close()
            raise
        return ended

    def unfinished(self) -> list[Future[None]]:
        """Return the tasks that were started and have not ended."""
        return list(self._tasks)

    def close(self) -> None:
        """End the threads, once all tasks have ended. May be called again if interrupted."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._executor.shutdown()
        self._loop.close()
        self._close_descriptors()

    def abandon(self) -> None:
        """Close the descriptors that a forked child inherited."""
        # The loop counts as running here, so it cannot be closed; its pair of wake-up
        # sockets, which reach no file, goes with the process.
        self._selector.close()
        self._close_descriptors()

    def _begin(self, ended: Future[None], fd: int, work: Coroutine[None, None, None]) -> None:
        if ended.set_running_or_notify_cancel():
            self._tasks[ended] = self._loop.create_task(self._run(ended, fd, work))

    async def _run(self, ended: Future[None], fd: int, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:
            self._close_descriptor(fd)
            # The frames of its traceback would keep the buffer.
            ended.set_exception(error.with_traceback(None))
        else:
            self._close_descriptor(fd)
            ended.set_result(None)

    def _close_descriptor(self, fd: int) -> None:
        self._descriptors.discard(fd)
        os.close(fd)

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class AiofilesStorage(FileStorage):
    """Files of one directory, moved by an event loop in a thread of its own.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        # Orders the start of a task against drain() and close().
        self._start_mutex = threading.Lock()
        self._threads = _LoopThread()
        try:
            super().__init__(directory)
        except BaseException:
            self._threads.close()
            raise

    def __del__(self) -> None:
        self._close_dropped()

    @property
    def engine(self) -> str:
        """Always "aiofiles"."""
        return "aiofiles"

    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.read."""
        path = self._path(name)
        memory = checked_bytes(buffer, extent, written_to=True)
        task = self._start("read", path, extent, os.O_RDONLY, lambda fd: _read(fd, extent, memory))
        return AiofilesTransfer(self, "read", path, extent, task)

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        path = self._path(name)
        memory = checked_bytes(buffer, extent, written_to=False)
        task = self._start("write", path, extent, os.O_RDWR, lambda fd: _write(fd, extent, memory))
        return AiofilesTransfer(self, "write", path, extent, task)

    def drain(self) -> None:
        """See Storage.drain."""
        self._check_owner()
        with self._start_mutex:
            tasks = self._threads.unfinished()
        for task in tasks:
            with suppress(CancelledError):  # Interrupted before the loop took it.
                task.exception()

    def wait_for(self, task: Future[None]) -> int:
        """Block until a task of this storage has ended; return its errno, or 0.

        Raises:
            StoreClosedError: in a forked child, where no thread runs the task.
        """
        self._check_owner()
        error = task.exception()
        if error is None:
            return 0
        if isinstance(error, OSError):
            return error.errno or errno.EIO
        raise error

    def _start(
        self,
        what: str,
        path: Path,
        extent: Extent | None,
        flags: int,
        work: Callable[[int], Coroutine[None, None, None]],
    ) -> Future[None]:
        """Open ``path`` and start ``work`` on the descriptor, which is closed when it ends."""
        while len(unfinished := self._threads.unfinished()) >= OPEN_FILES_MAX:
            wait(unfinished, return_when=FIRST_COMPLETED)
        with self._start_mutex:
            self._check_usable()
            with storage_errors(what, path, extent):
                fd = os.open(path, flags | OPEN_FLAGS)
            return self._threads.start(fd, work(fd))

    def _sync_files(self, paths: Sequence[Path]) -> None:
        started: list[tuple[Path, Future[None]]] = []
        try:
            for path in paths:
                started.append((path, self._start("flush", path, None, os.O_RDONLY, _sync)))
        finally:
            wait([task for _, task in started])
        for path, task in started:
            error = self.wait_for(task)
            if error:
                raise storage_error("flush", path, error)

    def _close_engine(self) -> None:
        self.drain()
        self._threads.close()

    def _abandon_engine(self) -> None:
        self._threads.abandon()


async def _read(fd: int, extent: Extent, memory: npt.NDArray[np.uint8]) -> None:
    async with aiofiles.open(fd, "rb", buffering=0, closefd=False) as file:
        await file.seek(extent.offset)
        bytes_done = 0
        while bytes_done < extent.nbytes:
            count = await file.readinto(memory[bytes_done:].data)
            if not count:
                raise OSError(errno.EIO, "the file ends inside the extent")
            bytes_done += count


async def _write(fd: int, extent: Extent, memory: npt.NDArray[np.uint8]) -> None:
    async with aiofiles.open(fd, "r+b", buffering=0, closefd=False) as file:
        await file.seek(extent.offset)
        bytes_done = 0
        while bytes_done < extent.nbytes:
            count = await file.write(memory[bytes_done:].data)
            if not count:
                raise OSError(errno.EIO, "the write made no progress")
            bytes_done += count
    # An error of a later write-back is told only to descriptors open at that time.
    await _sync(fd)


async def _sync(fd: int) -> None:
    await asyncio.get_running_loop().run_in_executor(None, os.fdatasync, fd)
