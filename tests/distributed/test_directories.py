"""Directories of several ranks: more than one, in any order, on disks that not all ranks see."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import tierstore
from tests.rank_programs import checkpoints
from tests.rank_programs.checkpoints import EXTRA, paged
from tests.support.published import assert_equal, names_in, tensors_in
from tests.support.rank_pool import RankPool
from tests.support.resharded_runs import RESUMED, WORK, assert_run, job_of
from tierstore.tools.inspect.verify import verify


@pytest.mark.quick(1)
@pytest.mark.parametrize(("disks", "finder", "lost"), [((1, 0, 2), 0, 1), ((0, 2, 1), 1, 2)])
def test_ranks_on_the_disks_of_others(
    disks: tuple[int, ...], finder: int, lost: int, pool: RankPool, tmp_path: Path
) -> None:
    """Neither begun anew nor gone on with; where they were before, it goes on."""
    parts = "tests.rank_programs.checkpoints:work_in_parts"
    checkpoint = tmp_path / "checkpoint"
    pool.run(3, parts, job_of(tmp_path, "rows", 1, 2, checkpoint=checkpoint), (0, 1, 2))
    resumed = {"resume": True}
    job = job_of(tmp_path, "rows", 3, checkpoint=tmp_path / "later", store=resumed)
    refused = pool.run(3, "tests.rank_programs.checkpoints:fail_to_open_in_parts", job, disks)
    for _, text in refused:
        place = tmp_path / f"disk-{disks[finder]}" / "run"
        assert f"rank {finder} finds commits of rank {lost} in {place}, " in text
        assert f"rank {lost} does not: start each rank on the machine" in text
    assert pool.run(3, parts, job, (0, 1, 2)) == [(2, repr(EXTRA))] * 3


@pytest.mark.long
def test_a_run_in_several_directories(pool: RankPool, tmp_path: Path) -> None:
    """Also where they are somewhere else by now, and to more ranks and back."""
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    paths = [disk / "run" for disk in disks]
    job = dataclasses.replace(job_of(tmp_path, "rows", 1), run=paths)
    assert pool.run(3, WORK, job) == [(0, "None")] * 3
    moved = tmp_path / "moved" / "run"
    moved.parent.mkdir()
    paths = [paths[0], paths[1].rename(moved)]
    for began, ranks in enumerate((2, 3, 1), start=1):
        options = {"run": paths, "steps": (began + 1,), "store": RESUMED, "seed": 5}
        checkpoint = tmp_path / f"checkpoint-{ranks}"
        again = dataclasses.replace(job, checkpoint=checkpoint, **options)
        assert [step for step, _ in pool.run(ranks, WORK, again)] == [began] * ranks
        for path in paths:
            assert names_in(path) == [f"rank-{rank:05d}" for rank in range(ranks)]
        assert verify(paths[0]).faults == ()
        expected = paged(tensors_in(checkpoint))
    alone = job_of(tmp_path / "alone", "copies", 1, 2, 3, 4, checkpoint=tmp_path / "alone-4")
    checkpoints.work(alone)
    assert_equal(expected, paged(tensors_in(tmp_path / "alone-4")))


def test_directories_in_any_order(pool: RankPool, tmp_path: Path) -> None:
    """With as many ranks, with others, and after a job that was stopped on the way."""
    paths = [tmp_path / name / "run" for name in ("a", "b")]
    job = dataclasses.replace(job_of(tmp_path, "rows", 1, 2), run=paths)
    pool.run(2, WORK, job)
    turned = dataclasses.replace(job, run=paths[::-1], steps=(), store=RESUMED)
    assert pool.run(2, WORK, turned) == [(2, "None")] * 2
    turned = dataclasses.replace(turned, layout="copies")
    with pytest.raises(tierstore.CheckpointError, match="has no tensor"):
        checkpoints.work(dataclasses.replace(turned, bias_of_head=True))
    assert (paths[0] / "resharded").exists()
    assert checkpoints.work(turned) == (2, "None")
    for path in paths:
        assert names_in(path) == ["rank-00000"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "overwrite"), [(2, False), (3, False), (3, True)])
def test_ranks_stripe_over_directories_in_one_order(
    ranks: int, overwrite: bool, pool: RankPool, tmp_path: Path
) -> None:
    """Whichever order each was given, as the run begins or goes on with more ranks."""
    paths = [tmp_path / name / "run" for name in ("a", "b")]
    begins = {"overwrite": overwrite}
    job = dataclasses.replace(job_of(tmp_path, "rows", 1, store=begins), run=paths)
    pool.run(2, "tests.rank_programs.checkpoints:work_in_turned_directories", job)
    turned = dataclasses.replace(job, run=paths[::-1], steps=(2,), store=RESUMED)
    assert pool.run(ranks, WORK, turned) == [(1, "None")] * ranks
    assert verify(paths[0]).faults == ()
    turned = dataclasses.replace(turned, layout="copies")
    assert checkpoints.work(turned) == (2, "None")


def test_a_path_that_goes_up_from_a_link(tmp_path: Path) -> None:
    """It is the system's to follow: the same directory as for any other call."""
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "below")
    path = tmp_path / "link" / ".." / "run"
    job = dataclasses.replace(job_of(tmp_path, "copies", 1), run=path)
    assert checkpoints.work(job) == (0, "None")
    job = dataclasses.replace(job, store={"resume": True})
    assert checkpoints.work(job) == (1, "None")
    assert names_in(tmp_path / "real" / "run") == ["rank-00000"]
    assert not (tmp_path / "run").exists()


def test_overwritten_in_one_of_its_directories(pool: RankPool, tmp_path: Path) -> None:
    """Nothing that is left of the old run is in the way of the new one."""
    paths = [tmp_path / name / "run" for name in ("a", "b")]
    pool.run(2, WORK, dataclasses.replace(job_of(tmp_path, "rows", 1), run=paths))
    job = dataclasses.replace(job_of(tmp_path, "copies", 1, store={"overwrite": True}))
    checkpoints.work(dataclasses.replace(job, run=paths[0]))
    assert_run(paths[0], 1)
    job = dataclasses.replace(job_of(tmp_path, "rows", 2, store=RESUMED), run=paths[0])
    assert pool.run(2, WORK, job) == [(1, "None")] * 2
