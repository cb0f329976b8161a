"""A storage in memory: the protocol with nothing behind it, for tests and simulation."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from tierstore.errors import StorageError
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.storage.checks import (
    check_name,
    check_nbytes,
    check_usable,
    checked_bytes,
    lock_text,
    locked_error,
)
from tierstore.units import Extent

# Path of a folder -> child -> file -> content. A content in two places is a linked file.
Folders = dict[str, dict[str, dict[str, bytearray]]]


class MemoryFiles:
    """What a filesystem is to the other storages: files that outlive a storage object.

    Args:
        folders: those that several storages, of several ranks say, publish in; None for
            folders of its own.
    """

    def __init__(self, folders: Folders | None = None) -> None:
        self.contents: dict[str, bytearray] = {}
        self.folders: Folders = {} if folders is None else folders
        self.changed = threading.Condition()
        self.holder: MemoryStorage | None = None
        self.holder_text = ""


class _EndedTransfer:
    """A transfer that ended before it was given out."""

    def __init__(self, error: StorageError | None) -> None:
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True


class MemoryStorage:
    """Named files in memory. Transfers happen at once, in the calling thread.

    Args:
        files: the files of an earlier storage, to open them again; None for no files.
    """

    def __init__(self, files: MemoryFiles | None = None) -> None:
        self.files = MemoryFiles() if files is None else files
        self._closed = False
        self._owner_pid = os.getpid()

    @property
    def engine(self) -> str:
        """Always "memory"."""
        return "memory"

    @property
    def location(self) -> str:
        """Always "memory"."""
        return "memory"

    def home(self, name: str) -> Storage:
        """See Storage.home: always this one."""
        return self

    def lock(self, timeout_s: float) -> None:
        """See Storage.lock."""
        self._check_usable()
        files = self.files
        with files.changed:
            if not files.changed.wait_for(lambda: files.holder in (None, self), timeout_s):
                raise locked_error(self.location, files.holder_text, timeout_s)
            files.holder = self
            files.holder_text = lock_text()

    def register(self, memory: memoryview) -> None:
        """See Storage.register: no help here."""
        self._check_usable()

    def list(self) -> list[str]:
        """See Storage.list."""
        self._check_usable()
        return sorted(self.files.contents.copy())

    def size(self, name: str) -> int:
        """See Storage.size."""
        return len(self._content("size", name))

    def create(self, name: str, nbytes: int) -> None:
        """See Storage.create."""
        self._check_usable()
        check_nbytes(nbytes)
        self.files.contents[check_name(name)] = bytearray(nbytes)

    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.read."""
        memory = checked_bytes(buffer, extent, written_to=True)
        content = self._content("read", name, extent)
        moved = content[extent.offset : extent.offset + extent.nbytes]
        memory[: len(moved)] = moved
        if len(moved) < extent.nbytes:
            return _EndedTransfer(self._error("read", name, errno.EIO, extent))
        return _EndedTransfer(None)

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        memory = checked_bytes(buffer, extent, written_to=False)
        content = self._content("write", name, extent)
        with self.files.changed:
            # As in a file, bytes between the end and a write behind it are zero.
            content.extend(bytes(max(0, extent.offset - len(content))))
            content[extent.offset : extent.offset + extent.nbytes] = memory.data
        return _EndedTransfer(None)

    def flush(self, names: Sequence[str]) -> None:
        """See Storage.flush: only tells whether the files are there."""
        self._check_usable()
        for name in names:
            self._content("flush", name)

    def put(self, name: str, data: bytes) -> None:
        """See Storage.put."""
        self._check_usable()
        with self.files.changed:
            # Truncates the file that is there, as opening it would: other names see it too.
            self.files.contents.setdefault(check_name(name), bytearray())[:] = data

    def get(self, name: str) -> bytes:
        """See Storage.get."""
        return bytes(self._content("get", name))

    def rename(self, name: str, new_name: str) -> None:
        """See Storage.rename."""
        check_name(new_name)
        with self.files.changed:
            content = self._content("rename", name)
            del self.files.contents[name]
            self.files.contents[new_name] = content

    def link(self, name: str, new_name: str) -> None:
        """See Storage.link."""
        with self.files.changed:
            content = self._content("link", name)
            if check_name(new_name) in self.files.contents:
                raise self._error("link", new_name, errno.EEXIST, None)
            self.files.contents[new_name] = content

    def is_shared(self, name: str) -> bool:
        """See Storage.is_shared."""
        content = self._content("is_shared", name)
        with self.files.changed:
            places = [self.files.contents]
            places += [child for folder in self.files.folders.values() for child in folder.values()]
            links = sum(other is content for place in places for other in place.values())
        return links > 1

    def map(self, name: str) -> memoryview:
        """See Storage.map: a copy."""
        return memoryview(bytearray(self._content("map", name)))

    def scratch(self, nbytes: int) -> memoryview:
        """See Storage.scratch: plain memory."""
        self._check_usable()
        return memoryview(bytearray(nbytes))

    def folder(self, path: str) -> Folder:
        """See Storage.folder."""
        self._check_usable()
        return MemoryFolder(self.files.folders, path)

    def unlink(self, name: str) -> None:
        """See Storage.unlink."""
        with self.files.changed:
            self._content("unlink", name)
            del self.files.contents[name]

    def sync_directory(self) -> None:
        """See Storage.sync_directory: memory has nothing to make durable."""
        self._check_usable()

    def drain(self) -> None:
        """See Storage.drain: every transfer ends as it is begun."""

    def abandon(self) -> None:
        """See Storage.abandon: a copy of the parent's memory holds nothing."""
        self._closed = True

    def close(self) -> None:
        """See Storage.close."""
        if self._closed or os.getpid() != self._owner_pid:
            self._closed = True
            return
        self._closed = True
        with self.files.changed:
            if self.files.holder is self:
                self.files.holder = None
                self.files.changed.notify_all()

    def _check_usable(self) -> None:
        check_usable(self.location, closed=self._closed, owner_pid=self._owner_pid)

    def _content(self, what: str, name: str, extent: Extent | None = None) -> bytearray:
        self._check_usable()
        content = self.files.contents.get(check_name(name))
        if content is None:
            raise self._error(what, name, errno.ENOENT, extent)
        return content

    def _error(self, what: str, name: str, error: int, extent: Extent | None) -> StorageError:
        return StorageError(
            what,
            path=f"{self.location}/{name}",
            errno=error,
            offset=None if extent is None else extent.offset,
            nbytes=None if extent is None else extent.nbytes,
        )


