"""A run directory that is moved, replaced or removed while a store uses it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierstore
from tests.support.kept import commit_with
from tests.support.striped_runs import PAGES, numbers
from tests.support.striped_runs import resumed as resumed_striped
from tests.support.striped_runs import toy as striped_toy
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import MODEL, RANK, Toy, contents, make_run, resumed
from tierstore.errors import PeerFailed, RunDirectoryError
from tierstore.ranks.peers import Ranks
from tierstore.storage.select import open_storage

BEFORE = 2  # Steps committed before anything goes wrong.
ENGINES = ["io_uring", "libaio", "aiofiles"]


def step_durably(toy: Toy) -> None:
    toy.step()
    toy.store.synchronize()


def trained(directory: Path, engine: str = "auto") -> Toy:
    """A run in training. Its pages rest in memory, so that nothing of another run is read."""
    try:
        toy = Toy(directory, buffers=None, engine=engine)
    except RunDirectoryError as error:
        pytest.skip(str(error))
    for _ in range(BEFORE):
        toy.step()
    toy.store.synchronize()
    return toy


def closed(toy: Toy) -> None:
    with contextlib.suppress(tierstore.TierstoreError):
        toy.store.close()


@contextlib.contextmanager
def exchanged(tmp_path: Path, part: str, engine: str = "auto") -> Iterator[Toy]:
    """A run in training, and another one put in its place; the first is in "moved" then."""
    toy = trained(tmp_path / "run", engine)
    make_run(tmp_path / "other", 5)
    if part == RANK:
        (tmp_path / "moved").mkdir()
    os.rename(tmp_path / "run" / part, tmp_path / "moved" / part)
    os.rename(tmp_path / "other" / part, tmp_path / "run" / part)
    try:
        yield toy
    finally:
        closed(toy)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", ["", RANK])
def test_a_run_in_the_place_of_another_is_not_touched(
    part: str, engine: str, tmp_path: Path
) -> None:
    with exchanged(tmp_path, part, engine) as toy:
        before = contents(tmp_path / "run")
        with contextlib.suppress(tierstore.TierstoreError):
            step_durably(toy)
    assert contents(tmp_path / "run") == before
    resumed(tmp_path / "run", 5).store.close()
    resumed(tmp_path / "moved", BEFORE).store.close()


@pytest.mark.parametrize("part", ["", RANK])
def test_a_commit_where_another_run_took_the_place_is_refused(part: str, tmp_path: Path) -> None:
    with exchanged(tmp_path, part) as toy:
        with pytest.raises(tierstore.TierstoreError, match=re.escape(str(tmp_path / "run"))):
            step_durably(toy)
        with pytest.raises(tierstore.StoreFailedError):
            toy.step()


def test_the_error_says_where_the_steps_are(tmp_path: Path) -> None:
    with exchanged(tmp_path, "") as toy, pytest.raises(RunDirectoryError) as caught:
        step_durably(toy)
    for path in (tmp_path / "run" / RANK, tmp_path / "moved" / RANK):
        assert str(path) in str(caught.value)


def test_an_acknowledged_step_is_in_the_run_that_was_moved(tmp_path: Path) -> None:
    acknowledged = BEFORE
    with exchanged(tmp_path, "") as toy, contextlib.suppress(tierstore.TierstoreError):
        step_durably(toy)
        acknowledged = toy.store.step
    toy = Toy(tmp_path / "moved", resume=True)
    found = toy.store.restore()
    toy.store.close()
    assert found >= acknowledged


@pytest.mark.parametrize("moved", ["run", ""])
def test_a_directory_that_is_back_in_time_is_as_if_nothing_was(moved: str, tmp_path: Path) -> None:
    toy = trained(tmp_path / "above/run")
    (tmp_path / "above" / moved).rename(tmp_path / "moved")
    toy.step()
    (tmp_path / "moved").rename(tmp_path / "above" / moved)
    toy.store.synchronize()
    toy.store.close()
    resumed(tmp_path / "above/run", BEFORE + 1).store.close()


@pytest.mark.parametrize("moved", ["run", ""])
def test_a_store_goes_on_after_the_directory_is_back(moved: str, tmp_path: Path) -> None:
    toy = trained(tmp_path / "above/run")
    (tmp_path / "above" / moved).rename(tmp_path / "moved")
    with pytest.raises(RunDirectoryError, match="nothing is there now"):
        step_durably(toy)
    (tmp_path / "moved").rename(tmp_path / "above" / moved)
    assert toy.store.restore() == BEFORE
    step_durably(toy)
    toy.assert_at(BEFORE + 1)
    toy.store.close()
    resumed(tmp_path / "above/run", BEFORE + 1).store.close()


def test_a_store_that_changes_nothing_closes_where_its_directory_is(tmp_path: Path) -> None:
    toy = trained(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    toy.store.close()
    assert not (tmp_path / "run").exists()
    resumed(tmp_path / "moved", BEFORE).store.close()


@pytest.mark.parametrize("buffers", [None, 3])
def test_a_removed_directory_is_an_error_that_names_it(buffers: int | None, tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run", buffers=buffers)
    step_durably(toy)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(tierstore.TierstoreError, match=re.escape(str(tmp_path / "run" / RANK))):
        step_durably(toy)
    closed(toy)
    assert not (tmp_path / "run").exists()


def test_the_steps_of_a_removed_directory_are_gone(tmp_path: Path) -> None:
    toy = trained(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    commit_with(toy.store, 1)
    with pytest.raises(RunDirectoryError, match="It was removed together with its steps") as caught:
        toy.store.synchronize()
    assert "move the directory back" not in str(caught.value)
    closed(toy)


def test_a_copy_of_the_run_in_its_place_is_noticed(tmp_path: Path) -> None:
    toy = trained(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "run")
    step_durably(toy)  # The copy has the newest commit until this one.
    with pytest.raises(RunDirectoryError, match=re.escape(str(tmp_path / "moved" / RANK))):
        step_durably(toy)
    closed(toy)
    resumed(tmp_path / "run", BEFORE).store.close()
    resumed(tmp_path / "moved", BEFORE + 1).store.close()


def test_the_directory_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    toy = trained(tmp_path / "run")
    (tmp_path / "disk").rename(tmp_path / "other disk")  # It is the same directory.
    (tmp_path / "run").unlink()
    (tmp_path / "run").symlink_to("other disk")
    step_durably(toy)
    make_run(tmp_path / "another", 5)
    before = contents(tmp_path / "another")
    (tmp_path / "run").unlink()
    (tmp_path / "run").symlink_to("another")
    with pytest.raises(RunDirectoryError, match="another directory is there now"):
        step_durably(toy)
    closed(toy)
    assert contents(tmp_path / "another") == before
    resumed(tmp_path / "other disk", BEFORE + 1).store.close()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("part", ["", RANK])
def test_one_of_several_directories_is_replaced(part: str, index: int, tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "two")]
    others = [tmp_path / f"other {name}" for name in ("one", "two")]
    toys = []
    for run in (directories, others):
        toy = striped_toy(run, buffers=None)
        step_durably(toy)
        toys.append(toy)
    toys.pop().store.close()
    moved, place = tmp_path / "moved", directories[index] / part
    place.rename(moved)
    (others[index] / part).rename(place)
    before = contents(place)
    with pytest.raises(RunDirectoryError, match=re.escape(str(directories[index] / RANK))):
        step_durably(toys[0])
    closed(toys[0])
    assert contents(place) == before
    place.rename(others[index] / part)
    moved.rename(place)
    assert sorted(n for directory in directories for n in numbers(directory)) == list(range(PAGES))
    resumed_striped(directories, 1).store.close()
    resumed_striped(others, 1).store.close()


def test_the_directory_of_one_of_two_ranks_is_replaced(tmp_path: Path) -> None:
    """No rank takes the step for committed, and a restart finds the one before on both."""
    run = tmp_path / "run"

    def toy_of(ranks: Ranks, **options: bool) -> Toy:
        storage = open_storage(run / f"rank-{ranks.rank:05}")
        return Toy(storage, buffers=None, process_group=ranks, **options)

    def train(ranks: Ranks) -> tuple[type[Exception], int]:
        toy = toy_of(ranks)
        step_durably(toy)
        if ranks.rank == 1:
            (run / "rank-00001").rename(tmp_path / "moved")
            make_run(run / "other")
            (run / "other" / RANK).rename(run / "rank-00001")
        with pytest.raises(tierstore.TierstoreError) as caught:
            step_durably(toy)
        closed(toy)
        return caught.type, toy.store.committed.step

    assert ThreadJob(2).run(train) == [(PeerFailed, 1), (RunDirectoryError, 1)]
    (run / "rank-00001").rename(tmp_path / "other")
    (tmp_path / "moved").rename(run / "rank-00001")

    def resume(ranks: Ranks) -> int:
        toy = toy_of(ranks, resume=True)
        found = toy.store.restore()
        toy.store.close()
        return found

    assert ThreadJob(2).run(resume) == [1, 1]


@pytest.mark.parametrize("commit_every", [2, None])
def test_steps_between_commits_stay_in_the_directory_that_was_moved(
    commit_every: int | None, tmp_path: Path
) -> None:
    toy = Toy(tmp_path / "run", MODEL, commit_every=commit_every)
    step_durably(toy)
    make_run(tmp_path / "other", 5)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "other").rename(tmp_path / "run")
    before = contents(tmp_path / "run")
    toy.step()
    toy.step()
    with pytest.raises(RunDirectoryError):
        toy.store.synchronize()
    closed(toy)
    assert contents(tmp_path / "run") == before
