"""Storage of one directory on a filesystem. An engine moves its transfers."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from typing_extensions import override

from tierstore.errors import StoreClosedError
from tierstore.storage.base import Folder, Transfer
from tierstore.storage.checks import (
    LOCK_NAME,
    check_name,
    check_nbytes,
    check_usable,
    checked_bytes,
    lock_text,
    locked_error,
)
from tierstore.storage.engine import THREAD_NAME, Engine, TicketT
from tierstore.storage.folder import LinkableStorage, LocalFolder
from tierstore.storage.held_directory import HeldDirectory
from tierstore.storage.mappings import mappings
from tierstore.storage.paths import (
    FILE_MODE,
    NO_LOCKS,
    OPEN_FLAGS,
    Entry,
    get_file,
    map_file,
    no_locks_error,
    opened,
    put_file,
    storage_error,
    storage_errors,
    write_back,
)
from tierstore.units import Extent

# Most descriptors of transfers in flight. A further transfer waits before it starts. Every
# engine has far fewer requests in flight, so the limit costs no speed.
_OPEN_FILES_MAX = 64

# Most descriptors of one flush.
_FLUSH_FILES_MAX = 32

_LOCK_POLL_S = 0.1

_Descriptors = list[int]  # In the storage, ``list`` is a method.


class Operation(Generic[TicketT]):
    """One read, write, flush or registration, with the resources that the kernel uses.

    Args:
        what: the operation, for errors.
        directory: the directory of the files.
        names: a file for each descriptor.
        ticket: the operation in the engine.
        extent: range of a read or write.
        memory: kept alive until the end.

    Attributes:
        failure: the first failed operation, its file and errno; None without an error.
    """

    __slots__ = (
        "_directory",
        "_extent",
        "_memory",
        "_mutex",
        "_names",
        "_what",
        "failure",
        "fds",
        "ticket",
    )

    def __init__(
        self,
        what: str,
        directory: HeldDirectory,
        names: Sequence[str],
        ticket: TicketT,
        extent: Extent | None = None,
        memory: object = None,
    ) -> None:
        self.ticket = ticket
        self.fds: _Descriptors = []
        self.failure: tuple[str, Path, int] | None = None
        self._directory, self._names = directory, names
        self._what, self._extent, self._memory = what, extent, memory
        self._mutex = threading.Lock()

    def check(self) -> None:
        """Raise StorageError if the operation failed."""
        if self.failure is not None:
            raise storage_error(*self.failure, self._extent)

    def open(self, flags: int) -> None:
        """Open all files.

        Raises:
            StorageError: a file cannot be opened. No file is open.
        """
        try:
            self._directory.open_all(self.fds, self._names, flags)
        except OSError as error:
            path = self._path(len(self.fds))
            self.close()
            raise storage_error(self._what, path, error.errno or errno.EIO, self._extent) from error

    def finish(self, error: int, position: int) -> None:
        """Record the engine's outcome, and release the memory and descriptors.

        May be called again after an interrupt, and by several threads.
        """
        with self._mutex:
            if error:
                place = f" (stopped at byte {position})" if self._extent else ""
                path = self._path(0 if self._extent else position)
                self._fail(f"{self._what}{place}", path, error)
            elif self._what == "write" and self.fds:
                self._write_back(self.fds[0])
            self.close()

    def close(self) -> None:
        """Close the descriptors and drop the memory."""
        self._memory = None
        while self.fds:
            try:
                # C code removes the descriptor from the list, so an interrupt cannot lose it.
                next(map(os.close, map(self.fds.pop, [-1])))
            except OSError as error:
                path = self._path(len(self.fds))
                self._fail(f"close after {self._what}", path, error.errno or errno.EIO)

    def _write_back(self, fd: int) -> None:
        """Write back the bytes of a write that the filesystem has put into the page cache.

        A flush uses another descriptor, and may not report an error of a later write-back.
        """
        assert self._extent is not None
        try:
            write_back(fd, self._extent)
        except OSError as error:
            self._fail("write-back", self._path(0), error.errno or errno.EIO)

    def _path(self, index: int) -> Path:
        return self._directory.path.joinpath(*self._names[index : index + 1])

    def _fail(self, what: str, path: Path, error: int) -> None:
        self.failure = self.failure or (what, path, error)


@dataclass(eq=False)
class _EngineTransfer(Transfer, Generic[TicketT]):
    """One read or write."""

    storage: EngineStorage[TicketT]
    operation: Operation[TicketT]

    @override
    def wait(self) -> None:
        self.storage.wait_for(self.operation)
        self.operation.check()

    @override
    def done(self) -> bool:
        return self.operation.ticket.ended


class EngineStorage(LinkableStorage, ABC, Generic[TicketT]):
    """Files of one directory, moved by one engine. A subclass sets ``engine`` and ``direct``.

    The kernel uses the descriptors and the memory of a transfer even if the caller drops the
    transfer. The storage therefore keeps all operations that have not ended.

    Args:
        directory: made with mode 0700 where absent.
        new_engine: makes the engine. The engine is closed with the storage.
        new_ticket: makes a ticket of this engine.

    Raises:
        RunDirectoryError: the directory cannot be made or opened.
        OSError, ThreadError: as in new_engine().
    """

    direct: bool
    """True if files are opened for direct I/O (O_DIRECT)."""

    _engine: Engine[TicketT]
    _released = True  # Until close() has something to release.

    def __init__(
        self,
        directory: Path,
        new_engine: Callable[[], Engine[TicketT]],
        new_ticket: Callable[[], TicketT],
    ) -> None:
        self._new_ticket = new_ticket
        # The operations that have not ended, oldest first. Use only single dict operations: a
        # forked child then finds a consistent dict.
        self._in_use: dict[Operation[TicketT], None] = {}
        # For drain(), register and submit count as one act. A forked child never takes this lock.
        self._submit_mutex = threading.Lock()
        self._close_mutex = threading.Lock()
        self._lock_mutex = threading.Lock()
        self._lock_fd: int | None = None
        self._owner_pid = os.getpid()
        self._closed = False  # If set, operations are refused.
        self._directory = HeldDirectory(directory)
        self._location = str(self._directory.path)  # Every operation asks for it.
        try:
            # On one line: after a later interrupt, __del__() closes the engine.
            self._engine, self._released = new_engine(), False
        except BaseException:
            self._directory.close()
            raise

    def __del__(self) -> None:
        """Close a storage that was dropped unclosed and whose engine has Python threads."""
        # When the interpreter exits, the threads have stopped already, and the system releases
        # everything.
        if sys.is_finalizing():
            return
        if threading.current_thread().name.startswith(THREAD_NAME):
            # The collector may run in a thread for which close() would wait.
            threading.Thread(target=self.close).start()
        else:
            self.close()

    @property
    @override
    def location(self) -> str:
        return self._location

    @override
    def entry(self, name: str) -> Entry:
        self._check_usable()
        return self._directory.entry(check_name(name))

    @override
    def lock(self, timeout_s: float) -> None:
        self._check_usable()
        entry = self._directory.entry(LOCK_NAME)
        with self._lock_mutex, storage_errors("lock", entry.path):
            if self._lock_fd is not None:
                return
            flags = os.O_RDWR | os.O_CREAT | OPEN_FLAGS
            fd = os.open(entry.name, flags, FILE_MODE, dir_fd=entry.directory)
            try:
                self._wait_for_lock(fd, timeout_s)
                _write_holder(fd, lock_text())
                self._lock_fd = fd
            except BaseException:
                os.close(fd)
                raise

    @override
    def require_in_place(self, name: str) -> None:
        self._check_usable()
        self._directory.require_in_place(check_name(name))

    @override
    def register(self, memory: memoryview) -> None:
        self._check_usable()

    @override
    def list(self) -> list[str]:
        """Directories, links and the lock are not listed."""
        self._check_usable()
        with self._directory.scan() as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name != LOCK_NAME and entry.is_file(follow_symlinks=False)
            )

    @override
    def size(self, name: str) -> int:
        return self._status("size", name).st_size

    @override
    def create(self, name: str, nbytes: int) -> None:
        check_nbytes(nbytes)
        entry = self.entry(name)
        with storage_errors("create", entry.path):
            with suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=entry.directory)
            with opened("create", entry, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                try:
                    mappings.forget(os.fstat(fd))
                    if nbytes > 0:
                        os.posix_fallocate(fd, 0, nbytes)
                except OSError:
                    # Free the space that was allocated before the disk was full.
                    os.unlink(entry.name, dir_fd=entry.directory)
                    raise

    @override
    def put(self, name: str, data: bytes) -> None:
        put_file(self.entry(name), data)

    @override
    def get(self, name: str) -> bytes:
        return get_file(self.entry(name))

    @override
    def rename(self, name: str, new_name: str) -> None:
        old, new = self.entry(name), self.entry(new_name)
        with storage_errors("rename", old.path):
            os.rename(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory)

    @override
    def link(self, name: str, new_name: str) -> None:
        old, new = self.entry(name), self.entry(new_name)
        with storage_errors("link", old.path):
            os.link(
                old.name,
                new.name,
                src_dir_fd=old.directory,
                dst_dir_fd=new.directory,
                follow_symlinks=False,
            )

    @override
    def is_shared(self, name: str) -> bool:
        status = self._status("is_shared", name)
        return status.st_nlink > 1 or mappings.has(status)

    @override
    def map(self, name: str) -> memoryview:
        with opened("map", self.entry(name), os.O_RDONLY) as fd:
            status = os.fstat(fd)
            # A private mapping: unwritten pages stay in the page cache.
            memory = map_file(fd, status.st_size, shared=False)
            mappings.add(status, memory)
        return memoryview(memory)

    @override
    def scratch(self, nbytes: int) -> memoryview:
        self._check_usable()
        directory = self._directory
        with storage_errors("scratch", directory.path), directory.nameless_file() as fd:
            # Allocate the space: otherwise, on a full disk, a write to the memory raises a signal.
            os.posix_fallocate(fd, 0, nbytes)
            return memoryview(map_file(fd, nbytes, shared=True))

    @override
    def folder(self, path: str) -> Folder:
        self._check_usable()
        return LocalFolder(Path(path))

    @override
    def unlink(self, name: str) -> None:
        entry = self.entry(name)
        with storage_errors("unlink", entry.path):
            os.unlink(entry.name, dir_fd=entry.directory)

    @override
    def sync_directory(self) -> None:
        self._check_usable()
        self._directory.sync()

    @override
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._move("read", name, extent, buffer)

    @override
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._move("write", name, extent, buffer)

    @override
    def drain(self) -> None:
        self._check_owner()
        with self._submit_mutex:
            operations = list(self._in_use)
        for operation in operations:
            self.wait_for(operation)

    def wait_for(self, operation: Operation[TicketT]) -> None:
        """Block until an operation of this storage has ended and has released its resources.

        Raises:
            StoreClosedError: in a forked child.
        """
        self._check_owner()
        if operation not in self._in_use:  # Released already to make room for a later operation.
            return
        try:
            outcome = self._engine.wait(operation.ticket)
        except ValueError:  # An interrupt came between registering and submitting.
            outcome = errno.ECANCELED, 0
        operation.finish(*outcome)
        self._in_use.pop(operation, None)

    @override
    def flush(self, names: Sequence[str]) -> None:
        self._check_usable()
        names = [check_name(name) for name in names]
        for start in range(0, len(names), _FLUSH_FILES_MAX):
            batch = names[start : start + _FLUSH_FILES_MAX]
            operation = Operation("flush", self._directory, batch, self._new_ticket())
            self.start(operation, os.O_RDONLY, self._engine.submit_sync)
            self.wait_for(operation)
            operation.check()

    @override
    def abandon(self) -> None:
        if self._released:
            return
        self._closed = self._released = True
        self._engine.abandon()
        self._release_all()
        self._directory.close()
        # Close this copy of the descriptor: unlocking it would release the parent's lock.
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    @override
    def close(self) -> None:
        """Close; in a forked child, do the same as abandon().

        An interrupt leaves the directory locked, because transfers may still be in flight: call
        close() again to wait for them.

        Raises:
            StorageError: the name of this process cannot be removed from the lock file. All
                resources were released.
        """
        if self._released:
            return
        if os.getpid() != self._owner_pid:
            self.abandon()
            return
        self._closed = True
        with self._close_mutex:
            if not self._released:
                self._engine.close()
                self.drain()
                self._release_all()
                try:
                    self._release_lock()
                finally:
                    self._directory.close()
                self._released = True

    def _move(self, what: str, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        self._check_usable()
        check_name(name)
        is_write = what == "write"
        memory = checked_bytes(buffer, extent, written_to=not is_write)
        self._make_room()
        operation = Operation(what, self._directory, [name], self._new_ticket(), extent, memory)
        address, nbytes, offset = memory.ctypes.data, extent.nbytes, extent.offset
        flags = os.O_WRONLY if is_write else os.O_RDONLY
        self.start(
            operation,
            flags | os.O_DIRECT if self.direct else flags,
            lambda ticket, fds: self._engine.submit(
                ticket, is_write, fds[0], address, nbytes, offset
            ),
        )
        return _EngineTransfer(self, operation)

    def _make_room(self) -> None:
        """Release ended operations. While too many are in flight, wait for the oldest."""
        for operation in list(self._in_use):
            if operation.ticket.ended:
                self.wait_for(operation)
        while len(self._in_use) >= _OPEN_FILES_MAX:
            with self._submit_mutex:
                oldest = next(iter(self._in_use), None)
            if oldest is not None:
                self.wait_for(oldest)

    def start(
        self,
        operation: Operation[TicketT],
        flags: int | None,
        submit: Callable[[TicketT, _Descriptors], None],
    ) -> None:
        """Open the files of an operation if ``flags`` are given, and submit the operation."""
        try:
            if flags is not None:
                operation.open(flags | OPEN_FLAGS)
            with self._submit_mutex:
                # Register before submitting: an interrupt in between must not free the memory.
                self._in_use[operation] = None
                submit(operation.ticket, operation.fds)
        except RuntimeError as error:  # The ticket has ended.
            self.wait_for(operation)
            raise StoreClosedError(f"{self.location}: {error}") from error
        except BaseException:
            if operation not in self._in_use:
                operation.close()
            raise

    def _release_all(self) -> None:
        for operation in list(self._in_use):
            operation.close()
        self._in_use.clear()

    def _release_lock(self) -> None:
        with self._lock_mutex:
            fd = self._lock_fd
            if fd is None:
                return
            with (
                storage_errors("unlock", self._directory.path / LOCK_NAME),
                # Calls all callbacks, the last one first, even if some fail.
                ExitStack() as stack,
            ):
                stack.callback(setattr, self, "_lock_fd", None)
                stack.callback(os.close, fd)
                # A forked child may still have a copy of the descriptor: unlock for all copies.
                stack.callback(fcntl.flock, fd, fcntl.LOCK_UN)
                _write_holder(fd, "")

    def _wait_for_lock(self, fd: int, timeout_s: float) -> None:
        """Poll for the lock on ``fd``: flock has no timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in NO_LOCKS:
                    raise no_locks_error(self.location, error) from error
                if not isinstance(error, BlockingIOError):
                    raise
                time_left_s = deadline - time.monotonic()
                if time_left_s <= 0:
                    raise locked_error(self.location, _holder(fd), timeout_s) from None
            time.sleep(min(_LOCK_POLL_S, time_left_s))

    def _check_owner(self) -> None:
        """Raise StoreClosedError in a forked child: it has no engine thread."""
        check_usable(self.location, closed=False, owner_pid=self._owner_pid)

    def _check_usable(self) -> None:
        check_usable(self.location, closed=self._closed, owner_pid=self._owner_pid)

    def _status(self, what: str, name: str) -> os.stat_result:
        entry = self.entry(name)
        with storage_errors(what, entry.path):
            return os.stat(entry.name, dir_fd=entry.directory, follow_symlinks=False)


def _write_holder(fd: int, text: str) -> None:
    """Write the holder of the lock, unless the lock file has a second name: it may be foreign."""
    if os.fstat(fd).st_nlink == 1:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)


def _holder(fd: int) -> str:
    """Return the content of the lock file; "" if the file has a second name."""
    text = os.pread(fd, 1024, 0) if os.fstat(fd).st_nlink == 1 else b""
    return text.decode(errors="replace")
