"""Ranks with disks of their own, and where nothing can be linked: checkpoints in parts, copied."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_programs.checkpoints import EXTRA, Job, paged
from tests.support.published import assert_equal, names_in, tensors_in
from tests.support.rank_pool import RankPool
from tierstore.errors import StorageError
from tierstore.tools.inspect.verify import verify

WORK = "tests.rank_programs.checkpoints:work"
PARTS = "tests.rank_programs.checkpoints:work_in_parts"
FAIL = "tests.rank_programs.checkpoints:fail_to_publish_in_parts"
FULL = StorageError("write", path="/disk/file", errno=errno.ENOSPC)
DISKS = [(0, 1, 0), (0, 1, 1), (0, 1, 2)]


@pytest.fixture(scope="module")
def expected(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The checkpoint of one process after three steps."""
    directory = tmp_path_factory.mktemp("alone")
    pool.run(1, WORK, job_of(directory, 1, 2, 3))
    return tensors_in(directory / "checkpoint")


def job_of(directory: Path, *steps: int, **options: Any) -> Job:
    return Job(
        run=directory / "run",
        layout="rows",
        steps=steps,
        checkpoint=directory / "checkpoint",
        **options,
    )


def merged(parts: list[Path], into: Path) -> Path:
    """Copy all parts into one directory, as a user does."""
    for part in parts:
        shutil.copytree(part, into, dirs_exist_ok=True)
    return into


