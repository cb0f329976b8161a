"""checkpoint(): links to page files that are never written again, and refusals."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import muon
import tierstore
from tests.support import kernel, training
from tests.support.kept import commit_with, wanted
from tests.support.published import (
    Ours,
    Reference,
    assert_equal,
    assert_holds_toy,
    assert_nothing_left,
    digests,
    inodes,
    names_in,
    pages_of,
    run_pages,
)
from tests.support.stock_reader import make_model
from tests.support.toy import RANK, Toy, resumed, train_and_die, unchanged, verified
from tierstore.checkpoint.verification import Verifier
from tierstore.storage.memory import MemoryStorage

MIB = 2**20


def test_moves_no_tensor_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the kernel, for a state of more than 100 MB.

    The verification, which reads the checkpoint in the background, does not begin.
    """
    monkeypatch.setattr(Verifier, "begin", lambda *_: None)
    parameters = [nn.Parameter(torch.ones(256, 4096)) for _ in range(9)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with tierstore.TierStore(tmp_path / "run", page_bytes="12MiB") as store:
        optimizer = muon.Muon([{"params": parameters, "algorithm": "adamw"}], store=store)
        optimizer.step()
        store.synchronize()
        os.sync()
        before = kernel.disk_bytes()
        publication = store.checkpoint(tmp_path / "checkpoint")
        after = kernel.disk_bytes()
        assert publication.bytes_total == store.stats().state_bytes > 100e6
        assert publication.bytes_copied == 0
        assert publication.done()
        publication.wait()
        assert after[0] - before[0] < MIB
        assert after[1] - before[1] < MIB
        pages = pages_of(tmp_path / "checkpoint")
        assert len(pages) == store.stats().pages
        assert inodes(pages) <= inodes(run_pages(tmp_path / "run"))
        small = [path for path in (tmp_path / "checkpoint").iterdir() if path not in pages]
        assert sum(path.stat().st_size for path in small) < MIB


def test_replacements_are_allocated_before_it_returns(tmp_path: Path) -> None:
    """A full disk is reported by checkpoint() and not by a step."""
    ours = Ours(tmp_path / "run").train(1)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    published = inodes(pages_of(tmp_path / "checkpoint"))
    spares = sorted((tmp_path / "run" / RANK).glob("page-*.next"))
    assert len(spares) == len(published) == ours.store.stats().pages
    for spare in spares:
        status = spare.stat()
        assert status.st_size == spare.with_suffix("").stat().st_size
        assert status.st_blocks * 512 >= status.st_size
    fresh = inodes(spares)
    ours.train(2, 3)
    ours.store.synchronize()
    assert fresh < inodes(run_pages(tmp_path / "run"))
    assert not published & inodes(run_pages(tmp_path / "run"))
    assert_nothing_left(tmp_path / "run", tmp_path / "nowhere")
    assert not list((tmp_path / "run" / RANK).glob("*.next"))


@pytest.mark.parametrize("commit_every", [1, 2, None])
def test_training_continues_and_the_checkpoint_is_unchanged(
    commit_every: int | None, tmp_path: Path
) -> None:
    """The run publishes three times, twice without a step in between."""
    ours = Ours(tmp_path / "run", "everything", commit_every=commit_every)
    reference = Reference("everything")
    ours.train(1, 2, 3)
    ours.store.checkpoint(tmp_path / "checkpoints/3", model=ours.model)
    verified(ours.store)
    found = digests(tmp_path / "checkpoints/3")
    ours.store.checkpoint(tmp_path / "checkpoints/again", model=ours.model)
    ours.train(*range(4, 14))
    ours.store.checkpoint(tmp_path / "checkpoints/13", model=ours.model)
    verified(ours.store)
    later = digests(tmp_path / "checkpoints/13")
    ours.train(*range(14, 24))
    ours.store.close()
    assert digests(tmp_path / "checkpoints/3") == found
    assert digests(tmp_path / "checkpoints/13") == later
    reference.train(*range(1, 24))
    assert_equal(ours.model.state_dict(), reference.model_state())
    assert_nothing_left(tmp_path / "run", tmp_path / "checkpoints", ["13", "3", "again"])
    for name, step in (("3", 3), ("again", 3), ("13", 13)):
        state = {"model": make_model("everything", 5).state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "checkpoints" / name, no_dist=True)
        expected = Reference("everything").train(*range(1, step + 1)).model_state()
        assert_equal(state["model"], expected)


@pytest.mark.parametrize("commit_every", [1, 2, None])
def test_a_resumed_process_leaves_the_checkpoint_unchanged(
    commit_every: int | None, tmp_path: Path
) -> None:
    """The process is killed while it replaces a published file."""
    toy = Toy(tmp_path / "run", commit_every=commit_every)
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoints/1")
    toy.store.close()
    with unchanged(tmp_path / "checkpoints"):
        calls = ["step", "step", "step", "synchronize"]
        train_and_die(tmp_path / "run", calls, commit_every=commit_every)
    toy = resumed(tmp_path / "run", 4, commit_every=commit_every)
    toy.store.checkpoint(tmp_path / "checkpoints/4")
    toy.step()
    toy.store.close()
    assert_holds_toy(tmp_path / "checkpoints/1", 1)
    assert_holds_toy(tmp_path / "checkpoints/4", 4)
    assert_nothing_left(tmp_path / "run", tmp_path / "checkpoints", ["1", "4"])


@pytest.mark.parametrize(
    "moment",
    [
        ("rename", "page-000000.b.next"),
        ("rename", "page-000001.b.next"),
        ("flush", "page-000000.b,page-000001.b"),
        ("sync_directory", ""),
        ("put", "commit-0000000004.tmp"),
    ],
)
def test_killed_while_published_files_are_replaced(moment: tuple[str, str], tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoints/2")  # Step 4 would write to the same files.
    toy.step()
    toy.store.close()
    with unchanged(tmp_path / "checkpoints"):
        train_and_die(tmp_path / "run", ["step", "synchronize"], before=moment)
        toy = resumed(tmp_path / "run", 3)
        toy.step()
        toy.step()
        toy.store.close()
    assert_holds_toy(tmp_path / "checkpoints/2", 2)
    resumed(tmp_path / "run", 5).store.close()


def test_the_checkpoint_has_the_states_of_the_last_commit(tmp_path: Path) -> None:
    """checkpoint() does not commit a step twice."""
    toy = Toy(tmp_path / "run")
    toy.step()
    commit_with(toy.store, {"position": 17})
    toy.store.checkpoint(tmp_path / "checkpoint")
    toy.store.close()
    other = Toy(tmp_path / "other")
    with wanted(other.store) as kept:
        assert other.store.restore(checkpoint=tmp_path / "checkpoint") == 1
    assert kept == {"state": {"position": 17}}
    other.assert_at(1)
    other.store.close()


def test_a_path_with_dots_after_a_link(tmp_path: Path) -> None:
    """The checkpoint is where the system finds the path."""
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "below")
    ours = Ours(tmp_path / "run").train(1)
    path = tmp_path / "link" / ".." / "checkpoint"
    ours.store.checkpoint(path)
    ours.store.close()
    assert (path / ".metadata").exists()
    assert not (tmp_path / "checkpoint").exists()


def test_a_step_that_is_not_committed_is_committed_first(tmp_path: Path) -> None:
    """A step between two commits, and states that were written after one."""
    toy = Toy(tmp_path / "run", commit_every=10)
    for _ in range(3):
        toy.step()
    publication = toy.store.checkpoint(tmp_path / "3")
    assert publication.step == toy.store.committed.step == 3
    assert_holds_toy(tmp_path / "3", 3)
    toy.store.pages.write_states(toy.store.pages.read_states())
    toy.store.pages.write_states({"second": {"average": torch.full((9,), 0.5)}})
    toy.store.checkpoint(tmp_path / "written")
    state = {"optimizer": {"state": {"second": {"average": torch.zeros(9)}}}}
    dcp.load(state, checkpoint_id=tmp_path / "written", no_dist=True)
    assert torch.equal(state["optimizer"]["state"]["second"]["average"], torch.full((9,), 0.5))
    assert_holds_toy(tmp_path / "3", 3)
    toy.store.close()


def test_a_removed_checkpoint_takes_no_space(tmp_path: Path) -> None:
    """The allocated replacements are used up; then pages are written in place."""
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoint")
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    for _ in range(3):
        toy.step()
    toy.store.synchronize()
    pages = inodes(run_pages(tmp_path / "run"))
    assert not list((tmp_path / "run" / RANK).glob("*.next"))
    for _ in range(3):
        toy.step()
    toy.store.synchronize()
    assert inodes(run_pages(tmp_path / "run")) == pages
    toy.store.close()
    resumed(tmp_path / "run", 7).store.close()


def test_a_reader_of_a_removed_checkpoint_is_not_disturbed(tmp_path: Path) -> None:
    """For example, a copy in progress while keep_last removes the checkpoint."""
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoints/1")
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(path.open("rb", buffering=0))
            for path in pages_of(tmp_path / "checkpoints/1")
        ]
        before = [file.read() for file in files]
        toy.step()
        toy.store.checkpoint(tmp_path / "checkpoints/2", keep_last=1)
        for _ in range(4):
            toy.step()
            toy.store.synchronize()
        for file in files:
            file.seek(0)
        assert [file.read() for file in files] == before
    toy.store.close()


