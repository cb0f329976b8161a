"""Run directories: which are refused, and how a run begins and resumes in one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.toy import (
    RANK,
    Toy,
    contents,
    make_run,
    open_muon,
    unchanged,
    unchanged_parameters,
)

NOBODY = 65534


# ------------------------------------------------------------------ what may be a run's place


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("within", ["run", "some/where/run"])
def test_new_or_empty_directory(within: str, made: bool, tmp_path: Path) -> None:
    directory = tmp_path / within
    if made:
        directory.mkdir(parents=True)
    with tierstore.TierStore(directory) as store:
        assert store.committed.step == 0
    assert set(contents(directory)) == {RANK, f"{RANK}/run.json"}


def test_the_top_of_a_filesystem_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    make_run(tmp_path)
    assert (tmp_path / "lost+found").is_dir()


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"))
    assert (tmp_path / "run" / RANK / "commit-0000000003").is_file()


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize("stranger", ["model.pt", "rank-0", "rank-00000.bak", ".hidden"])
def test_a_directory_with_other_files_is_refused(
    stranger: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / stranger).write_bytes(b"precious")
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.RunDirectoryError, match=re.escape(stranger)) as caught,
    ):
        tierstore.TierStore(tmp_path, **options)
    assert "empty or a new directory" in str(caught.value)


def test_only_some_of_many_other_files_are_named(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"file-{number}").touch()
    with pytest.raises(tierstore.RunDirectoryError, match=r"\(file-0, file-1, file-2, \.\.\.\)"):
        tierstore.TierStore(tmp_path)


@pytest.mark.parametrize("place", ["run", f"run/{RANK}", "run/above"])
def test_a_file_in_place_of_a_directory_is_refused(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"precious")
    directory = path / "run" if path.name == "above" else tmp_path / "run"
    with unchanged(tmp_path), pytest.raises(tierstore.RunDirectoryError, match="directory"):
        tierstore.TierStore(directory)


def test_a_link_as_rank_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RANK).symlink_to(tmp_path / "elsewhere")
    with unchanged(tmp_path), pytest.raises(tierstore.RunDirectoryError, match="symbolic link"):
        tierstore.TierStore(tmp_path / "run")


def link_as_file(run: Path, name: str) -> Path:
    """Make a file of the run a link to another file, which is returned."""
    victim = run.parent / "victim"
    victim.write_bytes(b"precious")
    (run / RANK).mkdir(parents=True)
    (run / RANK / name).symlink_to(victim)
    return victim


def test_a_link_as_lock_is_not_followed(tmp_path: Path) -> None:
    victim = link_as_file(tmp_path / "run", "lock")
    with pytest.raises(tierstore.StorageError):
        tierstore.TierStore(tmp_path / "run")
    assert victim.read_bytes() == b"precious"


def test_a_link_as_small_file_is_replaced(tmp_path: Path) -> None:
    victim = link_as_file(tmp_path / "run", "run.json.tmp")
    tierstore.TierStore(tmp_path / "run").close()
    assert victim.read_bytes() == b"precious"


def memory_mount() -> Path:
    """Return a mounted tmpfs; every Linux has one in /dev or /run."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        device, mount = fields.split()[2], Path(fields.split()[4])
        if kind.split()[0] == "tmpfs" and mount.is_dir():
            number = mount.stat().st_dev  # Unless something else is mounted over it.
            if device == f"{os.major(number)}:{os.minor(number)}":
                return mount
    raise AssertionError("no tmpfs is mounted: mount one, for example on /dev/shm")


def test_a_run_in_memory_is_refused(tmp_path: Path) -> None:
    directory = memory_mount() / f"run-{tmp_path.name}-{os.getpid()}" / "deeper"
    with pytest.raises(tierstore.RunDirectoryError, match="tmpfs, which is memory"):
        tierstore.TierStore(directory)
    assert not directory.parent.exists()