@pytest.mark.quick(1)
@pytest.mark.parametrize("disks", DISKS)
def test_the_parts_make_a_checkpoint(
    disks: tuple[int, ...], pool: RankPool, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    pool.run(3, PARTS, job_of(tmp_path, 1, 2), disks)
    shutil.rmtree(tmp_path / "disk-0" / "checkpoint")  # Or the name is taken.
    for disk in range(1, max(disks) + 1):
        shutil.rmtree(tmp_path / f"disk-{disk}" / "checkpoint")
    # Also a run goes on whose ranks do not see each other's files.
    rest = job_of(tmp_path, 3, store={"resume": True}, seed=5)
    assert pool.run(3, PARTS, rest, disks) == [(2, repr(EXTRA))] * 3
    parts = [tmp_path / f"disk-{disk}" / "checkpoint" for disk in range(max(disks) + 1)]
    for disk, part in enumerate(parts):
        here = [rank for rank, where in enumerate(disks) if where == disk]
        report = verify(part)
        absent = {fault.place[:10] for fault in report.faults if fault.place.startswith("rank-")}
        assert absent == {f"rank-{rank:05d}" for rank in range(3) if rank not in here}
        (note,) = (note for note in report.notes if "copy all parts" in note)
        assert all(str(rank) in note for rank in range(3) if rank not in here)
    whole = merged(parts, tmp_path / "merged" / "checkpoint")
    assert verify(whole).faults == ()
    assert_equal(paged(tensors_in(whole)), paged(expected))
    assert pool.run(2, WORK, job_of(tmp_path / "new", begin_from=whole)) == [(3, repr(EXTRA))] * 2


def test_the_oldest_are_removed_from_every_disk(pool: RankPool, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        job = Job(
            run=tmp_path / "run",
            layout="rows",
            steps=(step,),
            checkpoint=tmp_path / str(step),
            options={"keep_last": 2},
            store={"resume": True},
        )
        pool.run(3, PARTS, job, (0, 1, 1))
    for disk in ("disk-0", "disk-1"):
        assert names_in(tmp_path / disk) == ["2", "3", "run"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("unmarked", "kept"),
    [(None, ["2", "3"]), ("disk-0/2/rank-00000", ["1", "3"]), ("disk-1/2/rank-00001", ["1", "3"])],
)
def test_a_checkpoint_is_whole_if_all_parts_are(
    unmarked: str | None, kept: list[str], pool: RankPool, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        job = Job(
            run=tmp_path / "run",
            layout="rows",
            steps=(step,),
            checkpoint=tmp_path / str(step),
            options={"keep_last": 1},
            store={"resume": True},
        )
        if step == 3:
            for disk, ranks in (("disk-0", [0]), ("disk-1", [1, 2])):
                marks = [f"rank-{rank:05d}.whole" for rank in ranks]
                assert sorted(p.name for p in (tmp_path / disk / "2").glob("*.whole")) == marks
            if unmarked is not None:
                (tmp_path / f"{unmarked}.whole").unlink()
        pool.run(3, PARTS, job, (0, 1, 1))
    for disk in ("disk-0", "disk-1"):
        assert names_in(tmp_path / disk) == [*kept, "run"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("failing", "operation", "call", "error"),
    [
        (1, "make", 1, FULL),
        (2, "link", 2, FULL),
        (1, "put", 2, FULL),  # Of the marker.
        (1, "rename", 1, FULL),
        (0, "rename", 1, FULL),
        (0, "put", 3, FULL),  # Of .metadata, when the other parts have their name.
        (1, "sync_children", 1, FULL),
        (0, "sync_children", 1, FULL),
        (0, "sync_children", 1, MemoryError("No space left in memory")),
    ],
)
def test_where_one_part_fails_there_is_none(
    failing: int, operation: str, call: int, error: Exception, pool: RankPool, tmp_path: Path
) -> None:
    job = job_of(tmp_path)
    found = pool.run(3, FAIL, job, (0, 1, 1), failing, operation, call, error)
    kinds = [kind for kind, _ in found]
    assert kinds.pop(failing) == type(error).__name__
    assert kinds == ["PeerFailed"] * 2
    assert all("No space left" in text for _, text in found)
    # What is published next goes well, and removes what a failure may have left.
    for disk in ("disk-0", "disk-1"):
        assert names_in(tmp_path / disk) == ["later"]
    assert verify(merged([tmp_path / d / "later" for d in ("disk-0", "disk-1")], tmp_path / "m"))


def test_where_rank_0_may_have_published_its_part_all_parts_stay(
    pool: RankPool, tmp_path: Path
) -> None:
    """Rank 0 is interrupted when its part has its name, and cannot tell the other ranks."""
    job = job_of(tmp_path, 1)
    # The third listing is after it has the name, to find older checkpoints.
    found = pool.run(3, FAIL, job, (0, 1, 1), 0, "children", 3, KeyboardInterrupt())
    assert [kind for kind, _ in found] == ["KeyboardInterrupt", "PeerFailed", "PeerFailed"]
    for disk in ("disk-0", "disk-1"):
        assert names_in(tmp_path / disk) == ["checkpoint"]
    parts = [tmp_path / disk / "checkpoint" for disk in ("disk-0", "disk-1")]
    assert verify(merged(parts, tmp_path / "merged")).faults == ()


def test_one_name_is_for_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(
        3, "tests.rank_programs.checkpoints:fail_to_publish", job_of(tmp_path), 1, "another name"
    )
    assert {kind for kind, *_ in found} == {"CheckpointError"}
    assert all("all ranks must give the checkpoint one name" in text for _, text, _ in found)
    assert all(went_on for *_, went_on in found)


def test_what_cannot_be_linked_is_copied(
    pool: RankPool, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    copied = pool.run(
        3, "tests.rank_programs.checkpoints:copied_pages", job_of(tmp_path, 1, 2, 3), None
    )
    checkpoint = tmp_path / "checkpoint"
    assert verify(checkpoint).faults == ()
    pages = [path.stat() for path in checkpoint.glob("rank-*.page-*")]
    assert {page.st_nlink for page in pages} == {1}
    assert sum(nbytes for nbytes, _ in copied) == sum(page.st_size for page in pages)
    assert_equal(tensors_in(checkpoint), expected)


def test_a_page_that_is_damaged_is_not_copied(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(
        3, "tests.rank_programs.checkpoints:copied_pages", job_of(tmp_path, 1, 2, 3), 1
    )
    kinds = [text.partition(":")[0] for _, text in found]
    assert kinds == ["PeerFailed", "CorruptionError", "PeerFailed"]
    assert not (tmp_path / "checkpoint").exists()
    assert names_in(tmp_path) == ["run"]
