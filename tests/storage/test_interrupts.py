"""Ctrl-C after any call that a storage makes: no descriptor, thread or memory is lost."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

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


@contextmanager
def interrupted_after(calls: int) -> Iterator[None]:
    """Raise KeyboardInterrupt where a signal would, after this number of calls of the storage.

    Python looks for signals as it enters a function and when a C function has returned.
    """
    made = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal made
        if event in ("call", "c_return") and "/tierstore/" in frame.f_code.co_filename:
            made += 1
            if made == calls:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def resources() -> tuple[set[threading.Thread], int]:
    """Return the threads, and the number of descriptors. Those that other tests left may go."""
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))


def assert_nothing_new(before: tuple[set[threading.Thread], int], calls: int) -> None:
    threads, descriptors = resources()
    assert threads <= before[0], f"after {calls} calls"
    assert descriptors <= before[1], f"after {calls} calls"


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
    before = resources()
    for calls in itertools.count(1):
        mapping = mmap.mmap(-1, SECTOR_BYTES)
        interrupted = False
        try:
            with interrupted_after(calls):
                OPERATIONS[operation](storage, memoryview(mapping))
        except KeyboardInterrupt:
            interrupted = True
        storage.drain()
        assert_nothing_new(before, calls)
        storage.register(memoryview(b""))
        mapping.close()  # Nothing has a view of it.
        if not interrupted:
            break
    assert calls > 5
    storage.close()


@pytest.mark.quick(1)
def test_an_interrupted_opening_leaves_no_thread(new_storage: Callable[[], Storage]) -> None:
    before = set(threading.enumerate())  # Other tests may have left some.
    for calls in itertools.count(1):
        storage = None
        with suppress(KeyboardInterrupt), interrupted_after(calls):
            storage = new_storage()
        if storage is not None:
            storage.close()
            break
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        assert set(threading.enumerate()) <= before, f"after {calls} calls"
    assert calls > 5


@pytest.mark.quick(1)
def test_an_interrupted_close_can_be_called_again(
    new_storage: Callable[[], Storage], tmp_path: Path
) -> None:
    before = resources()
    for calls in itertools.count(1):
        storage = new_storage()
        storage.lock(0)
        storage.create("page", SECTOR_BYTES)
        transfer = storage.read(
            "page", Extent(0, SECTOR_BYTES), memoryview(mmap.mmap(-1, SECTOR_BYTES))
        )
        interrupted = False
        try:
            with interrupted_after(calls):
                storage.close()
        except KeyboardInterrupt:
            interrupted = True
            storage.close()
        assert transfer.done()
        assert_nothing_new(before, calls)
        fd = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        if not interrupted:
            break
    assert calls > 5
