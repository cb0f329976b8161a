"""keep_last leaves a checkpoint that is whole: what the marks of checkpoints say."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.support import killed_processes
from tests.support.commands import call
from tests.support.faults import Fault, FaultyStorage
from tests.support.held import Held
from tests.support.originals import flip
from tests.support.published import assert_holds_toy, names_in, pages_of
from tests.support.published_by_toy import (
    MARK,
    damage_first_page,
    faulty_toy,
    marked_ones,
    publish,
    publish_steps,
    step_durably,
    whole_ones,
)
from tests.support.toy import RANK, Toy, verified
from tierstore.storage.select import open_storage
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

# ------------------------------------------------------------- a whole checkpoint remains


def rot_without_gradients(toy: Toy, folder: Path) -> None:
    """The page is linked as it is into one checkpoint after the other."""
    damage_first_page(folder.parent / "run", 2)
    for name in ("b", "c", "d"):
        toy.step(names=["third"])
        publish(toy, folder / name, keep_last=1)


def rot_since_the_last_step(toy: Toy, folder: Path) -> None:
    """The page was written and never read."""
    damage_first_page(folder.parent / "run", 2)
    publish(toy, folder / "b", keep_last=1)


def rot_before_a_resume(toy: Toy, folder: Path) -> None:
    """restore() reads masters only."""
    run = folder.parent / "run"
    toy.store.close()
    damage_first_page(run, 2)
    again = Toy(run, resume=True)
    with contextlib.closing(again.store):
        again.store.restore()
        publish(again, folder / "b", keep_last=1)


@pytest.mark.parametrize(
    "rot", [rot_without_gradients, rot_since_the_last_step, rot_before_a_resume]
)
def test_keep_last_leaves_a_whole_checkpoint(
    rot: Callable[[Toy, Path], None], tmp_path: Path
) -> None:
    toy = Toy(tmp_path / "run")
    folder = tmp_path / "folder"
    toy.step()
    publish(toy, folder / "a")
    step_durably(toy)
    assert whole_ones(folder) == {"a"}

    def go_on() -> None:
        rot(toy, folder)
        toy.store.close()

    with pytest.raises(tierstore.CorruptionError, match=r"folder/b/rank-00000\.page-000000"):
        go_on()
    toy.store.close()
    assert whole_ones(folder) == {"a"}
    assert names_in(folder) == ["a", "b"]


def test_a_damaged_page_without_gradients_is_told_of_by_a_later_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    step_durably(toy)
    damage_first_page(tmp_path / "run", 1)

    def go_on() -> None:
        for step in (2, 3, 4):  # A checkpoint is read in full before the next one begins.
            toy.step(names=["third"])
            toy.store.commit()
            publish(toy, tmp_path / f"folder/{step}")

    try:
        with pytest.raises(tierstore.CorruptionError, match="page-"):
            go_on()
    finally:
        with contextlib.suppress(tierstore.TierstoreError):
            toy.store.close()


# ------------------------------------------------------------------- which ones are kept


@pytest.mark.parametrize(
    ("keep_last", "unmarked", "kept"),
    [
        (1, "", "de"),
        (1, "d", "ce"),
        (1, "dcb", "ae"),
        (1, "dcba", "ae"),
        (2, "", "de"),
        (2, "d", "cde"),
        (2, "dc", "bde"),
        (2, "dcba", "ade"),
        (3, "dcba", "acde"),
        (4, "dcba", "abcde"),
        (9, "dcba", "abcde"),
    ],
)
def test_the_newest_whole_one_is_kept_or_the_oldest(
    keep_last: int, unmarked: str, kept: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, *"abcd")
    toy.store.close()
    for name in unmarked:
        (folder / name / MARK).unlink()
    toy = Toy(tmp_path / "run", resume=True)
    toy.store.restore()
    publish_steps(toy, folder, "e", keep_last=keep_last)
    assert names_in(folder) == list(kept)
    toy.store.close()


def emptied(mark: Path) -> None:
    mark.write_bytes(b"")


def flipped(mark: Path) -> None:
    flip(mark, -4)


def of_another_checkpoint(mark: Path) -> None:
    shutil.copy(mark.parent.with_name("a") / MARK, mark)


@pytest.mark.parametrize("damage", [emptied, flipped, of_another_checkpoint])
def test_a_damaged_mark_does_not_count(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, "a", "b")
    verified(toy.store)
    damage(folder / "b" / MARK)
    publish_steps(toy, folder, "c", keep_last=1)
    assert names_in(folder) == ["a", "c"]
    toy.store.close()


def test_keep_last_1_straight_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, "a", "b")
    toy.store.close()
    toy = Toy(tmp_path / "run", resume=True)
    toy.store.restore()
    publish(toy, folder / "c", keep_last=1)
    assert names_in(folder) == ["b", "c"]
    toy.store.close()
    assert marked_ones(folder) == {"b", "c"}


def publish_and_die(run: Path, path: Path) -> None:
    """Publish a step in a process that is killed while it verifies the checkpoint."""

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "folder_read":
            os.kill(os.getpid(), signal.SIGKILL)

    toy = Toy(FaultyStorage(open_storage(run / RANK), on_operation=watch), resume=True)
    toy.store.restore()
    publish_steps(toy, path.parent, path.name, keep_last=1)
    verified(toy.store)


def test_a_kill_during_verification(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "folder"
    toy = Toy(run)
    publish_steps(toy, folder, "a")
    toy.store.close()
    for name in ("b", "c"):
        child = killed_processes._processes.Process(
            target=publish_and_die, args=(run, folder / name)
        )
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        assert names_in(folder) == ["a", name]
    assert marked_ones(folder) == {"a"}
    toy = Toy(run, resume=True)
    assert toy.store.restore() == 3
    publish_steps(toy, folder, "d", "e", keep_last=1)
    assert names_in(folder) == ["d", "e"]
    toy.store.close()
    assert_holds_toy(folder / "e", 5)


# ---------------------------------------------------------------------------- the mark


def test_close_waits_for_the_mark_which_commands_know(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, "a")
    toy.store.close()
    assert marked_ones(folder) == {"a"}
    for command in ("verify", "inspect"):
        code, out, _ = call(command, folder / "a")
        assert code == 0
        assert "marked as whole by the run that published it" in out.splitlines()
    report = verify(folder / "a")
    assert report.good
    assert report.marked_whole is summarize(folder / "a").marked_whole is True
    assert report.notes == ()
    (folder / "a" / MARK).unlink()
    report = verify(folder / "a")
    assert report.good
    assert report.marked_whole is summarize(folder / "a").marked_whole is False
    assert "not marked as whole" in call("verify", folder / "a")[1]


def test_a_mark_proves_nothing_to_verify(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    publish_steps(toy, tmp_path, "a")
    toy.store.close()
    flip(pages_of(tmp_path / "a")[0], -1)
    report = verify(tmp_path / "a")
    assert (report.good, report.marked_whole) == (False, True)


def test_a_mark_that_cannot_be_written_leaves_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    with faulty_toy(tmp_path / "run") as (toy, storage):
        publish_steps(toy, folder, "a")
        verified(toy.store)
        storage.arm(Fault("error", "folder_put", name=MARK, probability=1, errno=errno.ENOSPC))
        publish_steps(toy, folder, "b")
        verified(toy.store)
        publish_steps(toy, folder, "c", keep_last=1)
        toy.store.close()
    assert names_in(folder) == ["a", "c"]
    assert "folder/b is whole but cannot be marked" in caplog.text


def moved(path: Path) -> None:
    path.rename(path.with_name("kept"))


def moved_and_linked(path: Path) -> None:
    moved(path)
    path.symlink_to("kept")


@pytest.mark.parametrize("act", [shutil.rmtree, moved, moved_and_linked])
def test_a_checkpoint_that_is_moved_meanwhile_is_not_damage(
    act: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "folder_read" and when == "before" and not acted:
            acted.append(act(folder / "a"))

    acted: list[object] = []
    with faulty_toy(tmp_path / "run", on_operation=watch) as (toy, _):
        with caplog.at_level(logging.WARNING, logger="tierstore"):
            publish_steps(toy, folder, "a")
            verified(toy.store)
        assert "folder/a was moved or removed" in caplog.text
        publish_steps(toy, folder, "b")
        toy.store.close()
    (folder / "a").unlink(missing_ok=True)
    assert marked_ones(folder) == {"b"}


def test_a_removed_directory_of_checkpoints_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "folder_read" and when == "before" and folder.exists():
            shutil.rmtree(folder)

    with faulty_toy(tmp_path / "run", on_operation=watch) as (toy, _):
        publish_steps(toy, folder, "a")
        verified(toy.store)
        toy.step()
        assert not folder.exists()


def test_a_directory_that_cannot_be_opened_leaves_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    with faulty_toy(tmp_path / "run") as (toy, storage):
        storage.arm(Fault("error", "folder", call=2, errno=errno.EMFILE))
        publish_steps(toy, folder, "a", "b")
        toy.store.close()
    assert marked_ones(folder) == {"b"}
    assert "folder/a is not verified" in caplog.text


def test_verification_leaves_no_descriptor_open(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    publish_steps(toy, tmp_path / "folder", "a")
    verified(toy.store)
    before = Held()
    publish_steps(toy, tmp_path / "folder", "b", "c")
    verified(toy.store)
    before.assert_nothing_new()
    toy.store.close()
