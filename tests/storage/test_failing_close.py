"""Files whose close() fails, as on NFS: every transfer ends, with a StorageError."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.support.isolated_process import apart, assert_free, failing_close, in_threads
from tierstore.storage.select import open_storage
from tierstore.units import Extent

ENGINES = ["io_uring", "libaio", "aiofiles"]
SECTOR = 4096
STORAGE_ERROR = f"{tierstore.StorageError.__module__}.{tierstore.StorageError.__qualname__}"


def use_a_disk_whose_close_fails(directory: Path, engine: str) -> dict[str, str]:
    """Operation -> what came of it, of three that go on at the same time."""

    def call(operation: str) -> Callable[[], Any]:
        storage = open_storage(directory / operation, engine)
        storage.create("page", SECTOR)
        buffer, extent = memoryview(mmap.mmap(-1, SECTOR)), Extent(0, SECTOR)
        calls: dict[str, Callable[[], Any]] = {
            "read": lambda: storage.read("page", extent, buffer).wait(),
            "write": lambda: storage.write("page", extent, buffer).wait(),
            "flush": lambda: storage.flush(["page"]),
        }
        return calls[operation]

    calls = {operation: call(operation) for operation in ("read", "write", "flush")}
    with failing_close("/page"):
        return in_threads(calls)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_close_that_fails_ends_the_transfer_with_a_storage_error(
    engine: str, tmp_path: Path
) -> None:
    outcome = apart(use_a_disk_whose_close_fails, tmp_path, engine)
    assert outcome.value == dict.fromkeys(("read", "write", "flush"), STORAGE_ERROR)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_storage_releases_the_lock_though_a_page_file_cannot_be_closed(
    engine: str, tmp_path: Path
) -> None:
    storage = open_storage(tmp_path, engine)
    storage.lock(1.0)
    storage.create("page", SECTOR)
    buffer = memoryview(mmap.mmap(-1, SECTOR))
    transfer = storage.read("page", Extent(0, SECTOR), buffer)
    with failing_close("/page"), contextlib.suppress(OSError, tierstore.StorageError):
        storage.close()
    assert transfer.done()
    assert_free(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_wait_for_a_write_whose_close_failed_raises(engine: str, tmp_path: Path) -> None:
    with contextlib.closing(open_storage(tmp_path, engine)) as storage:
        storage.create("page", SECTOR)
        buffer, extent = memoryview(mmap.mmap(-1, SECTOR)), Extent(0, SECTOR)
        buffer[:] = os.urandom(SECTOR)
        with failing_close("/page"):
            transfer = storage.write("page", extent, buffer)
            storage.drain()  # Closes the file, and raises nothing.
        for _ in range(2):
            with pytest.raises(tierstore.StorageError, match=r"close after write failed: .*/page"):
                transfer.wait()
