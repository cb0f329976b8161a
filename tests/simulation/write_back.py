"""Writes and flushes that fail as kernels let them fail.

The caller gets an error once. Reads then return the new bytes, later flushes of the file succeed,
and a power loss takes what was written to it since, unless the file was made anew.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

from tests.simulation.storage import RecordedFolder, RecordedStorage
from tierstore.errors import StorageError
from tierstore.storage.base import Folder, Transfer
from tierstore.units import Extent

OPERATIONS = ("write", "flush", "put", "folder_put", "folder_flush")
"""The operations that can fail so, with the names that Fault has for them."""


class FailedTransfer(Transfer):
    """A write whose data is in the page cache and was refused by the disk."""

    def __init__(self, error: StorageError) -> None:
        self._error = error

    def wait(self) -> None:
        """See Transfer.wait."""
        raise self._error

    def done(self) -> bool:
        """See Transfer.done."""
        return True


class FailedWriteBack(RecordedStorage):
    """A RecordedStorage with one write or flush that fails.

    Args:
        storage: the storage whose place it takes.
        operation: one of OPERATIONS.
        call: which call of it fails, counted from 1.
        seed: decides which file of a flush fails, and which others are durable.
    """

    def __init__(self, storage: RecordedStorage, operation: str, call: int, seed: int) -> None:
        super().__init__(storage.log, storage.rank, storage.files, storage.directory)
        self._operation = operation
        self._calls_left = call
        self._generator = random.Random(seed)

    def strikes(self, operation: str) -> bool:
        """Count a call; return whether it fails."""
        self._calls_left -= operation == self._operation
        return operation == self._operation and self._calls_left == 0

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        if not self.strikes("write"):
            return super().write(name, extent, buffer)
        with self.log.mutex:
            self.fail(name)
            super().write(name, extent, buffer)
        return FailedTransfer(failure("write", name))

    def flush(self, names: Sequence[str]) -> None:
        """See Storage.flush."""
        if not names or not self.strikes("flush"):
            super().flush(names)
            return
        failed = self._generator.choice(names)
        others = [name for name in names if name != failed and self._generator.random() < 0.5]
        if others:
            super().flush(others)
        self.fail(failed)
        raise failure("flush", failed)

    def put(self, name: str, data: bytes) -> None:
        """See Storage.put."""
        if not self.strikes("put"):
            super().put(name, data)
            return
        self.put_unflushed(name, data)
        self.fail(name)
        raise failure("put", name)

    def folder(self, path: str) -> Folder:
        """See Storage.folder."""
        return _FailedFolder(self, path)


class _FailedFolder(RecordedFolder):
    def __init__(self, storage: FailedWriteBack, path: str) -> None:
        super().__init__(storage, path)
        self._storage = storage

    def put(self, child: str, name: str, data: bytes) -> None:
        """See Folder.put."""
        if not self._storage.strikes("folder_put"):
            super().put(child, name, data)
            return
        self.put_unflushed(child, name, data)
        self.fail(child, name)
        raise failure("put", name)

    def flush(self, child: str, name: str) -> None:
        """See Folder.flush."""
        if not self._storage.strikes("folder_flush"):
            super().flush(child, name)
            return
        self.fail(child, name)
        raise failure("flush", name)


def failure(operation: str, name: str) -> StorageError:
    """Return the error of an operation that the disk refused."""
    return StorageError(operation, path=f"memory/{name}", errno=errno.EIO)
