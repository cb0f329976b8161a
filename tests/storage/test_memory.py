from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.storage_tests import StorageTests
from tierstore.storage.base import Storage
from tierstore.storage.memory import MemoryStorage


def memory_contents(storage: Storage) -> dict[str, bytearray]:
    assert isinstance(storage, MemoryStorage)
    return storage.files.contents


class TestMemoryStorage(StorageTests):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with closing(MemoryStorage()) as storage:
            yield storage

    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        return bytes(memory_contents(storage)[name])

    def allocated_bytes(self, storage: Storage, name: str) -> int:
        return len(memory_contents(storage)[name])

    def open_again(self, storage: Storage) -> Storage:
        assert isinstance(storage, MemoryStorage)
        return MemoryStorage(storage.files)
