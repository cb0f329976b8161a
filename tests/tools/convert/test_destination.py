"""A conversion loses nothing that it finds at its destination, before or meanwhile."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tests.support.published import tensors_in
from tierstore.tools.convert import destination as destination_module
from tierstore.tools.convert.convert import convert


def at_verified(act: Callable[[], object]) -> Callable[[str, int, int], None]:
    """Return a callback that acts once when the destination is being verified."""
    acts = [act]

    def on_progress(phase: str, done: int, total: int) -> None:
        if phase == "verify" and acts:
            acts.pop()()

    return on_progress


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_meanwhile_is_kept(force: bool, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")

    with pytest.raises(tierstore.CheckpointError, match="was made or changed by another process"):
        convert(plain, out, to="dcp", force=force, on_progress=at_verified(appear))
    assert (out / "thesis.txt").read_text() == "years of work"
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]


def test_what_replaces_the_old_checkpoint_meanwhile_is_kept(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(plain, out, to="dcp")

    def replace() -> None:
        shutil.rmtree(out)
        shutil.copytree(plain, out)

    before = (plain / ".metadata").read_bytes()
    with pytest.raises(tierstore.CheckpointError, match="was made or changed by another process"):
        convert(plain, out, to="dcp", force=True, on_progress=at_verified(replace))
    assert (out / ".metadata").read_bytes() == before

    def add() -> None:
        (out / "thesis.txt").write_text("years of work")

    with pytest.raises(tierstore.CheckpointError, match=r"holds 'thesis\.txt'"):
        convert(plain, out, to="dcp", force=True, on_progress=at_verified(add))
    assert (out / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_of_two_conversions_at_once_the_first_wins(to: str, plain: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out.pt", tmp_path / "other"
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(tierstore.CheckpointError, match="was made or changed by another process"):
        convert(
            plain,
            out,
            to=to,
            on_progress=at_verified(lambda: convert(tmp_path / "other.safetensors", out, to=to)),
        )
    convert(out, other, to="dcp")
    assert tensors_in(other).keys() == {"model.other"}


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_filesystems_without_the_flags_of_a_rename(
    to: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(destination_module, "_renameat2", refuse)
    out = tmp_path / "out.pt"
    convert(plain, out, to=to)
    convert(out, tmp_path / "again", to="dcp")
    with pytest.raises(tierstore.CheckpointError, match="was made or changed by another process"):
        convert(
            plain,
            tmp_path / "new.pt",
            to=to,
            on_progress=at_verified(lambda: shutil.copytree(plain, tmp_path / "new.pt")),
        )
    assert (tmp_path / "new.pt" / ".metadata").is_file()
    done: list[str] = []
    with (
        no_trace(tmp_path),
        pytest.raises(tierstore.CheckpointError, match="cannot exchange two names"),
    ):
        convert(plain, out, to=to, force=True, on_progress=lambda phase, d, t: done.append(phase))
    assert "convert" not in done


def test_a_run_in_use_is_not_replaced(plain: Path, run: Path, tmp_path: Path) -> None:
    lock = os.open(run / "rank-00000" / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with no_trace(tmp_path), pytest.raises(tierstore.RunLockedError):
            convert(plain, run, to="dcp", force=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        begin = at_verified(lambda: fcntl.flock(lock, fcntl.LOCK_EX))
        with no_trace(tmp_path), pytest.raises(tierstore.RunLockedError):
            convert(plain, run, to="dcp", force=True, on_progress=begin)
    finally:
        os.close(lock)
    convert(plain, run, to="dcp", force=True)
    assert (run / ".metadata").is_file()


def archive(path: Path) -> None:
    path.write_bytes(os.urandom(10240))


def firmware(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("firmware/data.bin", "bytes")


def junk_weights(path: Path) -> None:
    path.mkdir()
    (path / "junk.safetensors").write_bytes(b"junk")


def weights_and_a_thesis(path: Path) -> None:
    path.mkdir()
    save_file({"weight": torch.ones(2)}, path / "model.safetensors")
    (path / "thesis.txt").write_text("years of work")


def link_to_a_checkpoint(path: Path) -> None:
    shutil.copytree(path.parent / "plain", path.parent / "copy")
    path.symlink_to(path.parent / "copy")


def weights_and_a_folder(path: Path) -> None:
    path.mkdir()
    save_file({"weight": torch.ones(2)}, path / "model.safetensors")
    (path / "photos").mkdir()
    (path / "photos" / "child.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("backup.tar", archive),
        ("fw.bin", firmware),
        ("junk", junk_weights),
        ("thesis", weights_and_a_thesis),
        ("link", link_to_a_checkpoint),
        ("folder", weights_and_a_folder),
    ],
)
def test_nothing_but_whole_checkpoints_is_replaced(
    name: str, make: Callable[[Path], None], plain: Path, tmp_path: Path
) -> None:
    make(tmp_path / name)
    with no_trace(tmp_path):
        code, _, error = call("convert", plain, tmp_path / name, "--to", "dcp", "--force")
    assert (code, "is not replaced: it " in error) == (2, True), error


@pytest.mark.parametrize("kind", ["run", "published", "plain"])
def test_every_checkpoint_is_replaced(kind: str, originals: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(originals / kind, tmp_path / f"{kind}.pt"))
    convert(originals / "plain", old, to="safetensors", force=True)
    convert(originals / "plain", old, to="torch", force=True)
    convert(originals / "plain", old, to="dcp", force=True)
    assert {path.name for path in old.iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "tierstore-conversion.json",
    }
    assert os.listdir(tmp_path) == [f"{kind}.pt"]


def test_a_directory_that_another_conversion_takes_for_a_leftover(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = fcntl.flock, []

    def flock(fd: int, flags: int) -> None:
        if flags == fcntl.LOCK_EX and not removed:
            removed.append(os.readlink(f"/proc/self/fd/{fd}"))
            with destination_module.temporary_directory(tmp_path / "out"):
                assert not Path(removed[0]).exists()
        real(fd, flags)

    monkeypatch.setattr(destination_module.fcntl, "flock", flock)
    convert(plain, tmp_path / "out", to="dcp")
    assert len(removed) == 1
    assert sorted(os.listdir(tmp_path)) == ["out", "plain"]


def test_conversions_at_once_keep_their_directories(tmp_path: Path) -> None:
    wrong: list[BaseException] = []

    def make() -> None:
        try:
            for _ in range(50):
                with destination_module.temporary_directory(tmp_path / "out") as directory:
                    (directory / "file").write_text("")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert os.listdir(tmp_path) == []


def test_a_conversion_ends_while_another_looks_for_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is removed after the other one opened it, and before that one locks it."""
    flock = fcntl.flock

    def flock_after_the_other_ended(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            os.rmdir(os.readlink(f"/proc/self/fd/{fd}"))
        flock(fd, operation)

    (tmp_path / ".out.tmp-01234567").mkdir()
    monkeypatch.setattr(fcntl, "flock", flock_after_the_other_ended)
    with destination_module.temporary_directory(tmp_path / "out") as directory:
        assert os.listdir(tmp_path) == [directory.name]


def test_parents_are_removed_after_an_error_only(plain: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    out = tmp_path / "a" / "b" / "out"
    with no_trace(tmp_path), pytest.raises(KeyboardInterrupt):
        convert(plain, out, to="dcp", on_progress=at_verified(fail))
    convert(plain, out, to="dcp")
    modes = {path.stat().st_mode & 0o777 for path in (out, *out.iterdir())}
    assert modes == {0o700, 0o600}


def test_a_dry_run_is_refused_as_the_conversion_would_be(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    code, _, error = call("convert", plain, out, "--to", "dcp", "--dry-run")
    assert (code, "is there already" in error) == (2, True)


def test_a_filesystem_that_tells_no_space(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = call("convert", plain, "/proc/out", "--to", "dcp")
    assert (code, "making a directory in it failed: /proc: " in error) == (1, True), error
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    )
    convert(plain, tmp_path / "out", to="dcp")
