"""The files of one directory on a filesystem: everything but how pages move."""

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

from tierstore.storage.base import Folder, Storage, Transfer
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
from tierstore.units import Extent

_LOCK_POLL_S = 0.1
# Bounds the descriptors of one flush, well below the usual limit of 1024 per process.
_FLUSH_FILES_MAX = 256


class FileStorage(ABC):
    """Directory operations of all storages on a filesystem. Engines add the transfers.

    Args:
        directory: made with mode 0700 where absent.

    Raises:
        RunDirectoryError: the directory cannot be made.
    """

    _released = True  # Until everything is there that close() releases.

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        make_directory(self._directory)
        self._close_mutex = threading.Lock()
        self._lock_mutex = threading.Lock()
        self._lock_fd: int | None = None
        self._owner_pid = os.getpid()
        self._closed = False  # Whether work is refused.
        self._released = False

    @property
    @abstractmethod
    def engine(self) -> str:
        """See Storage.engine."""

    @property
    def location(self) -> str:
        """The directory's absolute path."""
        return str(self._directory)

    @abstractmethod
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.read."""

    @abstractmethod
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""

    @abstractmethod
    def drain(self) -> None:
        """See Storage.drain."""

    @abstractmethod
    def _sync_files(self, paths: Sequence[Path]) -> None:
        """Make the data of these files durable, or raise StorageError."""

    @abstractmethod
    def _close_engine(self) -> None:
        """Wait for all transfers and release what moves them. Called again if interrupted."""

    @abstractmethod
    def _abandon_engine(self) -> None:
        """Drop the engine's descriptors in a forked child, taking no lock."""

    def home(self, name: str) -> Storage:
        """See Storage.home: always this one."""
        return self

    def lock(self, timeout_s: float) -> None:
        """See Storage.lock."""
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

    def register(self, memory: memoryview) -> None:
        """See Storage.register: no help to this engine."""
        self._check_usable()

    def list(self) -> list[str]:
        """See Storage.list. Directories, links and the lock are not listed."""
        self._check_usable()
        with storage_errors("list", self._directory), os.scandir(self._directory) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name != LOCK_NAME and entry.is_file(follow_symlinks=False)
            )

    def size(self, name: str) -> int:
        """See Storage.size."""
        path = self._path(name)
        with storage_errors("size", path):
            return os.stat(path, follow_symlinks=False).st_size

    def create(self, name: str, nbytes: int) -> None:
        """See Storage.create."""
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
                os.unlink(path)  # Gives back what a full disk allowed.
                raise
            finally:
                os.close(fd)

    def flush(self, names: Sequence[str]) -> None:
        """See Storage.flush."""
        paths = [self._path(name) for name in names]
        for start in range(0, len(paths), _FLUSH_FILES_MAX):
            self._sync_files(paths[start : start + _FLUSH_FILES_MAX])

    def put(self, name: str, data: bytes) -> None:
        """See Storage.put."""
        put_file(self._path(name), data)

    def get(self, name: str) -> bytes:
        """See Storage.get."""
        return get_file(self._path(name))

    def rename(self, name: str, new_name: str) -> None:
        """See Storage.rename."""
        path, new_path = self._path(name), self._path(new_name)
        with storage_errors("rename", path):
            os.rename(path, new_path)

    def link(self, name: str, new_name: str) -> None:
        """See Storage.link."""
        path, new_path = self._path(name), self._path(new_name)
        with storage_errors("link", path):
            os.link(path, new_path, follow_symlinks=False)

    def is_shared(self, name: str) -> bool:
        """See Storage.is_shared."""
        path = self._path(name)
        with storage_errors("is_shared", path):
            status = os.stat(path, follow_symlinks=False)
        return status.st_nlink > 1 or mappings.has(status)

    def map(self, name: str) -> memoryview:
        """See Storage.map."""
        path = self._path(name)
        with storage_errors("map", path), opened(path, os.O_RDONLY | OPEN_FLAGS) as fd:
            status = os.fstat(fd)
            # The system keeps what was not written to in no memory that counts as ours.
            memory = map_file(fd, status.st_size, shared=False)
            mappings.add(status, memory)
        return memoryview(memory)

    def scratch(self, nbytes: int) -> memoryview:
        """See Storage.scratch."""
        self._check_usable()
        with (
            storage_errors("scratch", self._directory),
            tempfile.TemporaryFile(dir=self._directory) as file,
        ):
            # Without it a full disk would show as a signal, when the memory is written to.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return memoryview(map_file(file.fileno(), nbytes, shared=True))

    def folder(self, path: str) -> Folder:
        """See Storage.folder."""
        self._check_usable()
        return LocalFolder(Path(path))

    def unlink(self, name: str) -> None:
        """See Storage.unlink."""
        path = self._path(name)
        with storage_errors("unlink", path):
            os.unlink(path)

    def sync_directory(self) -> None:
        """See Storage.sync_directory."""
        self._check_usable()
        with storage_errors("sync directory", self._directory):
            sync_path(self._directory)

    def abandon(self) -> None:
        """See Storage.abandon."""
        if self._released:
            return
        self._closed = self._released = True
        self._abandon_engine()
        # Closing this copy leaves the parent's lock alone; unlocking it would not.
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def close(self) -> None:
        """See Storage.close. In a forked child the same as abandon().

        An interrupt leaves the directory locked, because transfers may still run: call it
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
            # A child forked meanwhile may still hold a copy: unlock for all copies.
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _wait_for_lock(self, fd: int, timeout_s: float) -> None:
        """Take the lock on ``fd``; nobody tells when it is released, so ask at intervals."""
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
        """Refuse what only the owner's threads can bring to an end, with StoreClosedError."""
        check_usable(self.location, closed=False, owner_pid=self._owner_pid)

    def _check_usable(self) -> None:
        check_usable(self.location, closed=self._closed, owner_pid=self._owner_pid)

    def _path(self, name: str) -> Path:
        self._check_usable()
        return self._directory / check_name(name)
