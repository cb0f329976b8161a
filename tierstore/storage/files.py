"""Files of one directory on a filesystem: all operations of a storage except transfers."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from tierstore.storage.base import Folder, Storage
from tierstore.storage.checks import (
    LOCK_NAME,
    check_name,
    check_nbytes,
    check_usable,
    lock_text,
    locked_error,
)
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
    storage_errors,
    sync_path,
)

_LOCK_POLL_S = 0.1
# Most descriptors of one flush, well below the usual limit of 1024 per process.
_FLUSH_FILES_MAX = 256


class FileStorage(Storage, ABC):
    """Directory operations of a storage on a filesystem; EngineStorage adds the transfers.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    _released = True  # Until __init__ has made everything that close() releases.

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        make_directory(self._directory)
        self._close_mutex = threading.Lock()
        self._lock_mutex = threading.Lock()
        self._lock_fd: int | None = None
        self._owner_pid = os.getpid()
        self._closed = False  # If set, operations are refused.
        self._released = False

    @property
    @override
    def location(self) -> str:
        return str(self._directory)

    @abstractmethod
    def _sync_files(self, paths: Sequence[Path]) -> None:
        """Make the data of these files durable, or raise StorageError."""

    @abstractmethod
    def _close_engine(self) -> None:
        """Wait for all transfers and release the engine. Called again after an interrupt."""

    @abstractmethod
    def _abandon_engine(self) -> None:
        """Drop the engine's descriptors in a forked child, taking no lock."""

    @override
    def home(self, name: str) -> Storage:
        return self

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
        path = self._path(name)
        with storage_errors("size", path):
            return os.stat(path, follow_symlinks=False).st_size

    @override
    def create(self, name: str, nbytes: int) -> None:
        path = self._path(name)
        check_nbytes(nbytes)
        with storage_errors("create", path):
            with suppress(FileNotFoundError):
                os.unlink(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, FILE_MODE)
            try:
                mappings.forget(os.fstat(fd))
                if nbytes > 0:
                    os.posix_fallocate(fd, 0, nbytes)
            except OSError:
                os.unlink(path)  # Frees what a full disk had room for.
                raise
            finally:
                os.close(fd)

    @override
    def flush(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        for start in range(0, len(paths), _FLUSH_FILES_MAX):
            self._sync_files(paths[start : start + _FLUSH_FILES_MAX])

    @override
    def put(self, name: str, data: bytes) -> None:
        put_file(self._path(name), data)

    @override
    def get(self, name: str) -> bytes:
        return get_file(self._path(name))

    @override
    def rename(self, name: str, new_name: str) -> None:
        path, new_path = self._path(name), self._path(new_name)
        with storage_errors("rename", path):
            os.rename(path, new_path)

    @override
    def link(self, name: str, new_name: str) -> None:
        path, new_path = self._path(name), self._path(new_name)
        with storage_errors("link", path):
            os.link(path, new_path, follow_symlinks=False)

    @override
    def is_shared(self, name: str) -> bool:
        path = self._path(name)
        with storage_errors("is_shared", path):
            status = os.stat(path, follow_symlinks=False)
        return status.st_nlink > 1 or mappings.has(status)

    @override
    def map(self, name: str) -> memoryview:
        path = self._path(name)
        with storage_errors("map", path), opened(path, os.O_RDONLY | OPEN_FLAGS) as fd:
            status = os.fstat(fd)
            # Private: pages that are not written to stay in the page cache, not in our memory.
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
            # Without it a full disk would raise a signal when the memory is written to.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return memoryview(map_file(file.fileno(), nbytes, shared=True))

    @override
    def folder(self, path: str) -> Folder:
        self._check_usable()
        return LocalFolder(Path(path))

    @override
    def unlink(self, name: str) -> None:
        path = self._path(name)
        with storage_errors("unlink", path):
            os.unlink(path)

    @override
    def sync_directory(self) -> None:
        self._check_usable()
        with storage_errors("sync directory", self._directory):
            sync_path(self._directory)

    @override
    def abandon(self) -> None:
        if self._released:
            return
        self._closed = self._released = True
        self._abandon_engine()
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
                self._close_engine()
                self._release_lock()
                self._released = True

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
