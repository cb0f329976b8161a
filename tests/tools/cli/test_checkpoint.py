"""``tierstore checkpoint``."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.commands import call, call_process
from tests.support.originals import STEPS, TWIN, committed_pages, flip
from tests.support.striped_runs import made
from tests.support.toy import MODEL, RANK, Toy, resumed
from tierstore.errors import CheckpointError
from tierstore.run.opening import LOCK_TIMEOUT_S
from tierstore.tools.inspect import verify

NOBODY = 65534


def test_a_run_is_published(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call_process("checkpoint", run, out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{out}: step 3, 28.0 KiB of pages linked, they take no further space\n"
        f"not verified: tierstore verify {out} reads every byte\n"
    )
    assert verify.verify(out).good
    state = {"model.first": torch.zeros(5, 7)}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert torch.equal(state["model.first"], torch.full((5, 7), 1 - STEPS / 4))


def test_copied_pages_are_reported_apart_from_linked_ones(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = os.link

    def refused(source: Any, target: Any, **options: Any) -> None:
        """Refuse links between directories, as the system does between filesystems."""
        if options["src_dir_fd"] != options["dst_dir_fd"]:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        linked(source, target, **options)

    monkeypatch.setattr(os, "link", refused)
    code, out, _ = call("checkpoint", run, tmp_path / "out", "--json")
    assert code == 0
    body = json.loads(out)
    assert (body["path"], body["step"]) == (str(tmp_path / "out"), STEPS)
    assert body["bytes_copied"] == body["bytes_total"] == 28 * 1024
    _, out, _ = call("checkpoint", run, tmp_path / "again")
    assert out.startswith(f"{tmp_path}/again: step 3, 28.0 KiB of pages copied\nnot verified: ")
    assert verify.verify(tmp_path / "out").good


def test_checkpoints_that_cannot_be_published_are_2(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    for source, target in (
        (run, tmp_path / "taken"),
        (run, tmp_path / ".hidden"),
        (tmp_path / "absent", tmp_path / "out"),
        (tmp_path / "taken", tmp_path / "out"),
    ):
        code, out, err = call("checkpoint", source, target)
        assert (code, out) == (2, "")
        assert err.startswith("tierstore: ")
    assert not (tmp_path / "out").exists()
    resumed(run, STEPS, groups=[*MODEL, [TWIN]]).store.close()


def test_a_run_directory_may_hold_other_files(run: Path, tmp_path: Path) -> None:
    """For example a log, or checkpoints that the job published."""
    (run / "train.log").write_text("step 3\n")
    (run / "checkpoints").mkdir()
    assert call("checkpoint", run, tmp_path / "out")[0] == 0
    assert verify.verify(tmp_path / "out").good


@pytest.mark.parametrize("inside", [f"{RANK}/3", "../link/3", "rank-00005/3", "resharded/3"])
def test_a_checkpoint_that_the_run_would_remove_is_refused(
    inside: str, run: Path, tmp_path: Path
) -> None:
    """When it goes on on fewer ranks, it removes what was resharded, and further ranks."""
    (tmp_path / "link").symlink_to(run / RANK)
    code, out, err = call("checkpoint", "--verify", run, run / inside)
    assert (code, out, (run / inside).exists()) == (2, "", False)
    where = (run / inside).resolve().parent
    assert f"is in {where}, which a run uses and may remove: name a directory outside of it" in err
    store = resumed(run, STEPS, groups=[*MODEL, [TWIN]]).store
    with store, pytest.raises(CheckpointError, match="which a run uses and may remove"):
        store.checkpoint(run / inside)


@pytest.mark.parametrize("folder", [".", "checkpoints", "../rank-00000", "../resharded"])
def test_a_checkpoint_may_be_beside_the_ranks(folder: str, run: Path) -> None:
    """And in directories of users with the names of directories of runs."""
    (run.parent / "run.json").write_text("of another program")
    for name in ("rank-00000", "resharded"):
        (run.parent / name).mkdir()
    assert call("checkpoint", run, run / folder / "a")[0] == 0
    with resumed(run, STEPS, groups=[*MODEL, [TWIN]]).store as store:
        store.checkpoint(run / folder / "b")
    Toy(run, overwrite=True).store.close()
    for name in "ab":
        assert verify.verify(run / folder / name).good


def test_a_path_that_cannot_be_made_is_refused(run: Path, tmp_path: Path) -> None:
    code, out, err = call("checkpoint", run, tmp_path / ("a" * 300) / "out")
    assert (code, out) == (2, "")
    assert "cannot be used as a directory: File name too long" in err


def test_a_checkpoint_within_another_directory_of_the_run_is_refused(tmp_path: Path) -> None:
    made([tmp_path / "one", tmp_path / "two"])
    code, _, err = call("checkpoint", tmp_path / "one", tmp_path / "two" / RANK / "inside")
    assert code == 2
    assert f"is in {tmp_path}/two/{RANK}" in err
    assert call("checkpoint", "--verify", tmp_path / "one", tmp_path / "out")[0] == 0
    assert verify.verify(tmp_path / "out").good


def too_short(page: Path) -> str:
    os.truncate(page, page.stat().st_size - 4096)
    return f"has {page.stat().st_size} bytes, expected {page.stat().st_size + 4096}"


def too_long(page: Path) -> str:
    os.truncate(page, page.stat().st_size + 4096)
    return f"has {page.stat().st_size} bytes, expected {page.stat().st_size - 4096}"


def a_link(page: Path) -> str:
    shutil.move(page, page.parent.parent / "elsewhere")
    page.symlink_to(page.parent.parent / "elsewhere")
    return "is a symbolic link"


def a_pipe(page: Path) -> str:
    page.unlink()
    os.mkfifo(page)
    return "is not a regular file"


def missing(page: Path) -> str:
    page.unlink()
    return "is missing"


def of_somebody_else(page: Path) -> str:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(page, NOBODY, NOBODY)
    return f"belongs to user {NOBODY}, expected user 0"


@pytest.mark.parametrize("change", [too_short, too_long, a_link, a_pipe, missing, of_somebody_else])
@pytest.mark.parametrize("number", [0, -1])
def test_a_page_file_that_is_not_as_it_was_made_is_refused_by_its_name(
    number: int, change: Callable[[Path], str], run: Path, tmp_path: Path
) -> None:
    page = run / committed_pages(run)[number]
    expected = change(page)
    code, out, err = call("checkpoint", run, tmp_path / "out")
    assert (code, out, (tmp_path / "out").exists()) == (1, "", False)
    assert f"{page} {expected}; nothing was published" in err


def test_the_other_slot_of_a_page_is_not_looked_at(run: Path, tmp_path: Path) -> None:
    for path in set((run / RANK).glob("page-*")) - {run / name for name in committed_pages(run)}:
        path.unlink()
    assert call("checkpoint", run, tmp_path / "out")[0] == 0


def test_verify_reads_every_page_first(run: Path, tmp_path: Path) -> None:
    pages = committed_pages(run)
    code, out, err = call("checkpoint", "--verify", run, tmp_path / "good")
    assert (code, err) == (0, "")
    assert out.endswith("\nverified: every page was read before it was published\n")
    _, out, _ = call("checkpoint", "--verify", run, tmp_path / "json", "--json")
    assert json.loads(out)["verified"] is True
    for page in pages:
        flip(run / page, -1)
    code, out, err = call("checkpoint", "--verify", run, tmp_path / "out")
    assert (code, out, (tmp_path / "out").exists()) == (1, "", False)
    assert f"{run / pages[0]}: the " in err
    assert f"({len(pages) - 1} further faults); nothing was published" in err


def test_only_a_run_is_published(run: Path, originals: Path, tmp_path: Path) -> None:
    for source, why in (
        (originals / "published", "is a checkpoint already: name a run directory"),
        (run / RANK, "is the folder of one rank of a run: name the directory above it"),
    ):
        code, _, err = call("checkpoint", source, tmp_path / "out")
        assert code == 2
        assert err.startswith(f"tierstore: {source} {why}")
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_of_another_rank_is_ignored(run: Path, tmp_path: Path) -> None:
    """A job of more ranks leaves one."""
    (run / "rank-00001").mkdir()
    assert call("verify", run)[0] == 0
    assert call("checkpoint", run, tmp_path / "out")[0] == 0
    assert verify.verify(tmp_path / "out").good


def test_a_run_in_use_is_refused_at_once(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.step()
    began = time.monotonic()
    done = call_process("checkpoint", tmp_path / "run", tmp_path / "out", "--json")
    assert time.monotonic() - began < LOCK_TIMEOUT_S / 2
    assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
    assert f"in use by process {os.getpid()}" in json.loads(done.stdout)["error"]
    toy.store.close()
    assert call("checkpoint", tmp_path / "run", tmp_path / "out")[0] == 0


def test_the_advice_to_verify_can_be_pasted(run: Path, tmp_path: Path) -> None:
    _, out, _ = call("checkpoint", run, tmp_path / "my out")
    assert f"tierstore verify '{tmp_path}/my out' " in out


def test_a_damaged_page_is_published_and_then_found_by_verify(run: Path, tmp_path: Path) -> None:
    flip(run / committed_pages(run)[0], 600)
    assert call("checkpoint", run, tmp_path / "out")[0] == 0
    assert call("verify", tmp_path / "out")[0] == 1
