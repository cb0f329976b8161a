"""resume=True, reshard=True: a run goes on with another number of ranks, whenever it is killed."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
import tierstore.run
from tests import crashing, rank_checkpoints
from tests.publishing import assert_equal, names_in, tensors_in
from tests.rank_checkpoints import EXTRA, Job, paged
from tests.rank_pool import RankPool
from tests.toy import contents
from tests.verifying import reseal
from tierstore.checkpoint import whole_run
from tierstore.checkpoint.publish import publish_run
from tierstore.checkpoint.verify import verify

WORK = "tests.rank_checkpoints:work"
RESUMED = {"resume": True, "reshard": True}


@pytest.fixture(scope="module")
def root(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 ranks after 3 steps, and what one process publishes: alone-<steps>/checkpoint."""
    directory = tmp_path_factory.mktemp("runs")
    pool.run(3, WORK, job_of(directory, "rows", 1, 2, 3, checkpoint=directory / "checkpoint"))
    for steps in (3, 4, 5):
        alone = directory / f"alone-{steps}"
        job = job_of(alone, "copies", *range(1, steps + 1), checkpoint=alone / "checkpoint")
        pool.run(1, WORK, job)
    return directory


def job_of(directory: Path, layout: str, *steps: int, **options: Any) -> Job:
    return Job(
        run=directory / "run",
        layout=layout,
        steps=steps,
        dtype=torch.bfloat16,
        awkward=False,
        **options,
    )


def copied(root: Path, directory: Path) -> Path:
    shutil.copytree(root / "run", directory / "run")
    return directory


def assert_run(run: Path, ranks: int) -> None:
    assert names_in(run) == [f"rank-{rank:05d}" for rank in range(ranks)]
    assert verify(run).faults == ()


def test_on_fewer_and_on_more_ranks(root: Path, pool: RankPool, tmp_path: Path) -> None:
    directory = copied(root, tmp_path)
    for ranks, layout, began in ((2, "copies", 3), (4, "rows", 4)):
        checkpoint = directory / str(ranks)
        job = job_of(directory, layout, began + 1, seed=5, store=RESUMED, checkpoint=checkpoint)
        # What was committed with the step comes along.
        assert pool.run(ranks, WORK, job) == [(began, repr(EXTRA))] * ranks
        assert_run(directory / "run", ranks)
        expected = tensors_in(root / f"alone-{began + 1}" / "checkpoint")
        assert_equal(paged(tensors_in(checkpoint)), paged(expected))
    # Nothing is laid out anew where there are as many ranks.
    identity = (directory / "run" / "rank-00000" / "run.json").read_bytes()
    assert pool.run(4, WORK, job_of(directory, "rows", store=RESUMED)) == [(5, repr(EXTRA))] * 4
    assert (directory / "run" / "rank-00000" / "run.json").read_bytes() == identity


@pytest.mark.parametrize("ranks", [2, 4])
def test_without_it_another_number_of_ranks_is_refused(
    ranks: int, root: Path, pool: RankPool, tmp_path: Path
) -> None:
    run = copied(root, tmp_path) / "run"
    before = {path: data for path, data in contents(run).items() if data is not None}
    job = job_of(tmp_path, "copies", store={"resume": True})
    for kind, text in pool.run(ranks, "tests.rank_checkpoints:fail_to_open", job):
        assert kind == "RunDirectoryError"
        assert f"of 3, this is rank {text[text.index('this is rank ') + 13]} of {ranks}" in text
        assert "start the job with 3 ranks, or pass reshard=True" in text
    after = {path: data for path, data in contents(run).items() if data is not None}
    assert after == before
    assert verify(run).good


def test_held_in_another_way_by_as_many_ranks(root: Path, pool: RankPool, tmp_path: Path) -> None:
    """It is refused, and what is to be done then works."""
    run = copied(root, tmp_path) / "run"
    job = job_of(tmp_path, "columns", store=RESUMED)
    for kind, text in pool.run(3, "tests.rank_checkpoints:fail_to_restore", job):
        assert kind == "RunMismatchError"
        assert "ranks held or owned them in another way" in text
    publish_run(run, tmp_path / "out")
    job = job_of(tmp_path / "new", "columns", begin_from=tmp_path / "out")
    assert pool.run(3, WORK, job) == [(3, repr(EXTRA))] * 3


