"""Known failures: calls on failing disks that hang, keep a lock or raise what nobody expects.

Each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tierstore
from tests.support.isolated_process import allow_more_memory, apart, failing_close, outcome_of
from tests.support.originals import STEPS
from tests.support.toy import RANK, Toy, make_run
from tierstore.storage.select import open_storage
from tierstore.units import Extent

ENGINES = ["io_uring", "libaio", "aiofiles"]
SECTOR = 4096
STORAGE_ERROR = f"{tierstore.StorageError.__module__}.{tierstore.StorageError.__qualname__}"
COMMIT = f"commit-{STEPS:010d}"


# ----------------------------------------------------------- close() of a descriptor fails


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


def in_threads(calls: dict[str, Callable[[], Any]], within_s: float = 4.0) -> dict[str, str]:
    """Name -> the class of the error that the call raised, or what it did instead."""
    came = dict.fromkeys(calls, "never ended")

    def do(name: str) -> None:
        came[name] = outcome_of(calls[name]).error.partition(":")[0] or "raised nothing"

    threads = [threading.Thread(target=do, args=(name,), daemon=True) for name in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(came)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="aiofiles never ends a transfer whose close() fails, and the others raise a raw OSError",
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_close_that_fails_ends_the_transfer_with_a_storage_error(
    engine: str, tmp_path: Path
) -> None:
    outcome = apart(use_a_disk_whose_close_fails, tmp_path, engine)
    assert outcome.value == dict.fromkeys(("read", "write", "flush"), STORAGE_ERROR)


def step_on_a_disk_whose_close_fails(directory: Path, engine: str) -> str:
    toy = Toy(directory, engine=engine)
    toy.step()
    toy.store.synchronize()

    def go_on() -> None:
        toy.step()
        toy.store.synchronize()

    with failing_close("/page-"):
        return in_threads({"step": go_on})["step"]


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="aiofiles never ends a step where a close() fails, and the others raise a raw OSError",
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_close_that_fails_ends_a_step_with_a_storage_error(engine: str, tmp_path: Path) -> None:
    outcome = apart(step_on_a_disk_whose_close_fails, tmp_path, engine)
    assert outcome.value == STORAGE_ERROR


# ------------------------------------------------------- the lock outlives a failing close()


def assert_free(run: Path) -> None:
    """Check that whoever opens the run now gets it at once."""
    fd = os.open(run / RANK / "lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def refuse(error: int) -> mock.Mock:
    return mock.Mock(side_effect=OSError(error, os.strerror(error)))


READ_ONLY = [errno.EROFS, errno.EIO]


@pytest.mark.xfail(
    strict=True, raises=OSError, reason="close() raises the raw error of the lock file's truncation"
)
@pytest.mark.parametrize("error", READ_ONLY, ids=errno.errorcode.get)
def test_close_on_a_disk_that_takes_no_writes_raises_no_raw_error(
    error: int, tmp_path: Path
) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    toy.store.restore()
    with mock.patch("os.ftruncate", refuse(error)), contextlib.suppress(tierstore.StorageError):
        toy.store.close()


@pytest.mark.xfail(
    strict=True,
    raises=BlockingIOError,
    reason="close() keeps the lock where the lock file cannot be truncated",
)
@pytest.mark.parametrize("error", READ_ONLY, ids=errno.errorcode.get)
def test_close_on_a_disk_that_takes_no_writes_releases_the_lock(error: int, tmp_path: Path) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    toy.store.restore()
    with (
        mock.patch("os.ftruncate", refuse(error)),
        contextlib.suppress(OSError, tierstore.StorageError),
    ):
        toy.store.close()
    assert_free(tmp_path)


@pytest.mark.xfail(
    strict=True,
    raises=BlockingIOError,
    reason="close() of a storage keeps the lock where the close of a page file fails",
)
@pytest.mark.parametrize("engine", ["io_uring", "libaio"])
def test_a_storage_releases_the_lock_though_a_page_file_cannot_be_closed(
    engine: str, tmp_path: Path
) -> None:
    storage = open_storage(tmp_path / RANK, engine)
    storage.lock(1.0)
    storage.create("page", SECTOR)
    buffer = memoryview(mmap.mmap(-1, SECTOR))
    transfer = storage.read("page", Extent(0, SECTOR), buffer)
    with failing_close("/page"), contextlib.suppress(OSError, tierstore.StorageError):
        storage.close()
    assert transfer.done()
    assert_free(tmp_path)


# -------------------------------------------------------------------------- untyped errors


def allow_no_thread() -> None:
    """Leave less addresses than the stack of a thread, and enough for all else."""
    threading.stack_size(128 << 20)
    allow_more_memory(32 << 20)


def open_without_threads(directory: Path, engine: str) -> None:
    allow_no_thread()
    Toy(directory, engine=engine)


def commit_without_threads(directory: Path, engine: str) -> None:
    toy = Toy(directory, engine=engine)
    toy.step()
    allow_no_thread()
    toy.store.synchronize()


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="where the system gives no thread the RuntimeError of Python is raised",
)
@pytest.mark.parametrize(
    ("use", "engine"),
    [
        *((open_without_threads, engine) for engine in ("libaio", "aiofiles")),
        *((commit_without_threads, engine) for engine in ENGINES),
    ],
)
def test_a_thread_that_cannot_be_started_is_a_typed_error(
    use: Callable[[Path, str], None], engine: str, tmp_path: Path
) -> None:
    outcome = apart(use, tmp_path, engine)
    assert outcome.typed or not outcome.error, outcome.error
