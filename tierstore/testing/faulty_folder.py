"""Folder of a FaultyStorage, which passes every call through the storage's fault injection."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from typing_extensions import override

from tierstore.storage.base import Folder, Storage

Around = Callable[..., AbstractContextManager[None]]


class FaultyFolder(Folder):
    """Any folder, with a context manager around every operation.

    Args:
        inner: the folder that does the work.
        around: called as ``around(operation, file_name)`` with an operation such as
            "folder_put"; if entering it raises, the operation does not happen.
        unwrap: returns the storage that ``inner`` can link from.
    """

    def __init__(self, inner: Folder, around: Around, unwrap: Callable[[Storage], Storage]) -> None:
        self.inner = inner
        self._around = around
        self._unwrap = unwrap

    @property
    @override
    def location(self) -> str:
        return self.inner.location

    @override
    def children(self) -> list[str]:
        with self._around("folder_children", ""):
            return self.inner.children()

    @override
    def files(self, child: str) -> list[str]:
        with self._around("folder_files", child):
            return self.inner.files(child)

    @override
    def make(self, child: str) -> None:
        with self._around("folder_make", child):
            self.inner.make(child)

    @override
    def put(self, child: str, name: str, data: bytes) -> None:
        with self._around("folder_put", name):
            self.inner.put(child, name, data)

    @override
    def get(self, child: str, name: str) -> bytes:
        with self._around("folder_get", name):
            return self.inner.get(child, name)

    @override
    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        with self._around("folder_link", name):
            self.inner.link(self._unwrap(storage), name, child, new_name)

    @override
    def append(self, child: str, name: str, data: memoryview) -> None:
        with self._around("folder_append", name):
            self.inner.append(child, name, data)

    @override
    def flush(self, child: str, name: str) -> None:
        with self._around("folder_flush", name):
            self.inner.flush(child, name)

    @override
    def unlink(self, child: str, name: str) -> None:
        with self._around("folder_unlink", name):
            self.inner.unlink(child, name)

    @override
    def remove(self, child: str) -> None:
        with self._around("folder_remove", child):
            self.inner.remove(child)

    @override
    def rename(self, child: str, new_child: str) -> None:
        with self._around("folder_rename", child):
            self.inner.rename(child, new_child)

    @override
    def sync(self, child: str) -> None:
        with self._around("folder_sync", child):
            self.inner.sync(child)

    @override
    def sync_children(self) -> None:
        with self._around("folder_sync_children", ""):
            self.inner.sync_children()