def test_a_new_run(pool: RankPool, tmp_path: Path) -> None:
    """As it is with resume=True alone."""
    job = job_of(tmp_path, "rows", 1, store=RESUMED)
    assert pool.run(2, WORK, job) == [(0, "None")] * 2
    assert_run(tmp_path / "run", 2)


def test_of_another_model(root: Path, tmp_path: Path) -> None:
    """Nothing is lost by it."""
    directory = copied(root, tmp_path)
    job = job_of(directory, "copies", store=RESUMED, checkpoint=directory / "checkpoint")
    with pytest.raises(tierstore.CheckpointError, match="has no tensor"):
        rank_checkpoints.work(dataclasses.replace(job, bias_of_head=True))
    assert rank_checkpoints.work(job) == (3, repr(EXTRA))
    expected = tensors_in(root / "alone-3" / "checkpoint")
    assert_equal(tensors_in(directory / "checkpoint"), expected)


def test_overwritten_by_fewer_ranks(root: Path, pool: RankPool, tmp_path: Path) -> None:
    """Nothing is left of the others."""
    directory = copied(root, tmp_path)
    job = job_of(directory, "rows", 1, store={"overwrite": True})
    assert pool.run(2, WORK, job) == [(0, "None")] * 2
    assert_run(directory / "run", 2)


