"""Ctrl-C after any call that a storage makes: no descriptor, thread or memory is lost."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.held import Held
from tests.support.interrupts import InterruptedAfter
from tierstore.errors import RunDirectoryError
from tierstore.storage import Extent, Storage, open_storage
from tierstore.units import SECTOR_BYTES

ENGINES = ["io_uring", "libaio", "aiofiles"]


@pytest.fixture(params=ENGINES)
def new_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Opens a storage without the probe."""
    try:
        with_engine = open_storage(tmp_path, request.param)
    except RunDirectoryError as error:
        pytest.skip(str(error))
    with_engine.close()
    kind: Any = type(with_engine)
    return lambda: kind(tmp_path)


OPERATIONS: dict[str, Callable[[Storage, memoryview], None]] = {
    "read": lambda storage, memory: storage.read("page", Extent(0, len(memory)), memory).wait(),
    "write": lambda storage, memory: storage.write("page", Extent(0, len(memory)), memory).wait(),
    "flush": lambda storage, _: storage.flush(["page", "other"]),
    "register": lambda storage, memory: storage.register(memory),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupted_transfer_loses_nothing(
    new_storage: Callable[[], Storage], operation: str
) -> None:
    storage = new_storage()
    for name in ("page", "other"):
        storage.create(name, SECTOR_BYTES)
    before = Held()
    for calls in itertools.count(1):
        mapping = mmap.mmap(-1, SECTOR_BYTES)
        interrupted = False
        try:
            with InterruptedAfter(calls):
                OPERATIONS[operation](storage, memoryview(mapping))
        except KeyboardInterrupt:
            interrupted = True
        storage.drain()
        before.assert_nothing_new(f"after {calls} calls")
        storage.register(memoryview(b""))
        mapping.close()  # Nothing has a view of it.
        if not interrupted:
            break
    assert calls > 5
    storage.close()


@pytest.mark.quick(1)
def test_an_interrupted_opening_leaves_no_thread(new_storage: Callable[[], Storage]) -> None:
    before = Held()
    for calls in itertools.count(1):
        storage = None
        with suppress(KeyboardInterrupt), InterruptedAfter(calls):
            storage = new_storage()
        if storage is not None:
            storage.close()
            break
        gc.collect()
        before.assert_no_new_thread(f"after {calls} calls")
    assert calls > 5


@pytest.mark.quick(1)
def test_an_interrupted_close_can_be_called_again(
    new_storage: Callable[[], Storage], tmp_path: Path
) -> None:
    before = Held()
    for calls in itertools.count(1):
        storage = new_storage()
        storage.lock(0)
        storage.create("page", SECTOR_BYTES)
        transfer = storage.read(
            "page", Extent(0, SECTOR_BYTES), memoryview(mmap.mmap(-1, SECTOR_BYTES))
        )
        interrupted = False
        try:
            with InterruptedAfter(calls):
                storage.close()
        except KeyboardInterrupt:
            interrupted = True
            storage.close()
        assert transfer.done()
        before.assert_nothing_new(f"after {calls} calls")
        fd = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        if not interrupted:
            break
    assert calls > 5
