"""resume=True: a run continues on another number of ranks, whenever it is killed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import tierstore
from tests.rank_programs import checkpoints
from tests.rank_programs.checkpoints import EXTRA, Job, paged
from tests.support import killed_processes
from tests.support.originals import reseal
from tests.support.published import assert_equal, names_in, tensors_in
from tests.support.rank_pool import RankPool
from tests.support.resharded_runs import RESUMED, WORK, assert_run, job_of
from tests.support.toy import contents
from tierstore.checkpoint.publish_stopped import publish_run, publish_whole
from tierstore.run import directories
from tierstore.tools.cli import app
from tierstore.tools.inspect.verify import verify


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


def copied(root: Path, directory: Path) -> Path:
    shutil.copytree(root / "run", directory / "run")
    return directory


@pytest.mark.long
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_opening_on_other_ranks_changes_nothing_of_the_run(
    ranks: int, root: Path, pool: RankPool, tmp_path: Path
) -> None:
    """Committed states can be read before restore(), and as many ranks as before can resume."""
    run = copied(root, tmp_path) / "run"
    before = needed(run)
    job = job_of(tmp_path, "copies", store=RESUMED)
    looks = pool.run(ranks, "tests.rank_programs.checkpoints:look", job)
    warning = f"goes from 3 to {ranks} ranks: restore() lays it out anew, from step 3"
    assert [(step, extra) for step, extra, _ in looks] == [(3, repr(EXTRA))] * ranks
    assert [warning in text for *_, text in looks] == [True, *[False] * (ranks - 1)]
    after = needed(run)
    assert {path: after[path] for path in before} == before
    assert verify(run).good
    assert pool.run(3, WORK, job_of(tmp_path, "rows", store=RESUMED)) == [(3, repr(EXTRA))] * 3
    assert verify(run).good
    # A job of more ranks leaves an empty folder.
    assert names_in(run) == [f"rank-{rank:05d}" for rank in range(max(ranks, 3))]
    assert (run / "rank-00000" / "run.json").read_bytes() == before["rank-00000/run.json"]


def test_held_in_another_way_by_as_many_ranks(root: Path, pool: RankPool, tmp_path: Path) -> None:
    """It is refused, and what is to be done then works."""
    run = copied(root, tmp_path) / "run"
    job = job_of(tmp_path, "columns", store=RESUMED)
    for kind, text in pool.run(3, "tests.rank_programs.checkpoints:fail_to_restore", job):
        assert kind == "RunMismatchError"
        assert "ranks held or owned the parameters in a different way" in text
    publish_run(run, tmp_path / "out")
    job = job_of(tmp_path / "new", "columns", begin_from=tmp_path / "out")
    assert pool.run(3, WORK, job) == [(3, repr(EXTRA))] * 3


def test_a_new_run(pool: RankPool, tmp_path: Path) -> None:
    job = job_of(tmp_path, "rows", 1, store=RESUMED)
    assert pool.run(2, WORK, job) == [(0, "None")] * 2
    assert_run(tmp_path / "run", 2)


def test_of_another_model(root: Path, tmp_path: Path) -> None:
    """Nothing is lost by it."""
    directory = copied(root, tmp_path)
    job = job_of(directory, "copies", store=RESUMED, checkpoint=directory / "checkpoint")
    with pytest.raises(tierstore.CheckpointError, match="has no tensor"):
        checkpoints.work(dataclasses.replace(job, bias_of_head=True))
    assert checkpoints.work(job) == (3, repr(EXTRA))
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
    directory = left_on_the_way(root, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(root / "run" / "rank-00002", elsewhere)
    (directory / "run" / "rank-00002").symlink_to(elsewhere)
    job = job_of(directory, "copies", 1, store={"overwrite": True})
    assert checkpoints.work(job) == (0, "None")
    assert "rank-00002 is a symbolic link" in caplog.text
    # But for this, which the new run could be taken for.
    assert not (directory / "run" / "resharded").exists()
    assert (elsewhere / "run.json").exists()
    assert checkpoints.work(job_of(directory, "copies", store=RESUMED)) == (1, "None")


def test_after_a_job_of_more_ranks_that_committed_nothing(pool: RankPool, tmp_path: Path) -> None:
    """It is in nobody's way, and nothing is left of it."""
    assert pool.run(
        3, "tests.rank_programs.checkpoints:die_before_a_commit", job_of(tmp_path, "rows")
    )
    assert len(names_in(tmp_path / "run")) == 3
    assert pool.run(2, WORK, job_of(tmp_path, "rows", 1, store=RESUMED)) == [(0, "None")] * 2
    assert_run(tmp_path / "run", 2)
    assert pool.run(3, WORK, job_of(tmp_path, "rows", 2, store=RESUMED)) == [(1, "None")] * 3
    assert_run(tmp_path / "run", 3)


