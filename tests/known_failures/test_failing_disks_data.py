"""Known failures: acknowledged data that a failing disk or a moved directory takes away.

Each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tierstore
from tests.support.originals import committed_pages, flip
from tests.support.toy import RANK, Toy, contents, make_run, resumed, train_and_die
from tierstore.cli import app
from tierstore.storage.select import open_storage
from tierstore.testing.faults import Fault, FaultyStorage

BEFORE = 2  # Steps committed before anything goes wrong.


def call(*arguments: object) -> tuple[int, str]:
    """Call a command; its exit code, and all that it prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout + result.stderr


def step_durably(toy: Toy) -> None:
    toy.step()
    toy.store.synchronize()


def whole_ones(folder: Path) -> set[str]:
    """The names of the checkpoints in a folder that `tierstore verify` finds whole."""
    return {path.name for path in folder.iterdir() if call("verify", path)[0] == 0}


# -------------------------------------------------------------------- failed write-back


@contextlib.contextmanager
def held_files(run: Path) -> Iterator[dict[str, int]]:
    """Page file -> descriptor. As long as it is open, no new file gets the same inode."""
    held = {path.name: os.open(path, os.O_RDWR) for path in (run / RANK).glob("page-*.[ab]")}
    try:
        yield held
    finally:
        for fd in held.values():
            os.close(fd)


def kept_inodes(run: Path, held: dict[str, int], step: int) -> list[str]:
    """The page files that are the same as when they were opened, but for those committed."""
    committed = {Path(name).name for name in committed_pages(run, step)}
    return [
        name
        for name, fd in sorted(held.items())
        if name not in committed and (run / RANK / name).stat().st_ino == os.fstat(fd).st_ino
    ]


def fail_a_step(run: Path, operation: str, engine: str) -> Toy:
    """Commit some steps, and have the disk fail in the next one."""
    storage = FaultyStorage(open_storage(run / RANK, engine))
    toy = Toy(storage)
    for _ in range(BEFORE):
        step_durably(toy)
    storage.arm(Fault("error", operation, call=1, errno=errno.EIO))  # type: ignore[arg-type]
    with pytest.raises(tierstore.StorageError):
        step_durably(toy)
    storage.disarm()
    return toy


ERRORS = [("write", "aiofiles"), ("flush", "aiofiles"), ("flush", "auto")]


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="restore() keeps page files that the kernel may show with data that is on no disk",
)
@pytest.mark.parametrize(("operation", "engine"), ERRORS)
def test_restore_after_an_error_makes_page_files_anew(
    operation: str, engine: str, tmp_path: Path
) -> None:
    toy = fail_a_step(tmp_path, operation, engine)
    with held_files(tmp_path) as held:
        restored = toy.store.restore()
        kept = kept_inodes(tmp_path, held, BEFORE)
        toy.store.close()
    assert restored == BEFORE
    assert kept == []


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a restart keeps page files that the kernel may show with data that is on no disk",
)
@pytest.mark.parametrize(("operation", "engine"), ERRORS)
def test_a_restart_after_an_error_makes_page_files_anew(
    operation: str, engine: str, tmp_path: Path
) -> None:
    toy = fail_a_step(tmp_path, operation, engine)
    toy.store.close()
    with held_files(tmp_path) as held:
        toy = resumed(tmp_path, BEFORE, engine=engine)
        kept = kept_inodes(tmp_path, held, BEFORE)
        toy.store.close()
    assert kept == []


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a restart keeps page files though no clean end of the process before is recorded",
)
def test_a_restart_after_a_kill_makes_page_files_anew(tmp_path: Path) -> None:
    make_run(tmp_path, BEFORE)
    train_and_die(tmp_path, ["step"])
    with held_files(tmp_path) as held:
        toy = resumed(tmp_path, BEFORE)
        kept = kept_inodes(tmp_path, held, BEFORE)
        toy.store.close()
    assert kept == []


def lose_power(held: dict[str, int]) -> None:
    """The content of a range that a disk refused once and never received again: zeros."""
    for fd in held.values():
        os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)


def commit_after_a_failed_flush(
    run: Path, then: Callable[[Toy], object] = lambda toy: None
) -> None:
    """Acknowledge a step after an error, and lose what the kernel keeps for lost from then on."""
    toy = fail_a_step(run, "flush", "aiofiles")
    committed = {Path(name).name for name in committed_pages(run, BEFORE)}
    with held_files(run) as held:
        toy.store.restore()
        step_durably(toy)
        then(toy)
        toy.store.close()
        lose_power({name: fd for name, fd in held.items() if name not in committed})


