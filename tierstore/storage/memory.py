"""A storage in memory: the protocol with nothing behind it, for tests and simulation."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from tierstore.errors import StorageError
from tierstore.storage.base import Transfer
from tierstore.storage.checks import (
    check_name,
    check_nbytes,
    check_usable,
    checked_bytes,
    lock_text,
    locked_error,
)
from tierstore.units import Extent


class MemoryFiles:
    """What a directory is to the other storages: files that outlive a storage object."""

    def __init__(self) -> None:
        self.contents: dict[str, bytearray] = {}
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

    def lock(self, timeout_s: float) -> None:
        """See Storage.lock."""
        self._check_usable()
        files = self.files
        with files.changed:
            if not files.changed.wait_for(lambda: files.holder in (None, self), timeout_s):
                raise locked_error(self.location, files.holder_text, timeout_s)
            files.holder = self
            files.holder_text = lock_text()

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
