from __future__ import annotations

import asyncio
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import RunDirectoryError
from tierstore.storage.aiofile import AiofilesStorage
from tierstore.storage.base import Storage
from tierstore.testing.storage_tests import FileStorageTests
from tierstore.testing.transfers import aligned_buffer, random_bytes
from tierstore.units import SECTOR_BYTES, Extent


class TestAiofilesStorage(FileStorageTests):
    def open_storage(self, directory: Path) -> Storage:
        return AiofilesStorage(directory)


@pytest.mark.parametrize("scheduled", [False, True])
def test_interrupt_around_a_start_hides_nothing_from_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduled: bool
) -> None:
    interrupts = [KeyboardInterrupt]

    class InterruptedLoop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *arguments: Any, **named: Any) -> asyncio.Handle:
            strikes = threading.current_thread() is threading.main_thread() and interrupts
            if strikes and not scheduled:
                raise interrupts.pop()
            handle = super().call_soon_threadsafe(*arguments, **named)
            if strikes:
                raise interrupts.pop()
            return handle

    monkeypatch.setattr(asyncio, "SelectorEventLoop", InterruptedLoop)
    content = random_bytes(2048 * SECTOR_BYTES)
    with closing(AiofilesStorage(tmp_path)) as storage:
        storage.create("page", len(content))
        with pytest.raises(KeyboardInterrupt):
            storage.write("page", Extent(0, len(content)), aligned_buffer(content))
        storage.drain()
        found = (tmp_path / "page").read_bytes()
        # Once the loop was told of it, it is done or not begun; what drain saw stays.
        assert found in ([bytes(len(content))] + [content] * scheduled)
        storage.close()
        assert (tmp_path / "page").read_bytes() == found


def test_unusable_directory_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    threads, opened = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(RunDirectoryError):
        AiofilesStorage(tmp_path / "file")
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == opened