def foreign_places(tmp_path: Path) -> list[tuple[Path, Path]]:
    """Run directories with a part that belongs to another user."""
    if os.geteuid() != 0:
        return [(Path("/usr"), Path("/usr"))]
    for directory in (tmp_path / "whole", tmp_path / "part" / RANK):
        directory.mkdir(parents=True)
        os.chown(directory, NOBODY, NOBODY)
    return [
        (tmp_path / "whole", tmp_path / "whole"),
        (tmp_path / "part", tmp_path / "part" / RANK),
    ]


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    for directory, foreign in foreign_places(tmp_path):
        owner = foreign.stat().st_uid
        expected = f"{foreign} belongs to user {owner}, this process runs as user {os.geteuid()}"
        before = sorted(directory.iterdir())
        with pytest.raises(tierstore.RunDirectoryError, match=re.escape(expected)):
            tierstore.TierStore(directory)
        assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_other_users_see_nothing(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        toy = Toy(tmp_path / "above" / "run", commit_every=None)
        toy.step()
        toy.store.synchronize()
        toy.step()  # Leaves the mark of a run that keeps one copy.
        modes = {path: path.stat().st_mode & 0o7777 for path in tmp_path.rglob("*")}
        toy.store.close()
    finally:
        os.umask(before)
    names = {path.name for path in modes}
    assert {"dirty", "lock", "run.json", "page-000000.a", "commit-0000000001"} <= names
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_the_mode_of_an_existing_directory_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    directory.chmod(0o755)
    make_run(directory)
    assert directory.stat().st_mode & 0o777 == 0o755


# --------------------------------------------------------------- going on and starting over


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with (
        unchanged(tmp_path),
        pytest.raises(tierstore.RunDirectoryError, match="committed at step 3") as caught,
    ):
        tierstore.TierStore(tmp_path / "run")
    assert "resume=True" in str(caught.value)
    assert "overwrite=True" in str(caught.value)


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    make_run(directory)
    rank = directory / RANK
    identity = (rank / "run.json").read_bytes()
    for name in ("notes.txt", "page-1.a.orig", "commit-", "other.tmp"):
        (rank / name).write_bytes(b"precious")
    (rank / "commit-0000000009.tmp").write_bytes(b"left by a crash")
    tierstore.TierStore(directory, overwrite=True).close()
    names = {path.name for path in rank.iterdir()} - {"lock"}
    assert names == {"run.json", "notes.txt", "page-1.a.orig", "commit-", "other.tmp"}
    assert (rank / "notes.txt").read_bytes() == b"precious"
    assert (rank / "run.json").read_bytes() != identity

    toy = Toy(directory, resume=True)
    assert toy.store.restore() == 0
    toy.step()
    toy.store.close()
    toy = Toy(directory, resume=True)
    assert toy.store.restore() == 1
    toy.store.close()


def test_resume_of_an_empty_directory_is_a_new_run(tmp_path: Path) -> None:
    with unchanged_parameters(Toy(tmp_path / "run", resume=True)) as toy:
        assert toy.store.restore() == 0
        assert toy.store.committed.states == {}
    toy.step()
    assert toy.store.step == 1
    toy.store.close()


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume=True keeps a run and overwrite=True deletes it"):
        tierstore.TierStore(tmp_path / "run", resume=True, overwrite=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda toy: toy.step(),
        lambda toy: toy.store.pages.read_states(),
        lambda toy: toy.store.pages.write_states({}),
        lambda toy: toy.store.commit(),
        lambda toy: toy.store.synchronize(),
    ],
    ids=["step", "read_states", "write_states", "commit", "synchronize"],
)
def test_calls_before_restore_are_refused(call: Any, tmp_path: Path) -> None:
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    with (
        unchanged(tmp_path),
        unchanged_parameters(toy),
        pytest.raises(tierstore.RunDirectoryError, match=r"call restore\(\) before"),
    ):
        call(toy)
    assert toy.store.restore() == 3
    call(toy)
    toy.store.close()


def test_close_before_restore_leaves_the_run_unchanged(tmp_path: Path) -> None:
    make_run(tmp_path)
    with unchanged(tmp_path):
        Toy(tmp_path, resume=True).store.close()


def test_the_run_keeps_its_page_size(tmp_path: Path) -> None:
    store, optimizer, parameters = open_muon(tmp_path)
    training.train(optimizer, parameters, range(1, 4))
    expected, pages = training.snapshot(optimizer, parameters), store.stats().pages
    store.close()
    assert pages > 4

    parameters = training.make_parameters(torch.bfloat16)
    store = tierstore.TierStore(tmp_path, page_bytes="1GiB", resume=True)
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    assert optimizer.restore() == 3
    assert store.stats().pages == pages
    training.assert_identical(training.snapshot(optimizer, parameters), expected)
    store.close()
