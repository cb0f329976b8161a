"""Page files that a failed write-back may have spoiled are made anew before a step writes them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.support import striped_runs
from tests.support.faults import Fault, FaultyStorage
from tests.support.originals import check, committed_pages
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import RANK, Toy, contents, make_run, resumed, train_and_die, verified
from tierstore.ranks.peers import Ranks
from tierstore.storage.select import open_storage

BEFORE = 2  # Steps committed before anything goes wrong.
ERRORS = [("write", "aiofiles"), ("flush", "aiofiles"), ("flush", "auto")]

Held = dict[Path, int]


@contextlib.contextmanager
def held_files(*runs: Path) -> Iterator[Held]:
    """Page file -> descriptor. As long as it is open, no new file gets the same inode."""
    paths = [path for run in runs for path in run.glob("rank-*/page-*.[ab]")]
    held = {path: os.open(path, os.O_RDWR) for path in paths}
    try:
        yield held
    finally:
        for fd in held.values():
            os.close(fd)


def kept(held: Held) -> set[Path]:
    """The page files that are still the same as when they were opened."""
    return {
        path
        for path, fd in held.items()
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino
    }


def committed(run: Path, step: int = BEFORE, ranks: Sequence[str] = (RANK,)) -> set[Path]:
    return {run / name for rank in ranks for name in committed_pages(run, step, rank)}


def step_durably(toy: Toy) -> None:
    toy.step()
    toy.store.synchronize()


def fail_a_step(run: Path, operation: str, engine: str) -> Toy:
    """Commit some steps, and have the disk fail in the next one."""
    storage = FaultyStorage(open_storage(run / RANK, engine))
    toy = Toy(storage)
    for _ in range(BEFORE):
        step_durably(toy)
    storage.arm(Fault("error", operation, call=1, errno=errno.EIO))
    with pytest.raises(tierstore.StorageError):
        step_durably(toy)
    storage.disarm()
    return toy


def leave_unclean(toy: Toy) -> None:
    """Step once more, and end without a commit of that step."""
    toy.step()
    with contextlib.suppress(KeyboardInterrupt), toy.store:
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------- after an error


@pytest.mark.parametrize(("operation", "engine"), ERRORS)
def test_restore_after_an_error_makes_page_files_anew(
    operation: str, engine: str, tmp_path: Path
) -> None:
    toy = fail_a_step(tmp_path, operation, engine)
    with held_files(tmp_path) as held:
        assert toy.store.restore() == BEFORE
        assert kept(held) == committed(tmp_path)
    step_durably(toy)
    toy.assert_at(BEFORE + 1)
    toy.store.close()


@pytest.mark.parametrize(("operation", "engine"), ERRORS)
def test_a_restart_after_an_error_makes_page_files_anew(
    operation: str, engine: str, tmp_path: Path
) -> None:
    fail_a_step(tmp_path, operation, engine).store.close()
    with held_files(tmp_path) as held:
        toy = resumed(tmp_path, BEFORE, engine=engine)
        assert kept(held) == committed(tmp_path)
    toy.store.close()


def lose_power(held: Held) -> None:
    """The content of a range that a disk refused once and never received again: zeros."""
    for fd in held.values():
        os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)


def commit_after_a_failed_flush(
    run: Path, then: Callable[[Toy], object] = lambda toy: None
) -> None:
    """Acknowledge a step after an error, and lose what the kernel keeps for lost from then on."""
    toy = fail_a_step(run, "flush", "aiofiles")
    needed = committed(run)
    with held_files(run) as held:
        toy.store.restore()
        step_durably(toy)
        then(toy)
        toy.store.close()
        lose_power({path: fd for path, fd in held.items() if path not in needed})


def test_a_commit_after_a_failed_flush_survives_a_power_loss(tmp_path: Path) -> None:
    commit_after_a_failed_flush(tmp_path)
    resumed(tmp_path, BEFORE + 1).store.close()


def test_a_checkpoint_after_a_failed_flush_survives_a_power_loss(tmp_path: Path) -> None:
    published = tmp_path / "folder" / "3"
    commit_after_a_failed_flush(
        tmp_path / "run", lambda toy: toy.store.checkpoint(published).wait()
    )
    assert check(published).good


# ------------------------------------------------------------- after an end that was not clean


def test_a_restart_after_a_kill_makes_page_files_anew(tmp_path: Path) -> None:
    make_run(tmp_path, BEFORE)
    train_and_die(tmp_path, ["step"])
    with held_files(tmp_path) as held:
        toy = resumed(tmp_path, BEFORE)
        assert kept(held) == committed(tmp_path)
    step_durably(toy)
    toy.store.close()
    resumed(tmp_path, BEFORE + 1).store.close()


def test_spares_are_made_anew(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    step_durably(toy)
    toy.store.checkpoint(tmp_path / "published").wait()
    spares = sorted((tmp_path / "run" / RANK).glob("*.next"))
    assert spares
    held = {path: os.open(path, os.O_RDONLY) for path in spares}
    leave_unclean(toy)
    resumed(tmp_path / "run", 1).store.close()
    assert kept(held) == set()
    for fd in held.values():
        os.close(fd)
    assert check(tmp_path / "published").good


def test_a_checkpoint_keeps_the_files_that_the_run_replaces(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    step_durably(toy)
    toy.store.checkpoint(tmp_path / "published").wait()
    step_durably(toy)  # The commit names the other slots.
    verified(toy.store)  # Which puts the last file into the checkpoint.
    before = contents(tmp_path / "published")
    leave_unclean(toy)
    toy = resumed(tmp_path / "run", BEFORE)
    step_durably(toy)
    toy.store.close()
    assert contents(tmp_path / "published") == before


def test_files_of_slots_that_this_opening_does_not_use_are_not_kept(tmp_path: Path) -> None:
    """A later opening may write them, after an end that is clean."""
    toy = Toy(tmp_path)
    for _ in range(BEFORE + 1):
        step_durably(toy)  # The commit names slot a.
    leave_unclean(toy)
    with held_files(tmp_path) as held:
        resumed(tmp_path, BEFORE + 1, commit_every=None).store.close()
        toy = resumed(tmp_path, BEFORE + 1, commit_every=1)
        assert kept(held) == committed(tmp_path, BEFORE + 1)
    step_durably(toy)
    toy.store.close()
    resumed(tmp_path, BEFORE + 2).store.close()


def test_the_only_slot_of_a_page_is_kept(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=None)
    step_durably(toy)
    with pytest.raises(KeyboardInterrupt), toy.store:
        raise KeyboardInterrupt
    with held_files(tmp_path) as held:
        toy = resumed(tmp_path, 1, commit_every=None)
        assert kept(held) == set(held) == committed(tmp_path, 1)
    step_durably(toy)
    toy.store.close()
    resumed(tmp_path, 2, commit_every=None).store.close()


def test_the_files_of_a_group_without_a_commit_are_not_kept(tmp_path: Path) -> None:
    make_run(tmp_path, BEFORE)
    added = tmp_path / RANK / "page-000007.a"
    added.write_bytes(bytes(4096))
    mark = tmp_path / RANK / "clean"
    mark.unlink()
    resumed(tmp_path, BEFORE).store.close()
    assert not added.exists()


def test_page_files_of_all_directories_of_a_striped_run_are_made_anew(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    striped_runs.made(directories, BEFORE)
    toy = striped_runs.resumed(directories, BEFORE)
    leave_unclean(toy)
    names = {Path(name).name for name in committed_pages(directories[0], BEFORE)}
    with held_files(*directories) as held:
        toy = striped_runs.resumed(directories, BEFORE)
        assert kept(held) == {path for path in held if path.name in names}
        assert {path.parent.parent for path in held} == set(directories)
    step_durably(toy)
    toy.store.close()
    striped_runs.resumed(directories, BEFORE + 1).store.close()


# ------------------------------------------------------------------------------------ what it costs


@contextlib.contextmanager
def watched(run: Path) -> Iterator[tuple[FaultyStorage, list[tuple[str, str]]]]:
    """A storage, and (operation, file) of all that was done to page files."""
    done: list[tuple[str, str]] = []

    def note(operation: str, name: str, when: str) -> None:
        if when == "after" and name.startswith("page-"):
            done.append((operation, name))

    yield FaultyStorage(open_storage(run / RANK), on_operation=note), done


@pytest.mark.parametrize("commit_every", [1, 2, None])
def test_a_resume_after_a_clean_end_makes_no_file(commit_every: int | None, tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=commit_every)
    for _ in range(BEFORE):
        toy.step()
    toy.store.close()
    with held_files(tmp_path) as held, watched(tmp_path) as (storage, done):
        toy = Toy(storage, resume=True, commit_every=commit_every)
        toy.store.restore()
        toy.store.close()
        assert {operation for operation, _ in done} == {"size", "is_shared", "read"}
        assert kept(held) == set(held)


def test_a_second_restore_makes_files_anew_only_if_pages_were_written(tmp_path: Path) -> None:
    make_run(tmp_path, BEFORE)
    pages = len(committed(tmp_path))
    with watched(tmp_path) as (storage, done):
        toy = Toy(storage, resume=True)

        def files_made() -> int:
            done.clear()
            step = toy.store.committed.step
            assert toy.store.restore() == step
            toy.assert_at(step)
            return sum(operation == "create" for operation, _ in done)

        assert [files_made(), files_made()] == [0, 0]
        toy.step()
        assert [files_made(), files_made()] == [pages, 0]
        step_durably(toy)
        assert [files_made(), files_made()] == [pages, 0]
        toy.store.close()


@pytest.mark.parametrize("again", ["restore", "restart"])
@pytest.mark.parametrize(("operation", "error"), [("create", errno.ENOSPC), ("unlink", errno.EIO)])
def test_an_error_while_files_are_made_anew_loses_nothing(
    operation: str, error: int, again: str, tmp_path: Path
) -> None:
    make_run(tmp_path, BEFORE)
    train_and_die(tmp_path, ["step"])
    storage = FaultyStorage(open_storage(tmp_path / RANK))
    toy = Toy(storage, resume=True)
    needed = {path: path.read_bytes() for path in committed(tmp_path)}
    name = "page-000001.b" if "page-000001.a" in {path.name for path in needed} else "page-000001.a"
    storage.arm(Fault("error", operation, name=name, call=1, errno=error))
    with pytest.raises(tierstore.StorageError, match=name) as caught:
        toy.store.restore()
    assert caught.value.errno == error
    if operation == "create":
        assert "free that much" in "".join(caught.value.__notes__)
        # What was removed for it is free again.
        assert set((tmp_path / RANK).glob("page-*")) == needed.keys()
    assert {path: path.read_bytes() for path in needed} == needed
    storage.disarm()
    if again == "restore":
        assert toy.store.restore() == BEFORE
    else:
        toy.store.close()
        toy = resumed(tmp_path, BEFORE)
    step_durably(toy)
    toy.assert_at(BEFORE + 1)
    toy.store.close()
    resumed(tmp_path, BEFORE + 1).store.close()


# --------------------------------------------------------------------------------- several ranks

WORLD_SIZE = 2
RANKS = ["rank-00000", "rank-00001"]


def in_ranks(run: Path, act: Callable[[Toy, FaultyStorage], Any], **options: Any) -> list[Any]:
    """Open a run on all ranks and act; what each rank returned or raised."""

    def of_rank(ranks: Ranks) -> Any:
        storage = FaultyStorage(open_storage(run / RANKS[ranks.rank]))
        toy = Toy(storage, process_group=ranks, **options)
        try:
            return act(toy, storage)
        except BaseException as error:
            ranks.fail(error)
            raise
        finally:
            toy.store.__exit__(RuntimeError)

    return ThreadJob(WORLD_SIZE).run(of_rank)


def steps(toy: Toy, storage: FaultyStorage) -> None:
    for _ in range(BEFORE):
        step_durably(toy)


def test_all_ranks_make_page_files_anew_after_an_error_of_one(tmp_path: Path) -> None:
    def failing(toy: Toy, storage: FaultyStorage) -> None:
        steps(toy, storage)
        if storage.location.endswith(RANKS[1]):
            storage.arm(Fault("error", "flush", call=1))
        step_durably(toy)

    assert all(isinstance(each, tierstore.TierstoreError) for each in in_ranks(tmp_path, failing))
    with held_files(tmp_path) as held:
        assert {path.parent.name for path in held} == set(RANKS)
        restored = in_ranks(tmp_path, lambda toy, storage: toy.store.restore(), resume=True)
        assert restored == [BEFORE] * WORLD_SIZE
        assert kept(held) == committed(tmp_path, ranks=RANKS)


def test_no_page_file_goes_before_all_ranks_went_back_to_the_commit(tmp_path: Path) -> None:
    def step_on(toy: Toy, storage: FaultyStorage) -> None:
        steps(toy, storage)
        toy.step()

    assert in_ranks(tmp_path, step_on) == [None] * WORLD_SIZE
    done: list[tuple[str, str]] = []

    def restore(ranks: Ranks) -> int:
        storage = FaultyStorage(
            open_storage(tmp_path / RANKS[ranks.rank]),
            on_operation=lambda operation, name, when: done.append((operation, name)),
        )
        toy = Toy(storage, process_group=ranks, resume=True)
        if ranks.rank == 0:
            done.clear()
        ranks.gather(None)
        try:
            return toy.store.restore()
        finally:
            toy.store.__exit__(RuntimeError)

    assert ThreadJob(WORLD_SIZE).run(restore) == [BEFORE] * WORLD_SIZE
    removed = [
        i
        for i, (operation, name) in enumerate(done)
        if (operation, name[:5]) == ("unlink", "page-")
    ]
    synced = [i for i, (operation, _) in enumerate(done) if operation == "sync_directory"]
    assert len(synced) == 2 * WORLD_SIZE  # Before and after each.
    assert max(synced) < min(removed)


def test_ranks_whose_first_commit_is_not_on_all_of_them_make_page_files_anew(
    tmp_path: Path,
) -> None:
    def failing(toy: Toy, storage: FaultyStorage) -> None:
        if storage.location.endswith(RANKS[1]):
            storage.arm(Fault("error", "rename", name="commit-0000000001.tmp", call=1))
        step_durably(toy)

    assert all(isinstance(each, tierstore.TierstoreError) for each in in_ranks(tmp_path, failing))
    with held_files(tmp_path) as held:

        def again(toy: Toy, storage: FaultyStorage) -> int:
            restored = toy.store.restore()
            steps(toy, storage)
            return restored

        assert in_ranks(tmp_path, again, resume=True) == [0] * WORLD_SIZE
        assert held
        assert kept(held) == set()
