"""Buffered I/O through aiofiles: slower, but on any filesystem and any machine."""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import aiofiles

from tierstore.errors import StoreClosedError
from tierstore.storage.base import Transfer
from tierstore.storage.checks import checked_bytes
from tierstore.storage.files import (
    OPEN_FLAGS,
    FileStorage,
    storage_error,
    storage_errors,
)
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


class AiofilesStorage(FileStorage):
    """Files of one directory, moved by an event loop in a thread of its own.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        # Our own selector, so that a forked child can close its copy of the descriptor.
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-aiofiles")
        self._loop.set_default_executor(self._executor)
        # Tasks not yet ended, and the descriptors they use. Only single operations are
        # used, so that no lock is held when another thread forks.
        self._tasks: set[Future[None]] = set()
        self._descriptors: set[int] = set()
        # Orders the start of a task against close().
        self._start_mutex = threading.Lock()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tierstore-loop", daemon=True
        )
        self._thread.start()

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

    def wait_for(self, task: Future[None]) -> int:
        """Block until a task of this storage has ended; return its errno, or 0.

        Raises:
            StoreClosedError: in a forked child, where no thread runs the task.
        """
        if os.getpid() != self._owner_pid:
            raise StoreClosedError(f"{self.location} belongs to the parent of this process")
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
        with self._start_mutex:
            self._check_usable()
            with storage_errors(what, path, extent):
                fd = os.open(path, flags | OPEN_FLAGS)
            self._descriptors.add(fd)
            task = asyncio.run_coroutine_threadsafe(self._run(fd, work(fd)), self._loop)
            self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, fd: int, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        finally:
            self._descriptors.discard(fd)
            os.close(fd)

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
        with self._start_mutex:
            tasks = list(self._tasks)
        wait(tasks)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._executor.shutdown()
        self._loop.close()

    def _abandon_engine(self) -> None:
        # The loop counts as running here, so it cannot be closed; its pair of wake-up
        # sockets, which reach no file, goes with the process.
        self._selector.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


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