def test_published_twice_needs_one_replacement(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.step()
    for name in "abc":
        toy.store.checkpoint(tmp_path / "checkpoints" / name)
    assert len(list((tmp_path / "run" / RANK).glob("*.next"))) == toy.store.stats().pages
    pages = [inodes(pages_of(tmp_path / "checkpoints" / name)) for name in "abc"]
    assert pages[0] == pages[1] == pages[2]
    toy.store.close()


def test_memory_storage_publishes_into_memory() -> None:
    """A storage in memory has folders in memory."""
    storage = MemoryStorage()
    toy = Toy(storage)
    toy.step()
    toy.store.checkpoint("/somewhere/checkpoint")
    folder = storage.folder("/somewhere")
    assert folder.children() == ["checkpoint"]
    assert ".metadata" in folder.files("checkpoint")
    toy.store.close()


# ------------------------------------------------------------------------- what is refused


def trained_toy(tmp_path: Path) -> Toy:
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.synchronize()
    return toy


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def a_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("make", [full_directory, a_file, a_link, a_dangling_link])
def test_a_path_that_is_taken(make: Any, tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    (tmp_path / "folder").mkdir()
    make(tmp_path / "folder/checkpoint")
    with (
        unchanged(tmp_path / "folder"),
        pytest.raises(tierstore.CheckpointError, match=r"folder/checkpoint.* another directory"),
    ):
        toy.store.checkpoint(tmp_path / "folder/checkpoint")
    toy.step()
    toy.store.checkpoint(tmp_path / "folder/free")
    assert_holds_toy(tmp_path / "folder/free", 2)
    toy.store.close()


def test_an_empty_directory_is_not_taken(tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    (tmp_path / "folder/checkpoint").mkdir(parents=True)
    toy.store.checkpoint(tmp_path / "folder/checkpoint")
    assert_holds_toy(tmp_path / "folder/checkpoint", 1)
    toy.store.close()


def test_published_again_under_the_same_name(tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    toy.store.checkpoint(tmp_path / "folder/checkpoint")
    toy.step()
    with pytest.raises(tierstore.CheckpointError, match="already exists"):
        toy.store.checkpoint(tmp_path / "folder/checkpoint")
    assert_holds_toy(tmp_path / "folder/checkpoint", 1)
    assert_nothing_left(tmp_path / "run", tmp_path / "folder", ["checkpoint"])
    toy.store.close()


def test_missing_parent_directories_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = trained_toy(tmp_path)
    toy.store.checkpoint(tmp_path / "a/b/c/checkpoint")
    assert_holds_toy(tmp_path / "a/b/c/checkpoint", 1)
    monkeypatch.chdir(tmp_path)
    toy.store.checkpoint("relative")
    assert_holds_toy(tmp_path / "relative", 1)
    toy.store.checkpoint(f"{tmp_path}/a/trailing/")
    assert_holds_toy(tmp_path / "a/trailing", 1)
    toy.store.close()


@pytest.mark.parametrize("above", ["file", "/proc/self/fdinfo"])
def test_a_directory_that_cannot_be_written(above: str, tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    (tmp_path / "file").write_text("mine")
    with (
        unchanged(tmp_path / "run"),
        pytest.raises(tierstore.CheckpointError, match=f"{above}.*writable for this user"),
    ):
        toy.store.checkpoint(tmp_path / above / "folder/checkpoint")
    toy.step()
    toy.assert_at(2)
    toy.store.close()


@pytest.mark.parametrize("name", [".hidden", "/", ""])
def test_names_that_a_checkpoint_cannot_have(name: str, tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    path = f"{tmp_path}/folder/{name}" if name.startswith(".") else name
    with unchanged(tmp_path), pytest.raises(tierstore.CheckpointError, match="name"):
        toy.store.checkpoint(path)
    toy.store.close()


def test_before_the_first_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    with pytest.raises(tierstore.CheckpointError, match="no step"):
        toy.store.checkpoint(tmp_path / "folder/checkpoint")
    assert names_in(tmp_path / "folder") == []
    toy.step()
    toy.store.checkpoint(tmp_path / "folder/checkpoint")
    assert_holds_toy(tmp_path / "folder/checkpoint", 1)
    toy.store.close()


def test_another_model(tmp_path: Path) -> None:
    ours = Ours(tmp_path / "run").train(1)
    ours.store.synchronize()
    with (
        unchanged(tmp_path / "run"),
        pytest.raises(tierstore.CheckpointError, match=r"'hidden\.weight'.*not in the given model"),
    ):
        ours.store.checkpoint(tmp_path / "folder/checkpoint", model=make_model("layers", 0))
    assert names_in(tmp_path / "folder") == []
    ours.train(2)
    ours.store.checkpoint(tmp_path / "folder/checkpoint", model=ours.model)
    ours.store.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"model_prefix": "model"}, "model_prefix"),
        ({"model_prefix": "a.b."}, "model_prefix"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    with unchanged(tmp_path), pytest.raises(ValueError, match=message):
        toy.store.checkpoint(tmp_path / "folder/checkpoint", **options)
    toy.store.close()


def test_a_store_without_a_directory() -> None:
    parameters = training.make_parameters()
    store = tierstore.TierStore(None)
    training.train(muon.Muon(training.make_groups(parameters), store=store), parameters, range(1))
    with pytest.raises(tierstore.RunDirectoryError, match="needs a store with a directory"):
        store.checkpoint("anywhere")


def test_a_failed_or_closed_store(tmp_path: Path) -> None:
    toy = trained_toy(tmp_path)
    with pytest.raises(tierstore.SweepError), toy.store.pages.sweep() as pages:
        next(pages)
    with pytest.raises(tierstore.StoreFailedError):
        toy.store.checkpoint(tmp_path / "folder/checkpoint")
    assert toy.store.restore() == 1
    toy.store.checkpoint(tmp_path / "folder/checkpoint")
    assert_holds_toy(tmp_path / "folder/checkpoint", 1)
    toy.store.close()
    with pytest.raises(tierstore.StoreClosedError):
        toy.store.checkpoint(tmp_path / "folder/another")
    assert_nothing_left(tmp_path / "run", tmp_path / "folder", ["checkpoint"])