def test_a_directory_of_some_ranks_only(root: Path, tmp_path: Path) -> None:
    """Nothing is begun anew beside what others have committed, unless that is asked for."""
    directory = copied(root, tmp_path)
    shutil.rmtree(directory / "run" / "rank-00000")
    before = needed(directory / "run")
    with pytest.raises(tierstore.RunDirectoryError, match="rank 0 finds commits of rank 1 in"):
        checkpoints.work(job_of(directory, "copies", 1, store=RESUMED))
    assert needed(directory / "run") == before
    job = job_of(directory, "copies", 1, store={"overwrite": True})
    assert checkpoints.work(job) == (0, "None")
    assert_run(directory / "run", 1)


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
    with pytest.raises(tierstore.CorruptionError, match="rank 1 has different hyperparameters"):
        checkpoints.work(job)
    assert needed(run) == before


def needed(run: Path) -> dict[str, bytes | None]:
    """The files of a run, without spare files."""
    return {path: data for path, data in contents(run).items() if not path.endswith(".next")}


def test_directories_of_two_runs(pool: RankPool, root: Path, tmp_path: Path) -> None:
    """Both are as they were."""
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        runs.append(copied(root, tmp_path / name) / "run")
    before = [needed(run) for run in runs]
    job = dataclasses.replace(job_of(tmp_path, "copies", store=RESUMED), run=runs)
    with pytest.raises(tierstore.RunDirectoryError, match="is not striped"):
        checkpoints.work(job)
    assert [needed(run) for run in runs] == before
    assert all(verify(run).good for run in runs)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("failing", "operation"),
    [
        (1, "tierstore.run.opening.write_durably"),
        (0, "tierstore.checkpoint.reshard.end_reshard"),
    ],
)
def test_one_rank_that_cannot_begin(
    failing: int, operation: str, pool: RankPool, tmp_path: Path
) -> None:
    """All are told why."""
    job = job_of(tmp_path, "rows", 1, store={"overwrite": True})
    found = pool.run(
        3, "tests.rank_programs.checkpoints:fail_to_open_where", job, failing, operation
    )
    kinds = [kind for kind, _ in found]
    assert kinds.pop(failing) == "StorageError"
    assert kinds == ["PeerFailed"] * 2
    assert all("No space left" in text for _, text in found)
    assert pool.run(3, WORK, job) == [(0, "None")] * 3


def test_one_rank_that_cannot_restore(root: Path, pool: RankPool, tmp_path: Path) -> None:
    """All are told why, long before they would give it up."""
    run = copied(root, tmp_path) / "run"
    for page in (run / "rank-00001").glob("page-*"):
        damaged = bytearray(page.read_bytes())
        damaged[600] ^= 1
        page.write_bytes(damaged)
    job = job_of(tmp_path, "rows", store={"resume": True})
    found = pool.run(3, "tests.rank_programs.checkpoints:fail_to_restore", job)
    assert [kind for kind, _ in found] == ["PeerFailed", "CorruptionError", "PeerFailed"]
    assert all("checksum" in text for _, text in found), found