@pytest.mark.xfail(
    strict=True,
    raises=tierstore.CorruptionError,
    reason="a step is committed into files whose data no flush brings to the disk any more",
)
def test_a_commit_after_a_failed_flush_survives_a_power_loss(tmp_path: Path) -> None:
    commit_after_a_failed_flush(tmp_path)
    resumed(tmp_path, BEFORE + 1).store.close()


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a checkpoint links files whose data no flush brings to the disk any more",
)
def test_a_checkpoint_after_a_failed_flush_survives_a_power_loss(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    commit_after_a_failed_flush(
        tmp_path / "run", lambda toy: toy.store.checkpoint(folder / "3").wait()
    )
    assert whole_ones(folder) == {"3"}


# ---------------------------------------------------- the last whole checkpoint is removed


def damage_first_page(run: Path, step: int) -> None:
    """Flip a bit of the page that a step committed, in a section that restore() does not read."""
    flip(run / committed_pages(run, step)[0], -1)


def publish(toy: Toy, path: Path, keep_last: int | None = None) -> None:
    toy.store.checkpoint(path, keep_last=keep_last).wait()


def rot_without_gradients(toy: Toy, folder: Path) -> None:
    """The page is linked as it is into one checkpoint after the other."""
    damage_first_page(folder.parent / "run", BEFORE)
    for name in ("b", "c", "d"):
        toy.step(names=["third"])
        publish(toy, folder / name, keep_last=1)


def rot_since_the_last_step(toy: Toy, folder: Path) -> None:
    """The page was written and never read."""
    damage_first_page(folder.parent / "run", BEFORE)
    publish(toy, folder / "b", keep_last=1)


def rot_before_a_resume(toy: Toy, folder: Path) -> None:
    """restore() reads masters only."""
    run = folder.parent / "run"
    toy.store.close()
    damage_first_page(run, BEFORE)
    again = Toy(run, resume=True)
    with contextlib.closing(again.store):
        again.store.restore()
        publish(again, folder / "b", keep_last=1)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="keep_last removes the last whole checkpoint and keeps a damaged one",
)
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
    with contextlib.suppress(tierstore.TierstoreError):  # It may well say what it found.
        rot(toy, folder)
    with contextlib.suppress(tierstore.TierstoreError):
        toy.store.close()
    assert whole_ones(folder)


@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="no step and no commit tells of a damaged page that is only ever linked",
)
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


# ------------------------------------------------------ the directory moved while training


@contextlib.contextmanager
def exchanged(tmp_path: Path, part: str, engine: str = "auto") -> Iterator[Toy]:
    """A run in training, and another one put in its place; the first is in "moved" then.

    Its pages rest in memory, so that nothing of the other run is read.
    """
    toy = Toy(tmp_path / "run", buffers=None, engine=engine)
    for _ in range(BEFORE):
        toy.step()
    toy.store.synchronize()
    make_run(tmp_path / "other", 5)
    if part == RANK:
        (tmp_path / "moved").mkdir()
    os.rename(tmp_path / "run" / part, tmp_path / "moved" / part)
    os.rename(tmp_path / "other" / part, tmp_path / "run" / part)
    try:
        yield toy
    finally:
        with contextlib.suppress(tierstore.TierstoreError):
            toy.store.close()


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a store opens files by path and writes into the run that took the place of its own",
)
@pytest.mark.parametrize(("part", "engine"), [("", "auto"), ("", "aiofiles"), (RANK, "auto")])
def test_a_run_in_the_place_of_another_is_not_touched(
    part: str, engine: str, tmp_path: Path
) -> None:
    with exchanged(tmp_path, part, engine) as toy:
        before = contents(tmp_path / "run")
        with contextlib.suppress(tierstore.TierstoreError):
            step_durably(toy)
    assert contents(tmp_path / "run") == before


@pytest.mark.xfail(
    strict=True,
    raises=pytest.fail.Exception,
    reason="a commit succeeds though the directory of the run was exchanged",
)
@pytest.mark.parametrize("part", ["", RANK])
def test_a_commit_where_another_run_took_the_place_is_refused(part: str, tmp_path: Path) -> None:
    with exchanged(tmp_path, part) as toy:
        with pytest.raises(tierstore.TierstoreError, match=re.escape(str(tmp_path / "run"))):
            step_durably(toy)
        with pytest.raises(tierstore.StoreFailedError):
            toy.step()


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a step is acknowledged that is not in the run that was moved",
)
def test_an_acknowledged_step_is_in_the_run_that_was_moved(tmp_path: Path) -> None:
    acknowledged = BEFORE
    with exchanged(tmp_path, "") as toy, contextlib.suppress(tierstore.TierstoreError):
        step_durably(toy)
        acknowledged = toy.store.step
    toy = Toy(tmp_path / "moved", resume=True)
    found = toy.store.restore()
    toy.store.close()
    assert found >= acknowledged
