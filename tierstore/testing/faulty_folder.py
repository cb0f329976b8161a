"""The folder of a FaultyStorage: each call passes through the storage's own gate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tierstore.storage.base import Folder, Storage

Around = Callable[..., AbstractContextManager[None]]


class FaultyFolder:
    """Any folder, with a block around every operation.

    Args:
        inner: the folder that does the work.
        around: called as ``around(operation, file_name)`` with an operation such as
            "folder_put"; what its block raises on entry keeps the operation from happening.
        unwrap: gives the storage that ``inner`` can link from.
    """

    def __init__(self, inner: Folder, around: Around, unwrap: Callable[[Storage], Storage]) -> None:
        self.inner = inner
        self._around = around
        self._unwrap = unwrap

    @property
    def location(self) -> str:
        """See Folder.location: that of the folder inside."""
        return self.inner.location

    def children(self) -> list[str]:
        """See Folder.children."""
        with self._around("folder_children", ""):
            return self.inner.children()

    def files(self, child: str) -> list[str]:
        """See Folder.files."""
        with self._around("folder_files", child):
            return self.inner.files(child)

    def make(self, child: str) -> None:
        """See Folder.make."""
        with self._around("folder_make", child):
            self.inner.make(child)

    def put(self, child: str, name: str, data: bytes) -> None:
        """See Folder.put."""
        with self._around("folder_put", name):
            self.inner.put(child, name, data)

    def get(self, child: str, name: str) -> bytes:
        """See Folder.get."""
        with self._around("folder_get", name):
            return self.inner.get(child, name)

    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        """See Folder.link."""
        with self._around("folder_link", name):
            self.inner.link(self._unwrap(storage), name, child, new_name)

    def append(self, child: str, name: str, data: memoryview) -> None:
        """See Folder.append."""
        with self._around("folder_append", name):
            self.inner.append(child, name, data)

    def flush(self, child: str, name: str) -> None:
        """See Folder.flush."""
        with self._around("folder_flush", name):
            self.inner.flush(child, name)

    def unlink(self, child: str, name: str) -> None:
        """See Folder.unlink."""
        with self._around("folder_unlink", name):
            self.inner.unlink(child, name)

    def remove(self, child: str) -> None:
        """See Folder.remove."""
        with self._around("folder_remove", child):
            self.inner.remove(child)

    def rename(self, child: str, new_child: str) -> None:
        """See Folder.rename."""
        with self._around("folder_rename", child):
            self.inner.rename(child, new_child)

    def sync(self, child: str) -> None:
        """See Folder.sync."""
        with self._around("folder_sync", child):
            self.inner.sync(child)

    def sync_children(self) -> None:
        """See Folder.sync_children."""
        with self._around("folder_sync_children", ""):
            self.inner.sync_children()
