"""The mark of a clean end: there after close() alone, gone before anything else is written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import tierstore
from tests.support.faults import Fault, FaultyStorage
from tests.support.published import run_pages
from tests.support.toy import RANK, Toy, make_run, resumed, train_and_die
from tierstore.storage.select import open_storage


def test_close_marks_the_run_and_the_next_opening_removes_the_mark(tmp_path: Path) -> None:
    make_run(tmp_path)
    mark = tmp_path / RANK / "clean"
    assert mark.read_text() == '{"committed": "commit-0000000003"}'
    toy = Toy(tmp_path, resume=True)
    assert not mark.exists()
    toy.store.close()  # Nothing was written since the run was opened.
    assert mark.exists()
    toy = resumed(tmp_path, 3)
    assert not mark.exists()
    toy.store.close()
    assert mark.exists()


def test_nothing_is_marked_where_nothing_was_committed(tmp_path: Path) -> None:
    Toy(tmp_path).store.close()
    assert not (tmp_path / RANK / "clean").exists()


def test_an_error_in_the_with_block_leaves_no_mark(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    with pytest.raises(KeyboardInterrupt), toy.store:
        raise KeyboardInterrupt
    assert not (tmp_path / RANK / "clean").exists()
    Toy(tmp_path, resume=True).store.close()
    assert not (tmp_path / RANK / "clean").exists()


def test_a_failed_store_leaves_no_mark(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path / RANK))
    toy = Toy(storage)
    toy.step()
    toy.store.synchronize()
    storage.arm(Fault("error", "flush", probability=1.0, errno=errno.EIO))
    toy.step()
    with pytest.raises(tierstore.StorageError):
        toy.store.synchronize()
    storage.disarm()
    toy.store.close()
    assert not (tmp_path / RANK / "clean").exists()


def test_a_run_that_cannot_be_restored_any_more_is_not_marked(tmp_path: Path) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    toy.store.restore()
    toy.step()
    toy.store.synchronize()
    for path in run_pages(tmp_path):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(tierstore.CorruptionError):
        toy.store.restore()
    toy.store.close()
    assert not (tmp_path / RANK / "clean").exists()


def test_a_mark_of_another_commit_does_not_count(tmp_path: Path) -> None:
    """The newest manifest is damaged; the run was not closed at the commit before it."""
    make_run(tmp_path)
    (tmp_path / RANK / "commit-0000000003").write_bytes(b"")
    Toy(tmp_path, resume=True).store.close()
    assert not (tmp_path / RANK / "clean").exists()


def test_a_killed_process_leaves_no_mark(tmp_path: Path) -> None:
    make_run(tmp_path)
    train_and_die(tmp_path, ["step", "synchronize"])
    assert not (tmp_path / RANK / "clean").exists()


def test_overwriting_removes_the_mark(tmp_path: Path) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, overwrite=True)
    assert not (tmp_path / RANK / "clean").exists()
    toy.store.close()


def test_a_mark_that_cannot_be_read_is_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path)
    storage = FaultyStorage(open_storage(tmp_path / RANK))
    storage.arm(Fault("error", "get", name="clean", call=1, errno=errno.EIO))
    toy = Toy(storage, resume=True)
    assert toy.store.restore() == 3
    assert "the last end of the run is treated as not clean" in caplog.text
    toy.store.close()
    resumed(tmp_path, 3).store.close()


def test_a_full_disk_at_a_resume_says_how_much_checkpoints_need(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    toy = resumed(tmp_path / "run", 3)
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    for spare in (tmp_path / "run" / RANK).glob("*.next"):
        spare.unlink()
    storage = FaultyStorage(open_storage(tmp_path / "run" / RANK))
    toy = Toy(storage, resume=True)
    storage.arm(Fault("error", "create", call=1, errno=errno.ENOSPC))
    with pytest.raises(tierstore.StorageError) as caught:
        toy.store.restore()
    assert "2 page files are shared with checkpoints" in "".join(caught.value.__notes__)
    toy.store.close()