def test_what_cannot_be_removed_is_told(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And is in nobody's way."""
    directory = copied(root, tmp_path)
    elsewhere = (directory / "run" / "rank-00002").rename(tmp_path / "elsewhere")
    (directory / "run" / "rank-00002").symlink_to(elsewhere)
    publish_run(root / "run", directory / "run" / "resharded")
    job = job_of(directory, "copies", 1, store={"overwrite": True})
    assert rank_checkpoints.work(job) == (0, "None")
    assert "rank-00002 is a symbolic link" in caplog.text
    # But for this, which the new run could be taken for.
    assert not (directory / "run" / "resharded").exists()
    assert (elsewhere / "run.json").exists()
    assert rank_checkpoints.work(job_of(directory, "copies", store=RESUMED)) == (1, "None")


def test_after_a_job_of_more_ranks_that_committed_nothing(pool: RankPool, tmp_path: Path) -> None:
    """It is in nobody's way, and nothing is left of it."""
    assert pool.run(3, "tests.rank_checkpoints:die_before_a_commit", job_of(tmp_path, "rows"))
    assert len(names_in(tmp_path / "run")) == 3
    assert pool.run(2, WORK, job_of(tmp_path, "rows", 1, store=RESUMED)) == [(0, "None")] * 2
    assert_run(tmp_path / "run", 2)
    assert pool.run(3, WORK, job_of(tmp_path, "rows", 2, store=RESUMED)) == [(1, "None")] * 3
    assert_run(tmp_path / "run", 3)


def test_what_was_committed_by_further_ranks_stays(root: Path, tmp_path: Path) -> None:
    """And whoever needs the place is told that it is there."""
    directory = copied(root, tmp_path)
    shutil.rmtree(directory / "run" / "rank-00000")
    job = job_of(directory, "copies", 1, store=RESUMED)
    assert rank_checkpoints.work(job) == (0, "None")
    assert (directory / "run" / "rank-00002" / "commit-0000000003").exists()
    assert rank_checkpoints.work(job_of(directory, "copies", store=RESUMED)) == (1, "None")


def test_commits_that_do_not_belong_together(root: Path, pool: RankPool, tmp_path: Path) -> None:
    """Nothing is lost by trying to go on with them on other ranks."""
    run = copied(root, tmp_path) / "run"
    for name in ("commit-0000000002", "commit-0000000003"):
        reseal(
            run / "rank-00001" / name,
            "commit",
            lambda body: body["hyperparameters"][0].update(lr=7.0),
        )
    before = needed(run)
    job = job_of(tmp_path, "copies", store=RESUMED)
    with pytest.raises(tierstore.CorruptionError, match="rank 1 has other hyperparameters"):
        rank_checkpoints.work(job)
    assert needed(run) == before


def needed(run: Path) -> dict[str, bytes | None]:
    """What is in a run, but for space that it keeps ready."""
    return {path: data for path, data in contents(run).items() if not path.endswith(".next")}


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
    rank_checkpoints.work(alone)
    assert_equal(expected, paged(tensors_in(tmp_path / "alone-4")))


def test_directories_of_two_runs(pool: RankPool, root: Path, tmp_path: Path) -> None:
    """Both are as they were."""
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        runs.append(copied(root, tmp_path / name) / "run")
    before = [needed(run) for run in runs]
    job = dataclasses.replace(job_of(tmp_path, "copies", store=RESUMED), run=runs)
    with pytest.raises(tierstore.RunDirectoryError, match="is not dealt"):
        rank_checkpoints.work(job)
    assert [needed(run) for run in runs] == before
    assert all(verify(run).good for run in runs)


def test_directories_in_any_order(pool: RankPool, tmp_path: Path) -> None:
    """With as many ranks, with others, and after a job that was stopped on the way."""
    paths = [tmp_path / name / "run" for name in ("a", "b")]
    job = dataclasses.replace(job_of(tmp_path, "rows", 1, 2), run=paths)
    pool.run(2, WORK, job)
    turned = dataclasses.replace(job, run=paths[::-1], steps=(), store=RESUMED)
    assert pool.run(2, WORK, turned) == [(2, "None")] * 2
    turned = dataclasses.replace(turned, layout="copies")
    with pytest.raises(tierstore.CheckpointError, match="has no tensor"):
        rank_checkpoints.work(dataclasses.replace(turned, bias_of_head=True))
    assert (paths[0] / "resharded").exists()
    with pytest.raises(tierstore.RunDirectoryError, match="another number of ranks when the"):
        rank_checkpoints.work(dataclasses.replace(turned, store={"resume": True}))
    assert rank_checkpoints.work(turned) == (2, "None")
    for path in paths:
        assert names_in(path) == ["rank-00000"]


def test_in_use_on_the_way(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else deletes what it is about to begin from."""
    directory = copied(root, tmp_path)
    for module in (tierstore.run, whole_run):
        monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    _, store, optimizer = rank_checkpoints.open_job(job_of(directory, "copies", store=RESUMED))
    for options in ({"overwrite": True}, RESUMED):
        with pytest.raises(tierstore.RunLockedError):
            tierstore.TierStore(directory / "run", **options)
    with store:
        assert optimizer.restore() == 3
    assert_run(directory / "run", 1)


def test_half_way_nothing_else_is_begun(root: Path, tmp_path: Path) -> None:
    for number in range(30, 200, 5):
        directory = copied(root, tmp_path / str(number))
        assert resume(job_of(directory, "copies", store=RESUMED), kill_at=number)
        if not any((directory / "run").glob("rank-*/commit-*")):
            break
    assert (directory / "run" / "resharded").exists()
    for options in ({"resume": True}, {}):
        job = job_of(directory, "copies", store=options)
        with pytest.raises(tierstore.RunDirectoryError, match="another number of ranks when the"):
            rank_checkpoints.work(job)
    job = job_of(directory, "copies", 1, store={"overwrite": True})
    assert rank_checkpoints.work(job) == (0, "None")
    assert not (directory / "run" / "resharded").exists()


@pytest.mark.parametrize(
    "first", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 17))]
)
def test_killed_at_any_point(first: int, root: Path, tmp_path: Path) -> None:
    """A restart finds the step, in the old run, on the way, or in the new one."""
    expected = tensors_in(root / "alone-3" / "checkpoint")
    number, killed = first, True
    while killed:
        directory = copied(root, tmp_path / str(number))
        job = job_of(directory, "copies", seed=5, store=RESUMED)
        killed = resume(job, kill_at=number)
        job = dataclasses.replace(job, checkpoint=directory / "checkpoint")
        assert rank_checkpoints.work(job) == (3, repr(EXTRA)), number
        assert_run(directory / "run", 1)
        assert_equal(paged(tensors_in(directory / "checkpoint")), paged(expected))
        shutil.rmtree(directory)
        number += 16
    assert number > 50


def resume(job: Job, kill_at: int) -> bool:
    """Do a job in a process that is killed at that operation; return whether it was."""
    child = crashing._processes.Process(target=_resume, args=(job, kill_at))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def _resume(job: Job, kill_at: int) -> None:
    torch.set_num_threads(1)
    left = kill_at

    def killing(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    for name in ("link", "mkdir", "rename", "rmdir", "unlink", "fsync"):
        setattr(os, name, killing(getattr(os, name)))
    rank_checkpoints.work(job)
