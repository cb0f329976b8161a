"""Writes that the filesystem puts into the page cache: their errors are errors of the write."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.transfers import random_bytes, read_bytes, write_bytes
from tierstore.errors import StorageError
from tierstore.storage import engine_storage, open_storage
from tierstore.units import SECTOR_BYTES, Extent

ENGINES = ["io_uring", "libaio", "aiofiles"]

_CACHESTAT = 451


def dirty_pages(path: Path) -> int:
    """Return how many pages of a file the page cache has that are not on the disk yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    everything, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with path.open("rb") as file:
        if libc.syscall(_CACHESTAT, file.fileno(), everything, counts, 0):
            pytest.skip(f"no cachestat(): {os.strerror(ctypes.get_errno())}")
    return counts[1] + counts[2]


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_to_write_back(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a filesystem that ignores O_DIRECT."""
    content = random_bytes(64 * SECTOR_BYTES)
    (tmp_path / "plain").write_bytes(content)
    if not dirty_pages(tmp_path / "plain"):
        pytest.skip("this filesystem has no dirty pages")
    real = os.open
    with closing(open_storage(tmp_path, engine)) as storage:
        storage.create("page", len(content))
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "open", lambda path, flags, **named: real(path, flags & ~os.O_DIRECT, **named)
            )
            write_bytes(storage, "page", 0, content)
        assert dirty_pages(tmp_path / "page") == 0
        assert read_bytes(storage, "page", 0, len(content)) == content


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failed_write_back_fails_the_write_whose_descriptor_sees_it(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def fail(fd: int, extent: Extent) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{fd}"), extent))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(open_storage(tmp_path, engine)) as storage:
        storage.create("page", 2 * SECTOR_BYTES)
        monkeypatch.setattr(engine_storage, "write_back", fail)
        with pytest.raises(StorageError, match=r"write-back failed: .*/page") as caught:
            write_bytes(storage, "page", SECTOR_BYTES, bytes(SECTOR_BYTES))
        assert caught.value.errno == errno.EIO
        assert read_bytes(storage, "page", SECTOR_BYTES, SECTOR_BYTES) == bytes(SECTOR_BYTES)
    assert seen == [(str(tmp_path / "page"), Extent(SECTOR_BYTES, SECTOR_BYTES))]
