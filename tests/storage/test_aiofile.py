from __future__ import annotations

from pathlib import Path

from tierstore.storage.aiofile import AiofilesStorage
from tierstore.storage.base import Storage
from tierstore.testing.storage_tests import FileStorageTests


class TestAiofilesStorage(FileStorageTests):
    def open_storage(self, directory: Path) -> Storage:
        return AiofilesStorage(directory)
