"""A run in several directories: the same run, and each of them told from any other."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import muon
import tierstore
from tests.support import training
from tests.support.held import Held
from tests.support.originals import flip
from tests.support.published import names_in
from tests.support.striped_runs import MODEL, PAGES, known_bandwidths, made, numbers, resumed, toy
from tests.support.toy import RANK, Toy, make_run, unchanged
from tierstore.run.striped_storage import StripedStorage
from tierstore.storage.select import open_storage
from tierstore.tools.inspect.verify import verify

DISKS = ("disk0", "disk1", "disk2")


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [tmp_path / disk / "run" for disk in DISKS[:2]]


def refused(directories: Sequence[Path] | Path, expected: str, **options: Any) -> None:
    with pytest.raises(tierstore.RunDirectoryError, match=expected):
        toy(directories, **{"resume": True, **options})


# ----------------------------------------------------------------------------- one run


def test_pages_are_dealt_and_the_rest_is_in_the_first(two: list[Path]) -> None:
    made(two)
    assert numbers(two[0]) == [0, 2, 3, 5, 6]
    assert numbers(two[1]) == [1, 4, 7]
    others = {path.name for path in (two[1] / RANK).iterdir()}
    assert {name for name in others if not name.startswith("page-")} == {"striping.json", "lock"}
    assert {"run.json", "commit-0000000003"} <= {path.name for path in (two[0] / RANK).iterdir()}
    resumed(two).store.close()


@pytest.mark.parametrize("directories", [2, 3])
def test_training_is_bit_for_bit_that_in_memory(directories: int, tmp_path: Path) -> None:
    places = [tmp_path / disk for disk in DISKS[:directories]]
    for steps in (range(1, 4), range(4, 7)):
        parameters = training.make_parameters()
        with known_bandwidths():
            store = tierstore.TierStore(places, page_bytes=10000, resume=True)
        with store:
            optimizer = muon.Muon(training.make_groups(parameters), store=store)
            scheduler = training.make_scheduler(optimizer)
            store.register(scheduler=scheduler)
            optimizer.restore()
            training.train(
                optimizer,
                parameters,
                steps,
                scheduler=scheduler,
                after_step=lambda step, store=store: store.commit(),
            )
            found = training.snapshot(optimizer, parameters)
    training.assert_identical(found, training.resident_run(6, page_bytes=10000))
    assert all(numbers(place) for place in places)


def test_one_copy_of_each_page(two: list[Path]) -> None:
    made(two, commit_every=None)
    assert not list(two[1].glob("*/page-*.b"))
    run = toy(two, commit_every=None, resume=True)
    assert run.store.restore() == 3
    run.store.close()


def test_what_is_measured_is_stored_and_used_again(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(two)
    body = json.loads((two[1] / RANK / "striping.json").read_bytes().partition(b"\n")[2])
    assert body["weights"] == [2000, 1000]
    assert body["directories"] == [str(place / RANK) for place in two]

    def never(*_: object, **__: object) -> list[float]:
        raise AssertionError("measured again")

    monkeypatch.setattr(tierstore.run.directories, "measured_bandwidths", never)
    Toy(two, MODEL, resume=True).store.close()


def test_really_measured(two: list[Path]) -> None:
    run = Toy(two, MODEL, page_bytes=8192)
    for _ in range(3):
        run.step()
    run.store.close()
    weights = json.loads((two[0] / RANK / "striping.json").read_bytes().partition(b"\n")[2])
    assert min(weights["weights"]) > 0
    assert not [name for place in two for name in names_in(place / RANK) if "probe" in name]
    resumed(two).store.close()


def test_one_device_is_noted(two: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        made(two)
    assert f"{two[0] / RANK} and {two[1] / RANK} are on one device" in caplog.text
    assert f"{two[0] / RANK}: gets 67% of the pages, at 2000 MB/s" in caplog.text


def test_a_list_of_one_is_that_directory(tmp_path: Path) -> None:
    made([tmp_path / "run"])
    assert not (tmp_path / "run" / RANK / "striping.json").exists()
    resumed(tmp_path / "run").store.close()


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError, match="one directory or more"):
        toy([])


def test_every_directory_has_its_own_engine(tmp_path: Path) -> None:
    directories = [(tmp_path / "one" / RANK, "auto"), (tmp_path / "two" / RANK, "aiofiles")]
    parts = [open_storage(directory, engine) for directory, engine in directories]
    engines = list(dict.fromkeys(part.engine for part in parts))
    run = toy(StripedStorage(parts, lambda parts: [1e9, 1e9]))
    assert run.store.stats().engine == ", ".join(engines)
    run.step()
    run.store.close()
    resumed([tmp_path / "one", tmp_path / "two"], 1).store.close()


# ----------------------------------------------------------- which directories belong


def test_any_order(tmp_path: Path) -> None:
    run = [tmp_path / disk for disk in DISKS]
    made(run)
    for order in ((2, 1, 0), (1, 2, 0)):
        with unchanged(tmp_path):
            resumed([run[index] for index in order]).store.close()


def test_moved_directories_are_found_once_they_were_named(two: list[Path], tmp_path: Path) -> None:
    made(two)
    moved = [tmp_path / "new0", tmp_path / "new1"]
    for old, new in zip(two, moved, strict=True):
        old.rename(new)
    refused(moved[0], f"name {two[0]} and|name {two[1]} too")
    assert not verify(moved[0]).good
    resumed(moved).store.close()
    assert verify(moved[0]).good


def test_some_of_the_directories(two: list[Path]) -> None:
    made(two)
    with unchanged(two[0]), unchanged(two[1]):
        refused(two[0], f"^{two[0]} is of the run .* {two[0]} and {two[1]}: name {two[1]} too")
        refused(two[1], f"name {two[0]} too")
        refused([two[1]], f"name {two[0]} too", resume=False)


def test_a_missing_directory_is_named_and_not_made(two: list[Path]) -> None:
    made(two)
    kept = two[1].rename(two[1].parent / "kept")
    for resume in (True, False):
        with unchanged(two[0]):
            refused(two, f"^{two[1] / RANK} is missing", resume=resume)
    assert not two[1].exists()
    two[1].mkdir()
    refused(two, f"^{two[1] / RANK} is missing")
    two[1].rmdir()
    kept.rename(two[1])
    resumed(two).store.close()


def test_an_empty_directory_in_place_of_one(two: list[Path]) -> None:
    """As where a disk is not mounted, or was replaced."""
    made(two)
    shutil.rmtree(two[1] / RANK)
    (two[1] / RANK).mkdir()
    refused(two, f"^{two[1]} holds nothing of the run that is striped over .*not mounted")


def test_directories_of_two_runs(two: list[Path], tmp_path: Path) -> None:
    made(two)
    others = made([tmp_path / "other0", tmp_path / "other1"])
    with unchanged(tmp_path):
        refused(
            [two[0], others[1]], f"^{others[1]} is not of the run that is striped over {two[0]}"
        )
        refused([two[0], others[0]], f"^{others[0]} is not of the run")
        refused([*two, others[1]], f"^{others[1]} is not of the run")


def test_a_directory_too_many(two: list[Path], tmp_path: Path) -> None:
    made(two)
    refused([*two, tmp_path / "new"], f"^{tmp_path / 'new' / RANK} is missing")
    (tmp_path / "new" / RANK).mkdir(parents=True)
    refused([*two, tmp_path / "new"], f"^{tmp_path / 'new'} holds nothing of the run")
    refused([tmp_path / "new", two[1]], f"^{tmp_path / 'new'} holds nothing of the run")


def test_a_copy_beside_its_original(two: list[Path], tmp_path: Path) -> None:
    made(two)
    copy = shutil.copytree(two[1], tmp_path / "copy")
    with unchanged(tmp_path):
        refused([*two, copy], f"^{two[1]} and {copy} are both number 2 of the run")
    resumed([two[0], copy]).store.close()  # In its place it is as good.


@pytest.mark.quick(4)
@pytest.mark.parametrize("commit_every", [1, None])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("older", [0, 1, 2])
def test_an_older_copy_is_found_out_by_checksums(
    older: int, steps: int, commit_every: int | None, tmp_path: Path
) -> None:
    newer = [tmp_path / disk for disk in DISKS]
    made(newer, commit_every=commit_every)
    copy = shutil.copytree(newer[older], tmp_path / "copy")
    run = toy(newer, commit_every=commit_every, resume=True)
    run.store.restore()
    for _ in range(steps):
        run.step()
    run.store.close()
    before = pages_in(newer)
    mixed = [*newer[:older], copy, *newer[older + 1 :]]
    run = toy(mixed, commit_every=commit_every, resume=True)
    is_whole = (older, steps, commit_every) == (0, 1, 1)
    if is_whole:
        assert run.store.restore() == 3  # The others have the pages of this commit still.
        run.assert_at(3)
    else:
        wrong = [copy] if older else newer[1:]
        expected = "|".join(rf"{place}/{RANK}/page-" for place in wrong)
        with pytest.raises(tierstore.CorruptionError, match=f"^({expected}).* not those written"):
            run.store.restore()
        with pytest.raises(tierstore.RunDirectoryError, match="call restore"):
            run.step()  # Nothing goes on from there.
    run.store.__exit__(RuntimeError)
    assert verify(mixed[0]).good == is_whole
    assert pages_in(newer) == before
    resumed(newer, 3 + steps).store.close()


def pages_in(directories: Sequence[Path]) -> dict[Path, bytes]:
    return {
        page: page.read_bytes() for place in directories for page in place.glob("*/page-*.[ab]")
    }


@pytest.mark.parametrize("twin", ["same", "relative", "link", "link above"])
def test_a_directory_twice(twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "disk" / "run"
    place.mkdir(parents=True)
    (tmp_path / "link").symlink_to(place)
    (tmp_path / "link above").symlink_to(place.parent)
    other = {"same": place, "relative": Path("disk/run"), "link above": Path("link above/run")}
    refused([place, other.get(twin, tmp_path / twin)], "are the same directory")


def test_a_run_of_one_directory_is_not_spread(two: list[Path], tmp_path: Path) -> None:
    make_run(two[0])
    for resume in (True, False):
        with unchanged(two[0]):
            refused(two, f"^{two[0]} holds a run that is not striped", resume=resume)
    others = made([tmp_path / "other0", tmp_path / "other1"])
    refused([others[0], two[0]], f"^{two[0]} is not of the run")


def test_a_new_run_over_another_is_refused(two: list[Path], tmp_path: Path) -> None:
    make_run(two[1])
    with unchanged(two[1]):
        refused(two, f"^{two[1]} holds a run", resume=False)
    others = made([tmp_path / "other0", tmp_path / "other1"])
    with unchanged(tmp_path):
        refused([tmp_path / "new", others[1]], rf"^{tmp_path}/new/{RANK} is missing", resume=False)
        refused(others, "holds a run committed at step 3", resume=False)


def test_resume_of_a_run_that_committed_nothing(two: list[Path]) -> None:
    toy(two).store.__exit__(RuntimeError)
    run = toy(two[::-1], resume=True)
    assert run.store.restore() == 0
    run.step()
    run.store.close()
    resumed(two, 1).store.close()


def test_overwrite_removes_the_run_in_all_directories(two: list[Path], tmp_path: Path) -> None:
    made(two)
    before = [(place / RANK / "striping.json").read_bytes() for place in two]
    (two[1] / RANK / "notes.txt").write_text("precious")
    made(two[::-1], steps=1, overwrite=True)
    assert numbers(two[0]) == [1, 4, 7]
    assert numbers(two[1]) == [0, 2, 3, 5, 6]
    assert not {(place / RANK / "striping.json").read_bytes() for place in two} & set(before)
    assert (two[1] / RANK / "notes.txt").read_text() == "precious"
    resumed(two, 1).store.close()


def test_overwrite_of_one_directory_alone(two: list[Path]) -> None:
    made(two)
    made([two[0]], steps=1, overwrite=True)
    assert numbers(two[0]) == list(range(PAGES))
    assert "striping.json" not in names_in(two[0] / RANK)
    resumed(two[0], 1).store.close()
    refused(two, f"^{two[0]} is not of the run that is striped over")
    made(two, overwrite=True)
    resumed(two).store.close()


def test_overwrite_of_what_is_damaged_or_anybodys(two: list[Path], tmp_path: Path) -> None:
    made(two)
    make_run(tmp_path / "plain")
    flip(two[1] / RANK / "striping.json", 60)
    with pytest.raises(tierstore.CorruptionError, match=f"{two[1]}/{RANK}/striping.json"):
        toy(two, resume=True)
    directories = [tmp_path / "plain", two[1]]
    made(directories, steps=2, overwrite=True)
    resumed(directories, 2).store.close()


def test_a_file_that_says_nothing_more(two: list[Path]) -> None:
    made(two)
    (two[0] / RANK / "striping.json").unlink()
    refused(two, f"^{two[0]} is not of the run that is striped over")


@pytest.mark.parametrize("shared", [0, 1])
def test_a_directory_in_use(
    shared: int, two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tierstore.run.opening, "LOCK_TIMEOUT_S", 0.1)
    first = toy(two)
    others = [tmp_path / "new", two[shared]]
    (tmp_path / "new" / RANK).mkdir(parents=True)
    for directories in (others, others[1:], two):
        with pytest.raises(tierstore.RunLockedError, match=f"{two[0]}|{two[shared]}"):
            toy(directories, overwrite=True)
    first.step()
    first.store.close()
    resumed(two, 1).store.close()


# ----------------------------------------------------------------- disks that refuse


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("refusing", [0, 1])
def test_full_or_read_only_is_told_by_name(
    refusing: int, error: int, two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def refuse(fd: int, *range_: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(two[refusing])):
            raise OSError(error, os.strerror(error))
        allocate(fd, *range_)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = Held()
    expected = f"^{two[refusing]}.*{os.strerror(error)}"
    with pytest.raises(tierstore.RunDirectoryError, match=expected):
        toy(two)
    before.assert_nothing_new()
    monkeypatch.undo()
    toy(two).store.close()


def test_a_file_in_place_of_a_directory_is_named(two: list[Path]) -> None:
    two[1].parent.mkdir()
    two[1].write_bytes(b"precious")
    refused(two, f"^{two[1]} is not a directory", resume=False)
    assert two[1].read_bytes() == b"precious"


def test_no_directory_may_be_in_memory(tmp_path: Path) -> None:
    from tests.run.test_recovery import memory_mount

    place = memory_mount() / f"run-{tmp_path.name}-{os.getpid()}"
    refused([tmp_path / "run", place], f"^{place} is on tmpfs", resume=False)


def test_full_when_pages_are_allocated(two: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing, in all of the directories."""
    run = toy(two)
    allocate = os.posix_fallocate

    def refuse(fd: int, *range_: int) -> None:
        if "page-000004.b" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, *range_)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    run.store.__exit__(RuntimeError)
    with pytest.raises(tierstore.StorageError) as caught:
        toy(two)
    assert caught.value.path == str(two[1] / RANK / "page-000004.b")
    assert [numbers(place) for place in two] == [[], []]


def test_a_page_that_changed_is_named_with_its_disk(two: list[Path]) -> None:
    made(two)
    for page in (two[1] / RANK).glob("page-000004.?"):
        flip(page, 600)
    run = toy(two, resume=True)
    with pytest.raises(tierstore.CorruptionError, match=rf"^{two[1] / RANK}/page-000004\.[ab]: "):
        run.store.restore()
    run.store.close()


# ----------------------------------------------------------------- ranks that begin together


def test_another_rank_may_begin_while_the_directory_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.iterdir

    def listed_as_another_begins(self: Path) -> Any:
        names = list(listed(self))
        if self == tmp_path:
            (tmp_path / "rank-00001").mkdir(exist_ok=True)
        return iter(names)

    monkeypatch.setattr(Path, "iterdir", listed_as_another_begins)
    with tierstore.TierStore(tmp_path):
        pass
