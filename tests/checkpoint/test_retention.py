"""keep_last and leftovers of a crash: only checkpoints that the run published are removed."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from tests.support.published import assert_holds_toy, names_in
from tests.support.toy import RANK, Toy, contents, verified


def publish_steps(toy: Toy, folder: Path, *names: str, keep_last: int | None = None) -> None:
    """Do a step and publish it, for each name."""
    for name in names:
        toy.step()
        toy.store.checkpoint(folder / name, keep_last=keep_last)
        verified(toy.store)  # Else tests that change a checkpoint would be in its way.


@pytest.mark.parametrize(("keep_last", "count"), [(1, 2), (2, 2), (3, 3), (None, 4)])
def test_the_newest_are_kept(keep_last: int | None, count: int, tmp_path: Path) -> None:
    """keep_last=1 also keeps the one before: the last one was not read yet."""
    toy = Toy(tmp_path / "run")
    # By step, not by name.
    names = ["d", "a", "c", "b"]
    publish_steps(toy, tmp_path / "folder", *names, keep_last=keep_last)
    kept = names[-count:]
    assert names_in(tmp_path / "folder") == sorted(kept)
    for name in kept:
        assert_holds_toy(tmp_path / "folder" / name, names.index(name) + 1)
    toy.store.close()


def test_a_smaller_keep_last(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    publish_steps(toy, tmp_path / "folder", "1", "2", "3", "4")
    publish_steps(toy, tmp_path / "folder", "5", keep_last=2)
    assert names_in(tmp_path / "folder") == ["4", "5"]
    toy.store.close()


def test_retention_after_a_restart(tmp_path: Path) -> None:
    """The run is the same, and so are its checkpoints."""
    toy = Toy(tmp_path / "run")
    publish_steps(toy, tmp_path / "folder", "1", "2", keep_last=2)
    toy.store.close()
    toy = Toy(tmp_path / "run", resume=True)
    toy.store.restore()
    publish_steps(toy, tmp_path / "folder", "3", keep_last=2)
    assert names_in(tmp_path / "folder") == ["2", "3"]
    toy.store.close()
    # A run that takes the place of this one is another.
    toy = Toy(tmp_path / "run", overwrite=True)
    publish_steps(toy, tmp_path / "folder", "new", keep_last=1)
    assert names_in(tmp_path / "folder") == ["2", "3", "new"]
    toy.store.close()


def test_the_new_checkpoint_is_kept_beside_later_steps(tmp_path: Path) -> None:
    """restore() went back to a step before one that is published."""
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    toy = Toy(tmp_path / "run", resume=True)
    toy.store.restore()
    publish_steps(toy, tmp_path / "folder", "2", "3")
    toy.store.close()
    toy = Toy(tmp_path / "copy", resume=True)
    toy.store.restore()
    toy.store.checkpoint(tmp_path / "folder/1", keep_last=2)
    assert names_in(tmp_path / "folder") == ["1", "3"]
    toy.store.close()


def copied(first: Path) -> Path:
    return shutil.copytree(first, first.with_name("copy"))


def renamed(first: Path) -> Path:
    return first.rename(first.with_name("best"))


def with_a_file_of_a_stranger(first: Path) -> Path:
    (first / "notes.txt").write_text("the best so far")
    return first


def with_a_directory_of_a_stranger(first: Path) -> Path:
    (first / "evaluation").mkdir()
    return first


def with_a_damaged_marker(first: Path) -> Path:
    data = bytearray((first / "tierstore.json").read_bytes())
    data[-3] ^= 1
    (first / "tierstore.json").write_bytes(data)
    return first


def without_a_marker(first: Path) -> Path:
    (first / "tierstore.json").unlink()
    return first


def with_a_marker_of_another_version(first: Path) -> Path:
    data = (first / "tierstore.json").read_bytes()
    (first / "tierstore.json").write_bytes(data.replace(b"checkpoint 1 ", b"checkpoint 2 ", 1))
    return first


def plain_dcp(first: Path) -> Path:
    path = first.with_name("plain")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    return path


def of_another_run(first: Path) -> Path:
    other = Toy(first.parents[1] / "other")
    publish_steps(other, first.parent, "other")
    other.store.close()
    return first.with_name("other")


def behind_a_link(first: Path) -> Path:
    moved = shutil.move(first, first.parents[1] / "moved")
    first.symlink_to(moved)
    return Path(moved)


@pytest.mark.parametrize(
    "make",
    [
        *(copied, renamed, with_a_file_of_a_stranger, with_a_directory_of_a_stranger),
        *(with_a_damaged_marker, without_a_marker, with_a_marker_of_another_version),
        *(plain_dcp, of_another_run, behind_a_link),
    ],
)
def test_checkpoints_of_others_are_kept(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """A checkpoint that was changed since is kept as well."""
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, "1")
    foreign = make(folder / "1")
    before = contents(foreign)
    publish_steps(toy, folder, "2", "3", "4", keep_last=1)
    assert contents(foreign) == before
    assert "2" not in names_in(folder)
    assert_holds_toy(folder / "4", 4)
    toy.store.close()


def a_pipe(marker: Path, run_id: str) -> None:
    os.mkfifo(marker)


def a_directory(marker: Path, run_id: str) -> None:
    marker.mkdir()


def a_link_to_itself(marker: Path, run_id: str) -> None:
    marker.symlink_to(marker)


def larger_than_memory(marker: Path, run_id: str) -> None:
    marker.touch()
    os.truncate(marker, 2**40)


def sealed(marker: Path, text: str) -> None:
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    marker.write_text(f"tierstore checkpoint 1 {digest}\n{text}")


def sealed_no_json(marker: Path, run_id: str) -> None:
    sealed(marker, "no JSON")


def sealed_nesting(marker: Path, run_id: str) -> None:
    sealed(marker, "[" * 100_000)


def sealed_list(marker: Path, run_id: str) -> None:
    sealed(marker, json.dumps([run_id]))


def sealed_nothing(marker: Path, run_id: str) -> None:
    sealed(marker, "{}")


def sealed_without_files(marker: Path, run_id: str) -> None:
    sealed(marker, json.dumps({"run_id": run_id, "name": "0", "step": 0}))


def sealed_other_types(marker: Path, run_id: str) -> None:
    sealed(marker, json.dumps({"run_id": run_id, "name": "0", "step": "0", "files": {}}))


def sealed_files_in_a_list(marker: Path, run_id: str) -> None:
    files = ["rank-00000.commit"]
    sealed(marker, json.dumps({"run_id": run_id, "name": "0", "step": 0, "files": files}))


@pytest.mark.parametrize(
    "make",
    [
        *(a_pipe, a_directory, a_link_to_itself, larger_than_memory),
        *(sealed_no_json, sealed_nesting, sealed_list, sealed_nothing),
        *(sealed_without_files, sealed_other_types, sealed_files_in_a_list),
    ],
)
def test_other_entries_of_the_directory_do_not_disturb(
    make: Callable[[Path, str], None], tmp_path: Path
) -> None:
    """checkpoint() neither waits nor fails, and the other entry is kept."""
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, "1")
    (folder / "0").mkdir()
    make(folder / "0/tierstore.json", run_id_of(tmp_path / "run"))
    publish_steps(toy, folder, "2", "3", keep_last=1)
    assert names_in(folder) == ["0", "2", "3"]
    assert names_in(folder / "0") == ["tierstore.json"]
    assert_holds_toy(folder / "3", 3)
    toy.store.close()


def test_step_zero(tmp_path: Path) -> None:
    """A run that begins from a checkpoint can publish step 0."""
    toy = Toy(tmp_path / "run")
    toy.store.pages.write_states({})
    toy.store.checkpoint(tmp_path / "folder/0")
    assert_holds_toy(tmp_path / "folder/0", 0)
    publish_steps(toy, tmp_path / "folder", "1", "2", keep_last=1)
    assert names_in(tmp_path / "folder") == ["1", "2"]
    toy.store.close()


def test_the_log_says_what_is_kept_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy(tmp_path / "run")
    publish_steps(toy, tmp_path / "folder", "1")
    with_a_file_of_a_stranger(tmp_path / "folder/1")
    with caplog.at_level(logging.WARNING, logger="tierstore"):
        publish_steps(toy, tmp_path / "folder", "2", "3", keep_last=1)
    assert "folder/1 is kept" in caplog.text
    assert "notes.txt" in caplog.text
    toy.store.close()


def test_leftovers_of_other_runs_are_kept(tmp_path: Path) -> None:
    """Another run may be publishing into the same folder."""
    for name in ("one", "two"):
        toy = Toy(tmp_path / name)
        toy.step()
        toy.store.checkpoint(tmp_path / "folder" / name)
        run_id = run_id_of(tmp_path / name)
        left = tmp_path / f"folder/.{name}.tmp-{run_id[:8]}-01234567"
        left.mkdir()
        (left / "rank-00000.commit").write_bytes(b"half")
        toy.store.close()
    strangers = [".hidden", ".one.tmp-zzzzzzzz-01234567", ".one.tmp"]
    for name in strangers:
        (tmp_path / "folder" / name).mkdir()
    toy = Toy(tmp_path / "one", resume=True)
    toy.store.restore()
    toy.step()
    toy.store.checkpoint(tmp_path / "folder/later")
    toy.store.close()
    two = run_id_of(tmp_path / "two")[:8]
    kept = ["one", "two", "later", f".two.tmp-{two}-01234567", *strangers]
    assert names_in(tmp_path / "folder") == sorted(kept)


def run_id_of(run: Path) -> str:
    """Read the marker as JSON, without tierstore."""
    text = (run / RANK / "run.json").read_text()
    run_id: str = json.loads(text.partition("\n")[2])["run_id"]
    return run_id
