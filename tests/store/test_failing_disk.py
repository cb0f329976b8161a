"""A store on a disk that fails: typed errors, and a lock that is released."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from unittest import mock

import pytest

import tierstore
from tests.support.isolated_process import apart, assert_free, failing_close, in_threads
from tests.support.toy import RANK, Toy, make_run

ENGINES = ["io_uring", "libaio", "aiofiles"]
STORAGE_ERROR = f"{tierstore.StorageError.__module__}.{tierstore.StorageError.__qualname__}"


def step_on_a_disk_whose_close_fails(directory: Path, engine: str) -> str:
    toy = Toy(directory, engine=engine)
    toy.step()
    toy.store.synchronize()

    def go_on() -> None:
        toy.step()
        toy.store.synchronize()

    with failing_close("/page-"):
        return in_threads({"step": go_on})["step"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_close_that_fails_ends_a_step_with_a_storage_error(engine: str, tmp_path: Path) -> None:
    outcome = apart(step_on_a_disk_whose_close_fails, tmp_path, engine)
    assert outcome.value == STORAGE_ERROR


def refuse(error: int) -> mock.Mock:
    return mock.Mock(side_effect=OSError(error, os.strerror(error)))


READ_ONLY = [errno.EROFS, errno.EIO]


@pytest.mark.parametrize("error", READ_ONLY, ids=errno.errorcode.get)
def test_close_on_a_disk_that_takes_no_writes_raises_no_raw_error(
    error: int, tmp_path: Path
) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    toy.store.restore()
    with mock.patch("os.ftruncate", refuse(error)), contextlib.suppress(tierstore.StorageError):
        toy.store.close()


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
    assert_free(tmp_path / RANK)


def test_a_run_opens_again_after_a_close_that_failed(tmp_path: Path) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    step = toy.store.restore()
    with (
        mock.patch("os.ftruncate", refuse(errno.EROFS)),
        pytest.raises(tierstore.StorageError, match=r"unlock failed: .*/lock"),
    ):
        toy.store.close()
    toy.store.close()
    toy = Toy(tmp_path, resume=True)
    assert toy.store.restore() == step
    toy.store.close()