class MemoryFolder:
    """A directory of checkpoints in memory; see Folder."""

    def __init__(self, folders: Folders, path: str) -> None:
        self._children = folders.setdefault(path, {})
        self._path = path

    @property
    def location(self) -> str:
        """The path that it was asked for by."""
        return self._path

    def children(self) -> list[str]:
        """See Folder.children."""
        return sorted(self._children)

    def files(self, child: str) -> list[str]:
        """See Folder.files."""
        return sorted(self._child("list", child))

    def make(self, child: str) -> None:
        """See Folder.make."""
        if check_name(child) in self._children:
            raise self._error("make", child, errno.EEXIST)
        self._children[child] = {}

    def put(self, child: str, name: str, data: bytes) -> None:
        """See Folder.put."""
        self._child("put", child)[check_name(name)] = bytearray(data)

    def get(self, child: str, name: str) -> bytes:
        """See Folder.get."""
        return bytes(self._content("get", child, name))

    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        """See Folder.link."""
        home = storage.home(name)
        if not isinstance(home, MemoryStorage):
            raise self._error("link", child, errno.EXDEV)
        files = self._child("link", child)
        if check_name(new_name) in files:
            raise self._error("link", f"{child}/{new_name}", errno.EEXIST)
        files[new_name] = home._content("link", name)

    def append(self, child: str, name: str, data: memoryview) -> None:
        """See Folder.append."""
        self._child("append", child).setdefault(check_name(name), bytearray()).extend(data)

    def flush(self, child: str, name: str) -> None:
        """See Folder.flush: only tells whether the file is there."""
        self._content("flush", child, name)

    def unlink(self, child: str, name: str) -> None:
        """See Folder.unlink."""
        self._content("unlink", child, name)
        del self._children[child][name]

    def remove(self, child: str) -> None:
        """See Folder.remove."""
        if self._child("remove", child):
            raise self._error("remove", child, errno.ENOTEMPTY)
        del self._children[child]

    def rename(self, child: str, new_child: str) -> None:
        """See Folder.rename."""
        files = self._child("rename", child)
        if self._children.get(check_name(new_child)):
            raise self._error("rename", new_child, errno.ENOTEMPTY)
        del self._children[child]
        self._children[new_child] = files

    def sync(self, child: str) -> None:
        """See Folder.sync: only tells whether the child is there."""
        self._child("sync", child)

    def sync_children(self) -> None:
        """See Folder.sync_children: memory has nothing to make durable."""

    def _child(self, what: str, child: str) -> dict[str, bytearray]:
        files = self._children.get(check_name(child))
        if files is None:
            raise self._error(what, child, errno.ENOENT)
        return files

    def _content(self, what: str, child: str, name: str) -> bytearray:
        content = self._child(what, child).get(check_name(name))
        if content is None:
            raise self._error(what, f"{child}/{name}", errno.ENOENT)
        return content

    def _error(self, what: str, name: str, error: int) -> StorageError:
        return StorageError(what, path=f"{self._path}/{name}", errno=error)
