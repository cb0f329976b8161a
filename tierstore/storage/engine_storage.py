"""Storage of one directory on a filesystem, whose transfers an engine moves."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import threading
import time
from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic

from typing_extensions import override

from tierstore.errors import StoreClosedError
from tierstore.storage.base import Folder, Storage, Transfer
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
from tierstore.storage.folder import LocalFolder
from tierstore.storage.mappings import mappings
from tierstore.storage.paths import (
    FILE_MODE,
    OPEN_FLAGS,
    get_file,
    make_directory,
    map_file,
    opened,
    put_file,
    storage_error,
    storage_errors,
    sync_path,
)
from tierstore.units import Extent

# Most descriptors of transfers in flight; a further transfer waits before it starts. Every
# engine has far fewer requests in flight, so the limit costs no speed.
_OPEN_FILES_MAX = 64

# Most descriptors of one flush, well below the usual limit of 1024 per process.
_FLUSH_FILES_MAX = 256

_LOCK_POLL_S = 0.1


@dataclass(eq=False)
class _EngineTransfer(Transfer, Generic[TicketT]):
    """One read or write in flight."""

    storage: EngineStorage[TicketT]
    what: str
    path: Path
    extent: Extent
    ticket: TicketT

    @override
    def wait(self) -> None:
        error, stopped_at = self.storage.wait_for(self.ticket)
        if error:
            what = f"{self.what} (stopped at byte {stopped_at})"
            raise storage_error(what, self.path, error, self.extent)

    @override
    def done(self) -> bool:
        return self.ticket.ended


class EngineStorage(Storage, ABC, Generic[TicketT]):
    """Files of one directory, moved by one engine. A subclass sets ``engine`` and ``direct``.

    A transfer needs its descriptor and its buffer until the kernel no longer uses them, even
    if the caller drops the transfer. The storage keeps both under the engine's ticket.

    Args:
        directory: made with mode 0700 where absent.
        engine: used by this storage alone, and closed with it.
        new_ticket: makes a ticket of this engine.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    direct: bool
    """True if files are opened for direct I/O (O_DIRECT)."""

    _released = True  # Until __init__ has made everything that close() releases.

    def __init__(
        self, directory: Path, engine: Engine[TicketT], new_ticket: Callable[[], TicketT]
    ) -> None:
        self._directory = directory.absolute()
        try:
            make_directory(self._directory)
        except BaseException:
            engine.close()
            raise
        self._engine = engine
        self._new_ticket = new_ticket
        # Ticket -> descriptors and memory that it needs until it has ended. Only single dict
        # operations are used, so that a forked child finds a consistent dict.
        self._in_use: dict[TicketT, tuple[Sequence[int], object]] = {}
        # Makes "registered, then submitted" one act for drain(). A forked child never takes it.
        self._submit_mutex = threading.Lock()
        self._close_mutex = threading.Lock()
        self._lock_mutex = threading.Lock()
        self._lock_fd: int | None = None
        self._owner_pid = os.getpid()
        self._closed = False  # If set, operations are refused.
        self._released = False

    def __del__(self) -> None:
        """Close a storage that was dropped unclosed, whose engine has Python threads."""
        # At the end of the interpreter its threads have stopped already, and the system
        # releases everything.
        if sys.is_finalizing():
            return
        if threading.current_thread().name.startswith(THREAD_NAME):
            # The collector ran in a thread that close() would wait for.
            threading.Thread(target=self.close).start()
        else:
            self.close()

    @property
    @override
    def location(self) -> str:
        return str(self._directory)

    @override
    def lock(self, timeout_s: float) -> None:
        self._check_usable()
        path = self._directory / LOCK_NAME
        with self._lock_mutex, storage_errors("lock", path):
            if self._lock_fd is not None:
                return
            fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, FILE_MODE)
            try:
                self._wait_for_lock(fd, timeout_s)
                os.ftruncate(fd, 0)
                os.pwrite(fd, lock_text().encode(), 0)
            except BaseException:
                os.close(fd)
                raise
            self._lock_fd = fd

    @override
    def register(self, memory: memoryview) -> None:
        self._check_usable()

    @override
    def list(self) -> list[str]:
        """Directories, links and the lock are not listed."""
        self._check_usable()
        with storage_errors("list", self._directory), os.scandir(self._directory) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name != LOCK_NAME and entry.is_file(follow_symlinks=False)
            )

    @override
    def size(self, name: str) -> int:
        with storage_errors("size", self._path(name)) as path:
            return os.stat(path, follow_symlinks=False).st_size

    @override
    def create(self, name: str, nbytes: int) -> None:
        check_nbytes(nbytes)
        with storage_errors("create", self._path(name)) as path:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with opened("create", path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                try:
                    mappings.forget(os.fstat(fd))
                    if nbytes > 0:
                        os.posix_fallocate(fd, 0, nbytes)
                except OSError:
                    os.unlink(path)  # Frees the space that the full disk had allocated.
                    raise

    @override
    def put(self, name: str, data: bytes) -> None:
        put_file(self._path(name), data)

    @override
    def get(self, name: str) -> bytes:
        return get_file(self._path(name))

    @override
    def rename(self, name: str, new_name: str) -> None:
        with storage_errors("rename", self._path(name)) as path:
            os.rename(path, self._path(new_name))

    @override
    def link(self, name: str, new_name: str) -> None:
        with storage_errors("link", self._path(name)) as path:
            os.link(path, self._path(new_name), follow_symlinks=False)

    @override
    def is_shared(self, name: str) -> bool:
        with storage_errors("is_shared", self._path(name)) as path:
            status = os.stat(path, follow_symlinks=False)
        return status.st_nlink > 1 or mappings.has(status)

    @override
    def map(self, name: str) -> memoryview:
        with opened("map", self._path(name), os.O_RDONLY) as fd:
            status = os.fstat(fd)
            # Private: pages that are not written to stay in the page cache.
            memory = map_file(fd, status.st_size, shared=False)
            mappings.add(status, memory)
        return memoryview(memory)

    @override
    def scratch(self, nbytes: int) -> memoryview:
        self._check_usable()
        with (
            storage_errors("scratch", self._directory),
            tempfile.TemporaryFile(dir=self._directory) as file,
        ):
            # Without allocated space, a write to the memory on a full disk raises a signal.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return memoryview(map_file(file.fileno(), nbytes, shared=True))

    @override
    def folder(self, path: str) -> Folder:
        self._check_usable()
        return LocalFolder(Path(path))

    @override
    def unlink(self, name: str) -> None:
        with storage_errors("unlink", self._path(name)) as path:
            os.unlink(path)

    @override
    def sync_directory(self) -> None:
        self._check_usable()
        with storage_errors("sync directory", self._directory):
            sync_path(self._directory)

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

    @override
    def flush(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        for start in range(0, len(paths), _FLUSH_FILES_MAX):
            self._sync_files(paths[start : start + _FLUSH_FILES_MAX])

    @override
    def abandon(self) -> None:
        if self._released:
            return
        self._closed = self._released = True
        self._engine.abandon()
        self._release_all()
        # Closing this copy of the descriptor keeps the parent's lock; unlocking would not.
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    @override
    def close(self) -> None:
        """In a forked child the same as abandon().

        An interrupt leaves the directory locked, because transfers may still run: call close()
        again to wait for them.
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
                self._release_all()
                self._release_lock()
                self._released = True

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
        submit = partial(self._engine.submit, ticket, is_write, fd, address, nbytes, offset)
        self._submit(ticket, [fd], memory, submit)
        return _EngineTransfer(self, what, path, extent, ticket)

    def _make_room(self) -> None:
        """Release ended transfers; while too many have not ended, wait for the oldest."""
        for ticket in list(self._in_use):
            if ticket.ended:
                self._release(ticket)
        while len(self._in_use) >= _OPEN_FILES_MAX:
            with self._submit_mutex:
                oldest = next(iter(self._in_use), None)
            if oldest is not None:
                self._wait_until_ended(oldest)

    def _wait_until_ended(self, ticket: TicketT) -> None:
        # An interrupt between registering and submitting leaves a ticket that never starts.
        with suppress(ValueError):
            self._engine.wait(ticket)
        self._release(ticket)

    def _submit(
        self, ticket: TicketT, fds: Sequence[int], memory: object, submit: Callable[[], None]
    ) -> None:
        with self._submit_mutex:
            # Registered before submitted: an interrupt in between must not free the buffer.
            self._in_use[ticket] = fds, memory
            try:
                submit()
            except RuntimeError as error:
                self._release(ticket)
                raise StoreClosedError(f"{self.location}: {error}") from error

    def _release(self, ticket: TicketT) -> None:
        fds, _ = self._in_use.pop(ticket, ((), None))
        _close_all(fds)

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
        self._submit(ticket, fds, None, partial(self._engine.submit_sync, ticket, fds))
        error, index = self.wait_for(ticket)
        if error:
            raise storage_error("flush", paths[index], error)

    def _release_all(self) -> None:
        for ticket in list(self._in_use):
            self._release(ticket)

    def _release_lock(self) -> None:
        with self._lock_mutex:
            if self._lock_fd is None:
                return
            os.ftruncate(self._lock_fd, 0)
            # A forked child may still have a copy of the descriptor: unlock for all copies.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _wait_for_lock(self, fd: int, timeout_s: float) -> None:
        """Poll for the lock on ``fd``: flock has no timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time_left_s = deadline - time.monotonic()
                if time_left_s <= 0:
                    holder = os.pread(fd, 1024, 0).decode(errors="replace")
                    raise locked_error(self.location, holder, timeout_s) from None
            time.sleep(min(_LOCK_POLL_S, time_left_s))

    def _check_owner(self) -> None:
        """Raise StoreClosedError in a forked child, which has no engine thread to wait for."""
        check_usable(self.location, closed=False, owner_pid=self._owner_pid)

    def _check_usable(self) -> None:
        check_usable(self.location, closed=self._closed, owner_pid=self._owner_pid)

    def _path(self, name: str) -> Path:
        self._check_usable()
        return self._directory / check_name(name)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