def test_stopped_in_its_first_commit(pool: RankPool, tmp_path: Path) -> None:
    """There is nothing to go on from on other ranks, and it says so."""
    pool.run(2, WORK, job_of(tmp_path, "rows", 1))
    (tmp_path / "run" / "rank-00000" / "commit-0000000001").unlink()
    for mark in (tmp_path / "run").glob("rank-*/clean"):  # A job that is killed leaves none.
        mark.unlink()
    for ranks in (1, 3):
        job = job_of(tmp_path, "rows", 1, store=RESUMED)
        for _, text in pool.run(ranks, "tests.rank_programs.checkpoints:fail_to_open", job):
            assert "no step was committed by all ranks of" in text
            assert "start over with overwrite=True" in text
    assert pool.run(2, WORK, job_of(tmp_path, "rows", store=RESUMED)) == [(0, "None")] * 2


def test_in_use_on_the_way(root: Path, tmp_path: Path) -> None:
    """Nobody else deletes what it is about to begin from."""
    directory = copied(root, tmp_path)
    _, store, optimizer = checkpoints.open_job(job_of(directory, "copies", store=RESUMED))
    for options in ({"overwrite": True}, RESUMED):
        with pytest.raises(tierstore.RunLockedError):
            tierstore.TierStore(directory / "run", **options)
    with store:
        assert optimizer.restore() == 3
    assert_run(directory / "run", 1)


def test_half_way_nothing_else_is_begun(root: Path, tmp_path: Path) -> None:
    for number in range(150, 300, 5):
        directory = copied(root, tmp_path / str(number))
        assert resume(job_of(directory, "copies", store=RESUMED), kill_at=number)
        if not any((directory / "run").glob("rank-*/commit-*")):
            break
    assert (directory / "run" / "resharded").exists()
    with pytest.raises(tierstore.RunDirectoryError, match="another number of ranks when the"):
        checkpoints.work(job_of(directory, "copies"))
    job = job_of(directory, "copies", 1, store={"overwrite": True})
    assert checkpoints.work(job) == (0, "None")
    assert not (directory / "run" / "resharded").exists()


def left_on_the_way(root: Path, directory: Path) -> Path:
    """A run that was about to go on with one rank when the job ended."""
    job = job_of(copied(root, directory), "copies", store=RESUMED)
    _, store, optimizer = checkpoints.open_job(job)
    with store, failing_to_read(), pytest.raises(tierstore.StorageError):
        optimizer.restore()
    assert (directory / "run" / "resharded").exists()
    assert not list((directory / "run").glob("rank-*/commit-*"))
    return directory


def failing_to_read() -> Any:
    """Let a restore on other ranks fail when the old run is gone."""
    broken = tierstore.StorageError("read", path="/disk/page", errno=errno.EIO)
    return mock.patch("tierstore.checkpoint.load.CheckpointSource.fill", side_effect=broken)


@pytest.mark.parametrize("command", ["inspect", "verify", "checkpoint"])
def test_the_commands_say_where_it_is(command: str, root: Path, tmp_path: Path) -> None:
    run = left_on_the_way(root, tmp_path) / "run"
    arguments = [command, str(run), *([str(tmp_path / "out")] if command == "checkpoint" else [])]
    told = CliRunner().invoke(app, arguments).stderr
    where = (
        f"checkpoint {run}/resharded: copy this" if command == "checkpoint" else "resharded in it"
    )
    assert where in " ".join(told.split())
    assert "overwrite" not in told
    assert CliRunner().invoke(app, ["verify", str(run / "resharded")]).exit_code == 0


def test_the_commands_know_when_it_means_nothing(root: Path, tmp_path: Path) -> None:
    run = copied(root, tmp_path) / "run"
    with directories.whole_run([run]) as storages:
        publish_whole(list(storages.values()), run / "resharded", for_reshard=True)
    done = CliRunner().invoke(app, ["verify", str(run)])
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_checkpoint_beside_the_ranks_stays(root: Path, tmp_path: Path) -> None:
    directory = copied(root, tmp_path)
    publish_run(directory / "run", directory / "run" / "kept")
    checkpoints.work(job_of(directory, "copies", store=RESUMED))
    assert names_in(directory / "run") == ["kept", "rank-00000"]
    assert verify(directory / "run" / "kept").good


