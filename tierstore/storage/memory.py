"""Storage and folder in memory, for tests and simulation."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from tierstore.errors import StorageError
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.storage.checks import (
    WHOLE_FILE_BYTES_MAX,
    check_name,
    check_nbytes,
    check_usable,
    checked_bytes,
    lock_text,
    locked_error,
)
from tierstore.storage.paths import storage_error
from tierstore.units import Extent

Folders = dict[str, dict[str, dict[str, bytearray]]]
"""Path of a folder -> child -> file -> content. A linked file is one content under two names."""

_T = TypeVar("_T")


class MemoryFiles:
    """Files that outlive a storage object, as on a filesystem.

    Args:
        folders: folders shared by several storages, for example of several ranks; None for
            new ones.
    """

    def __init__(self, folders: Folders | None = None) -> None:
        self.contents: dict[str, bytearray] = {}
        self.folders: Folders = {} if folders is None else folders
        # Use the lock itself: __enter__ of a Condition is Python code. See tierstore.threads.
        self.mutex = threading.RLock()
        self.changed = threading.Condition(self.mutex)
        self.holder: MemoryStorage | None = None
        self.holder_text = ""


@dataclass(eq=False)
class _EndedTransfer(Transfer):
    """A transfer that ended before it was returned."""

    error: StorageError | None = None

    @override
    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    @override
    def done(self) -> bool:
        return True


class MemoryStorage(Storage):
    """Named files in memory. Transfers happen at once, in the calling thread.

    Args:
        files: the files of an earlier storage, to open them again; None for none.
    """

    engine = location = "memory"

    def __init__(self, files: MemoryFiles | None = None) -> None:
        self.files = MemoryFiles() if files is None else files
        self._closed = False
        self._owner_pid = os.getpid()

    @override
    def lock(self, timeout_s: float) -> None:
        self._check_usable()
        files = self.files
        with files.mutex:
            if not files.changed.wait_for(lambda: files.holder in (None, self), timeout_s):
                raise locked_error(self.location, files.holder_text, timeout_s)
            files.holder = self
            files.holder_text = lock_text()

    @override
    def require_in_place(self, name: str) -> None:
        """Do nothing: files in memory cannot be moved."""
        self._check_usable()

    @override
    def register(self, memory: memoryview) -> None:
        self._check_usable()

    @override
    def list(self) -> list[str]:
        self._check_usable()
        return sorted(self.files.contents.copy())

    @override
    def size(self, name: str) -> int:
        return len(self._content("size", name))

    @override
    def create(self, name: str, nbytes: int) -> None:
        self._check_usable()
        check_nbytes(nbytes)
        self.files.contents[check_name(name)] = bytearray(nbytes)

    @override
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        memory = checked_bytes(buffer, extent, written_to=True)
        content = self._content("read", name, extent)
        moved = content[extent.offset : extent.offset + extent.nbytes]
        memory[: len(moved)] = moved
        if len(moved) < extent.nbytes:
            return _EndedTransfer(self._error("read", name, errno.EIO, extent))
        return _EndedTransfer()

    @override
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        memory = checked_bytes(buffer, extent, written_to=False)
        content = self._content("write", name, extent)
        with self.files.mutex:
            # As in a file, bytes between the old end and the extent are zero.
            content.extend(bytes(max(0, extent.offset - len(content))))
            content[extent.offset : extent.offset + extent.nbytes] = memory.data
        return _EndedTransfer()

    @override
    def flush(self, names: Sequence[str]) -> None:
        """Only check that the files exist."""
        self._check_usable()
        for name in names:
            self._content("flush", name)

    @override
    def put(self, name: str, data: bytes) -> None:
        self._check_usable()
        if len(data) > WHOLE_FILE_BYTES_MAX:
            raise self._error("put", name, errno.EFBIG)
        with self.files.mutex:
            self.files.contents[check_name(name)] = bytearray(data)

    @override
    def get(self, name: str) -> bytes:
        return bytes(self._content("get", name))

    @override
    def rename(self, name: str, new_name: str) -> None:
        check_name(new_name)
        with self.files.mutex:
            content = self._content("rename", name)
            del self.files.contents[name]
            self.files.contents[new_name] = content

    @override
    def link(self, name: str, new_name: str) -> None:
        with self.files.mutex:
            content = self._content("link", name)
            if check_name(new_name) in self.files.contents:
                raise self._error("link", new_name, errno.EEXIST)
            self.files.contents[new_name] = content

    @override
    def is_shared(self, name: str) -> bool:
        content = self._content("is_shared", name)
        with self.files.mutex:
            # Copy the lists, because another thread may put a file into a folder meanwhile.
            folders = list(self.files.folders.values())
            children = [child for folder in folders for child in list(folder.values())]
            directories = [self.files.contents, *children]
            links = sum(other is content for files in directories for other in list(files.values()))
        return links > 1

    @override
    def map(self, name: str) -> memoryview:
        """Return a copy."""
        return memoryview(bytearray(self._content("map", name)))

    @override
    def scratch(self, nbytes: int) -> memoryview:
        self._check_usable()
        return memoryview(bytearray(nbytes))

    @override
    def folder(self, path: str) -> Folder:
        self._check_usable()
        return MemoryFolder(self.files.folders, path)

    @override
    def unlink(self, name: str) -> None:
        with self.files.mutex:
            self._content("unlink", name)
            del self.files.contents[name]

    @override
    def sync_directory(self) -> None:
        """Do nothing: memory is never durable."""
        self._check_usable()

    @override
    def drain(self) -> None:
        """Do nothing: a transfer ends before it is returned."""

    @override
    def abandon(self) -> None:
        self._closed = True

    @override
    def close(self) -> None:
        if not self._closed and os.getpid() == self._owner_pid:
            with self.files.mutex:
                if self.files.holder is self:
                    self.files.holder = None
                    self.files.changed.notify_all()
        self._closed = True

    def _check_usable(self) -> None:
        check_usable(self.location, closed=self._closed, owner_pid=self._owner_pid)

    def _content(self, what: str, name: str, extent: Extent | None = None) -> bytearray:
        self._check_usable()
        return _entry(self.files.contents, what, Path(self.location), name, extent)

    def _error(
        self, what: str, name: str, error: int, extent: Extent | None = None
    ) -> StorageError:
        return storage_error(what, Path(self.location, name), error, extent)


class MemoryFolder(Folder):
    """A folder in memory."""

    def __init__(self, folders: Folders, path: str) -> None:
        self._children = folders.setdefault(path, {})
        self._path = path

    @property
    @override
    def location(self) -> str:
        return self._path

    @override
    def children(self) -> list[str]:
        return sorted(self._children)

    @override
    def files(self, child: str) -> list[str]:
        return sorted(self._child("list", child))

    @override
    def make(self, child: str) -> None:
        if check_name(child) in self._children:
            raise self._error("make", child, error=errno.EEXIST)
        self._children[child] = {}

    @override
    def put(self, child: str, name: str, data: bytes) -> None:
        if len(data) > WHOLE_FILE_BYTES_MAX:
            raise self._error("put", child, name, error=errno.EFBIG)
        self._child("put", child)[check_name(name)] = bytearray(data)

    @override
    def get(self, child: str, name: str) -> bytes:
        return bytes(self._content("get", child, name))

    @override
    def read(self, child: str, name: str, offset: int, buffer: memoryview) -> int:
        memory = checked_bytes(buffer, Extent(offset, buffer.nbytes), written_to=True)
        moved = self._content("read", child, name)[offset : offset + buffer.nbytes]
        memory[: len(moved)] = moved
        return len(moved)

    @override
    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        home = storage.home(name)
        if not isinstance(home, MemoryStorage):
            raise self._error("link", child, error=errno.EXDEV)
        files = self._child("link", child)
        if check_name(new_name) in files:
            raise self._error("link", child, new_name, error=errno.EEXIST)
        files[new_name] = home._content("link", name)

    @override
    def append(self, child: str, name: str, data: memoryview) -> None:
        self._child("append", child).setdefault(check_name(name), bytearray()).extend(data)

    @override
    def flush(self, child: str, name: str) -> None:
        """Only check that the file exists."""
        self._content("flush", child, name)

    @override
    def unlink(self, child: str, name: str) -> None:
        self._content("unlink", child, name)
        del self._children[child][name]

    @override
    def remove(self, child: str) -> None:
        if self._child("remove", child):
            raise self._error("remove", child, error=errno.ENOTEMPTY)
        del self._children[child]

    @override
    def rename(self, child: str, new_child: str) -> None:
        files = self._child("rename", child)
        if self._children.get(check_name(new_child)):
            raise self._error("rename", new_child, error=errno.ENOTEMPTY)
        del self._children[child]
        self._children[new_child] = files

    @override
    def sync(self, child: str) -> None:
        """Only check that the child exists."""
        self._child("sync", child)

    @override
    def sync_children(self) -> None:
        """Do nothing: memory is never durable."""

    @override
    def close(self) -> None:
        """Do nothing: a folder in memory holds nothing open."""

    def _child(self, what: str, child: str) -> dict[str, bytearray]:
        return _entry(self._children, what, Path(self._path), child)

    def _content(self, what: str, child: str, name: str) -> bytearray:
        return _entry(self._child(what, child), what, Path(self._path, child), name)

    def _error(self, what: str, *names: str, error: int) -> StorageError:
        return storage_error(what, Path(self._path, *names), error)


def _entry(
    directory: dict[str, _T], what: str, path: Path, name: str, extent: Extent | None = None
) -> _T:
    """Return the file or child ``name`` of the directory at ``path``, or raise ENOENT."""
    entry = directory.get(check_name(name))
    if entry is None:
        raise storage_error(what, path / name, errno.ENOENT, extent)
    return entry