def test_a_directory_of_the_same_name(root: Path, tmp_path: Path) -> None:
    """It is the user's: nothing takes it for what a reshard left, or removes it."""
    directory = copied(root, tmp_path)
    taken = directory / "run" / "resharded"
    for path in (taken, tmp_path / "resharded"):
        with pytest.raises(tierstore.CheckpointError, match='whose name is not "resharded"'):
            publish_run(directory / "run", path)
    publish_run(directory / "run", tmp_path / "out")
    taken.mkdir()
    (taken / "notes").write_text("mine")
    for _ in range(2):
        for options in (RESUMED, {}, {"overwrite": True}):
            with pytest.raises(tierstore.RunDirectoryError, match="move it somewhere else"):
                checkpoints.work(job_of(directory, "copies", store=options))
        assert names_in(directory / "run") == [*(f"rank-0000{n}" for n in range(3)), "resharded"]
        assert verify(directory / "run").good
        shutil.rmtree(taken)
        shutil.copytree(tmp_path / "out", taken)
    shutil.rmtree(taken)
    assert checkpoints.work(job_of(directory, "copies", store=RESUMED)) == (3, repr(EXTRA))


def test_what_cannot_be_removed_afterwards(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so, the run has begun, and it goes when it can."""
    left_on_the_way(root, tmp_path)
    (tmp_path / "run" / "resharded" / "strange").mkdir()
    job = job_of(tmp_path, "copies", store=RESUMED)
    assert checkpoints.work(job) == (3, repr(EXTRA))
    assert "a checkpoint that the run does not need any more stays" in caplog.text
    (left,) = (tmp_path / "run").glob(".resharded.tmp-*")
    (left / "strange").rmdir()
    assert checkpoints.work(job) == (3, repr(EXTRA))
    assert_run(tmp_path / "run", 1)


def test_a_restore_on_the_way_that_fails(root: Path, tmp_path: Path) -> None:
    """It says how nothing is lost."""
    left_on_the_way(root, tmp_path)
    _, store, optimizer = checkpoints.open_job(job_of(tmp_path, "copies", store=RESUMED))
    with store:
        with failing_to_read(), pytest.raises(tierstore.StorageError):
            optimizer.restore()
        with pytest.raises(tierstore.RunDirectoryError, match="start the job again with resume"):
            optimizer.restore()
        with pytest.raises(tierstore.RunDirectoryError, match=r"go on with restore\(\) alone"):
            optimizer.restore(checkpoint=tmp_path / "run" / "resharded")
    assert checkpoints.work(job_of(tmp_path, "copies", store=RESUMED)) == (3, repr(EXTRA))


def test_older_commits_are_gone_for_good_before_the_newest(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power loss could bring back one whose pages were overwritten since."""
    directory = copied(root, tmp_path)
    removed: list[set[str]] = [set()]
    unlink, fsync = os.unlink, os.fsync

    def note(path: Any, **options: Any) -> None:
        unlink(path, **options)
        removed[-1] |= {name for name in [os.path.basename(path)] if name.startswith("commit-")}

    def separate(descriptor: int) -> None:
        fsync(descriptor)
        removed.append(set())

    assert len(list((directory / "run" / "rank-00000").glob("commit-*"))) == 2
    monkeypatch.setattr(os, "unlink", note)
    monkeypatch.setattr(os, "fsync", separate)
    checkpoints.work(job_of(directory, "copies", store=RESUMED))
    order = [names for names in removed if names]
    assert order == [{"commit-0000000002"}, {"commit-0000000003"}] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    "first", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 49, 2))]
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
        assert checkpoints.work(job) == (3, repr(EXTRA)), number
        assert_run(directory / "run", 1)
        assert_equal(paged(tensors_in(directory / "checkpoint")), paged(expected))
        shutil.rmtree(directory)
        number += 48
    assert number > 200


def resume(job: Job, kill_at: int) -> bool:
    """Do a job in a process that is killed at that operation; return whether it was."""
    child = killed_processes._processes.Process(target=_resume, args=(job, kill_at))
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
    checkpoints.work(job)
