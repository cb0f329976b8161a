"""restore(checkpoint=, rewind=True): back to a checkpoint of an earlier step, in the same run."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import muon
import tierstore
from tests.support import independent_reader, training
from tests.support.faults import Fault, FaultyStorage
from tests.support.kept import commit_with, kept_by, wanted
from tests.support.killed_processes import _processes
from tests.support.published import assert_holds_toy, digests, names_in, published_toy
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import (
    MODEL,
    RANK,
    Toy,
    contents,
    open_muon,
    resumed,
    unchanged,
    unchanged_parameters,
    verified,
)
from tierstore.ranks.peers import Ranks
from tierstore.storage.select import open_storage
from tierstore.tools.inspect.summary import summarize
from tierstore.tools.inspect.verify import verify

TIERS: list[dict[str, Any]] = [
    {"buffers": 3},
    {"buffers": None, "host_memory": "1GiB"},
    {"buffers": None, "host_memory": "1GiB", "device_memory": "1GiB"},
]
"""Pages in files alone, in host memory, and in memory of the device."""


def spiked(directory: Path, **options: Any) -> tuple[Toy, Path]:
    """A run of 5 steps, and what it published after the second one."""
    toy = Toy(directory / "run", **options)
    toy.step()
    toy.step()
    commit_with(toy.store, {"seen": 2})
    toy.store.checkpoint(directory / "step-2")
    for _ in range(3):
        toy.step()
    commit_with(toy.store, {"seen": 5})
    toy.store.synchronize()
    return toy, directory / "step-2"


def rewound(directory: Path, **options: Any) -> Toy:
    """The run of spiked(), back at step 2."""
    toy, checkpoint = spiked(directory, **options)
    with wanted(toy.store) as kept:
        assert toy.store.restore(checkpoint=checkpoint, rewind=True) == 2
    assert kept == {"state": {"seen": 2}}
    return toy


# ------------------------------------------------------------------------------ training


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", TIERS, ids=["nvme", "host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["live", "resumed", "failed"])
def test_goes_on_as_a_run_that_began_from_the_checkpoint(
    state: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    def opened(**modes: Any) -> tuple[Any, Any, Any, Any]:
        store, optimizer, parameters = open_muon(tmp_path / "run", dtype, **options, **modes)
        scheduler = training.make_scheduler(optimizer)
        store.register(scheduler=scheduler)
        return store, optimizer, parameters, scheduler

    def train(steps: range, seed: int = 0) -> None:
        training.train(
            optimizer,
            parameters,
            steps,
            scheduler=scheduler,
            after_step=lambda step: store.commit(),
            seed=seed,
        )

    store, optimizer, parameters, scheduler = opened()
    train(range(1, 5))
    store.checkpoint(tmp_path / "checkpoint")
    train(range(5, 8), seed=1)
    if state == "failed":
        with pytest.raises(tierstore.SweepError), store.pages.sweep() as pages:
            next(pages)
    elif state == "resumed":
        store.close()
        store, optimizer, parameters, scheduler = opened(resume=True)
    assert optimizer.restore(tmp_path / "checkpoint", rewind=True) == 4
    assert store.step == store.committed.step == 4
    training.assert_identical(
        training.snapshot(optimizer, parameters), training.resident_run(4, dtype)
    )
    train(range(5, 9))
    expected = training.resident_run(8, dtype)
    training.assert_identical(training.snapshot(optimizer, parameters), expected)
    store.close()
    store, optimizer, parameters, scheduler = opened(resume=True)
    assert optimizer.restore() == 8
    training.assert_identical(training.snapshot(optimizer, parameters), expected)
    store.close()


def test_the_rewound_step_is_the_one_that_a_restart_finds(tmp_path: Path) -> None:
    toy = rewound(tmp_path)
    assert (toy.store.step, toy.store.committed.step) == (2, 2)
    assert kept_by(toy.store) == {"seen": 2}
    toy.assert_at(2)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    killed = resumed(tmp_path / "killed", 2)
    assert kept_by(killed.store) == {"seen": 2}
    killed.store.close()
    assert toy.store.restore() == 2
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()


def test_commits_of_before_never_win(tmp_path: Path) -> None:
    """The manifest of step 5 is still there as step 3 is committed again."""
    toy = rewound(tmp_path)
    names = set(names_in(tmp_path / "run" / RANK))
    assert {"commit-0000000005", "commit-e1-0000000002"} <= names
    for step in (3, 4):
        toy.step()
        toy.store.synchronize()
        shutil.copytree(tmp_path / "run", tmp_path / f"killed-{step}")
        resumed(tmp_path / f"killed-{step}", step).store.close()
    assert not any(name.startswith("commit-0") for name in names_in(tmp_path / "run" / RANK))
    toy.store.close()


def test_hyperparameters_come_from_the_checkpoint(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    toy.step()
    toy.store.checkpoint(tmp_path / "step-1")
    toy.groups[0].hyperparameters["lr"] = 8.0
    toy.step()
    toy.store.synchronize()
    toy.store.restore(tmp_path / "step-1", rewind=True)
    assert toy.groups[0].hyperparameters["lr"] == 0.25
    toy.groups[0].hyperparameters["lr"] = 4.0
    toy.store.close()
    resumed(tmp_path / "run", 1).store.close()
    assert summarize(tmp_path / "run").hyperparameters[0] == {"lr": 0.25}


@pytest.mark.parametrize("opened", [False, True])
def test_scalars_come_from_the_checkpoint(opened: bool, tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    for step in (1, 2):
        toy.step()
        toy.store.pages.scalars["first"] = {"count": step}
        toy.store.commit()
        toy.store.checkpoint(tmp_path / f"step-{step}")
    if opened:
        toy.store.close()
        toy = Toy(tmp_path / "run", resume=True)
    toy.store.restore(tmp_path / "step-1", rewind=True)
    assert toy.store.pages.scalars == {"first": {"count": 1}}
    toy.store.close()


def test_scalars_that_began_after_the_checkpoint(tmp_path: Path) -> None:
    """As of a parameter that had its first gradient later."""
    toy = Toy(tmp_path / "run")
    for step in (1, 2):
        toy.step()
        toy.store.pages.scalars.update(
            {name: {"count": step} for name in ("first", "second")[:step]}
        )
        toy.store.commit()
        toy.store.checkpoint(tmp_path / f"step-{step}")
    toy.store.restore(tmp_path / "step-1", rewind=True)
    assert toy.store.pages.scalars == {"first": {"count": 1}}
    toy.step()
    toy.store.close()
    toy = resumed(tmp_path / "run", 2)
    assert toy.store.pages.scalars == {"first": {"count": 1}}
    toy.store.close()


def test_twice(tmp_path: Path) -> None:
    toy = rewound(tmp_path)
    toy.step()
    toy.store.checkpoint(tmp_path / "again-3")
    toy.step()
    toy.store.synchronize()
    for path, step, epoch in [(tmp_path / "again-3", 3, 2), (tmp_path / "step-2", 2, 3)]:
        assert toy.store.restore(path, rewind=True) == step
        assert f"commit-e{epoch}-000000000{step}" in names_in(tmp_path / "run" / RANK)
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()


def test_forward_to_a_checkpoint_of_a_later_step(tmp_path: Path) -> None:
    toy = rewound(tmp_path)
    toy.step()
    toy.store.checkpoint(tmp_path / "step-3")
    toy.store.restore(tmp_path / "step-2", rewind=True)
    assert toy.store.restore(tmp_path / "step-3", rewind=True) == 3
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 4).store.close()


def test_a_run_without_steps_begins(tmp_path: Path) -> None:
    checkpoint = published_toy(tmp_path)
    toy = Toy(tmp_path / "run")
    assert toy.store.restore(checkpoint, rewind=True) == 3
    assert toy.store.committed.step == 0
    toy.store.close()
    assert "commit-0000000003" in names_in(tmp_path / "run" / RANK)


def test_commits_that_are_not_due(tmp_path: Path) -> None:
    """Steps that nothing has committed are given up."""
    toy, checkpoint = spiked(tmp_path, commit_every=10)
    toy.step()
    commit_with(toy.store, {"seen": 6})
    assert toy.store.restore(checkpoint, rewind=True) == 2
    toy.step()
    assert toy.store.committed.step == 2
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()


def test_a_step_of_the_same_number_that_is_not_committed(tmp_path: Path) -> None:
    """Its state is given up with it."""
    toy = Toy(tmp_path / "run", commit_every=10)
    toy.step()
    toy.store.checkpoint(tmp_path / "step-1")
    toy.store.restore(tmp_path / "step-1", rewind=True)
    toy.store.pages.write_states({})
    commit_with(toy.store, "of states that were replaced")
    assert toy.store.restore(tmp_path / "step-1", rewind=True) == 1
    assert kept_by(toy.store) is None
    toy.store.close()
    toy = resumed(tmp_path / "run", 1)
    assert kept_by(toy.store) is None
    toy.store.close()


def test_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    toy, _ = spiked(tmp_path)
    weights = {name: torch.full_like(p.detach(), 0.5) for name, p in toy.parameters.items()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "weights", no_dist=True)
    assert toy.store.restore(tmp_path / "weights", rewind=True) == 0
    assert all(torch.equal(p, weights[name]) for name, p in toy.parameters.items())
    commit_with(toy.store, {"seen": 0})
    toy.store.close()
    toy = Toy(tmp_path / "run", resume=True)
    assert toy.store.restore() == 0
    assert kept_by(toy.store) == {"seen": 0}
    assert all(torch.equal(p, weights[name]) for name, p in toy.parameters.items())
    toy.store.close()


# --------------------------------------------------------------------------- checkpoints


def test_published_checkpoints_stay(tmp_path: Path) -> None:
    toy, checkpoint = spiked(tmp_path)
    toy.store.checkpoint(tmp_path / "step-5")
    before = {path: digests(path) for path in (checkpoint, tmp_path / "step-5")}
    toy.store.restore(checkpoint, rewind=True)
    for _ in range(3):
        toy.step()
    toy.store.checkpoint(tmp_path / "again-5")
    toy.store.close()
    for path, digest in before.items():
        found = digests(path)
        assert {name: found[name] for name in digest} == digest
    for name, step in [("step-2", 2), ("step-5", 5), ("again-5", 5)]:
        assert_holds_toy(tmp_path / name, step)


def test_a_checkpoint_of_abandoned_steps_is_replaced(tmp_path: Path) -> None:
    """README's loop, which names checkpoints by steps, goes on after a rewind."""
    toy, folder = Toy(tmp_path / "run"), tmp_path / "folder"
    for step in range(1, 6):
        toy.step()
        toy.store.checkpoint(folder / f"step-{step}")
    toy.store.restore(folder / "step-2", rewind=True)
    before = {step: digests(folder / f"step-{step}") for step in (1, 2, 4)}
    with pytest.raises(tierstore.CheckpointError, match="already exists"):
        toy.store.checkpoint(folder / "step-2")  # Which the run has just gone back to.
    toy.step()
    toy.store.checkpoint(folder / "step-3")
    toy.step()
    (folder / "step-4" / "notes").write_text("of the user")
    for name in ("step-1", "step-2", "step-4"):  # Not abandoned, or with a file of somebody else.
        with pytest.raises(tierstore.CheckpointError, match="already exists"):
            toy.store.checkpoint(folder / name)
    (folder / "step-4" / "notes").unlink()
    assert before == {step: digests(folder / f"step-{step}") for step in (1, 2, 4)}
    toy.store.checkpoint(folder / "step-4")
    toy.step()
    toy.store.checkpoint(folder / "step-5")
    toy.store.close()
    assert names_in(folder) == [f"step-{step}" for step in range(1, 6)]
    for step in range(1, 6):
        assert summarize(folder / f"step-{step}").epoch == (step > 2)
        assert_holds_toy(folder / f"step-{step}", step)


def test_other_readers_know_the_epoch(tmp_path: Path) -> None:
    toy = rewound(tmp_path)
    toy.step()
    toy.store.checkpoint(tmp_path / "step-3")
    toy.store.close()
    for path in (tmp_path / "run", tmp_path / "step-3"):
        report = verify(path)
        assert (report.good, report.step) == (True, 3)
        summary = summarize(path)
        assert (summary.step, summary.epoch) == (3, 1)
    for content in (
        independent_reader.read_run(tmp_path / "run"),
        independent_reader.read_checkpoint(tmp_path / "step-3"),
    ):
        assert (content.epoch, content.step) == (1, 3)
        assert (content.states["second"]["average"] == 3).all()
    assert summarize(tmp_path / "step-2").epoch == 0


def test_retention_removes_checkpoints_that_were_abandoned_first(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    folder = tmp_path / "folder"
    for step in (1, 2, 3, 4):
        toy.step()
        toy.store.checkpoint(folder / f"before-{step}")
    toy.store.restore(folder / "before-2", rewind=True)
    toy.step()
    toy.store.checkpoint(folder / "after-3", keep_last=4)
    assert names_in(folder) == ["after-3", "before-1", "before-2", "before-4"]
    toy.step()
    toy.store.checkpoint(folder / "after-4", keep_last=3)
    assert names_in(folder) == ["after-3", "after-4", "before-2"]
    toy.step()
    toy.store.checkpoint(folder / "after-5", keep_last=2)
    assert names_in(folder) == ["after-4", "after-5"]
    toy.store.close()


def test_damage_of_the_run_that_was_left_is_not_raised(tmp_path: Path) -> None:
    """A checkpoint that shared a damaged file with it was read before the rewind."""
    toy, checkpoint = spiked(tmp_path)
    for path in (tmp_path / "run" / RANK).glob("page-*"):
        if path.stat().st_nlink == 1:  # The checkpoint of step 2 does not have it.
            path.write_bytes(bytes(path.stat().st_size))
    toy.store.checkpoint(tmp_path / "step-5")
    verified(toy.store)
    assert toy.store.restore(checkpoint, rewind=True) == 2
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()


# ------------------------------------------------------------------------------ refusals


def test_without_a_checkpoint(tmp_path: Path) -> None:
    toy, _ = spiked(tmp_path)
    with unchanged(tmp_path), pytest.raises(ValueError, match="also pass checkpoint="):
        toy.store.restore(rewind=True)
    toy.assert_at(5)
    toy.store.close()


def test_one_slot_of_each_page(tmp_path: Path) -> None:
    toy, checkpoint = spiked(tmp_path, commit_every=None)
    with unchanged(tmp_path), pytest.raises(ValueError, match=r"resume=True and\s+commit_every=1"):
        toy.store.restore(checkpoint, rewind=True)
    toy.assert_at(5)
    toy.store.close()
    toy = Toy(tmp_path / "run", resume=True)
    assert toy.store.restore(checkpoint, rewind=True) == 2
    toy.step()
    toy.store.close()
    # A dirty mark also names the epoch.
    toy = resumed(tmp_path / "run", 3, commit_every=None)
    toy.step()
    toy.store.synchronize()
    toy.step()
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    with pytest.raises(tierstore.RunDirectoryError, match="while overwriting step 4"):
        Toy(tmp_path / "killed", resume=True)
    toy.store.close()
    resumed(tmp_path / "run", 5).store.close()


def test_steps_that_are_not_committed(tmp_path: Path) -> None:
    checkpoint = published_toy(tmp_path)
    toy = Toy(tmp_path / "run", commit_every=10)
    toy.step()
    with pytest.raises(tierstore.RunDirectoryError, match=r"commit a step first, with synchron"):
        toy.store.restore(checkpoint, rewind=True)
    toy.assert_at(1)
    toy.store.synchronize()
    assert toy.store.restore(checkpoint, rewind=True) == 3
    toy.store.close()


def test_a_run_with_steps_names_the_way(tmp_path: Path) -> None:
    toy, checkpoint = spiked(tmp_path)
    with pytest.raises(tierstore.RunDirectoryError, match="go back to it with rewind=True"):
        toy.store.restore(checkpoint)
    toy.store.close()


@pytest.mark.parametrize("wrong", ["absent", "another model", "damaged", "check"])
def test_what_is_refused_changes_nothing(wrong: str, tmp_path: Path) -> None:
    toy, checkpoint = spiked(tmp_path)
    toy.step()  # Not committed yet, and not lost.

    def refuse(committed: tierstore.CommittedStep) -> None:
        raise ValueError(f"not step {committed.step} with {committed.states}")

    options: dict[str, Any] = {"check": refuse} if wrong == "check" else {}
    if wrong == "another model":
        other = Toy(tmp_path / "other", [MODEL[0]])
        other.step()
        other.store.checkpoint(tmp_path / "wrong")
        other.store.close()
    elif wrong != "absent":
        shutil.copytree(checkpoint, tmp_path / "wrong")
    if wrong == "damaged":
        path = next((tmp_path / "wrong").glob("rank-*.page-*"))
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
    errors = (tierstore.CheckpointError, tierstore.CorruptionError, ValueError)
    toy.store.checkpoint(tmp_path / "step-6")
    before, files = contents(checkpoint), names_in(tmp_path / "run" / RANK)
    assert any(name.endswith(".next") for name in files)  # So that a step needs no space.
    with unchanged_parameters(toy), pytest.raises(errors):
        toy.store.restore(tmp_path / "wrong", rewind=True, **options)
    assert contents(checkpoint) == before
    assert names_in(tmp_path / "run" / RANK) == files
    toy.assert_at(6)
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 7).store.close()


# ------------------------------------------------------------------- crashes and failures


def _rewind_and_die(directory: Path, checkpoint: Path, operation: int) -> None:
    """Rewind a run of spiked(); die at this operation of its storage, if there are so many."""
    left = itertools.count(operation, -1)

    def watch(operation: str, name: str, when: str) -> None:
        if is_watched and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    is_watched = False
    toy = Toy(FaultyStorage(open_storage(directory / RANK), on_operation=watch), resume=True)
    toy.store.restore()
    is_watched = True
    with wanted(toy.store):
        toy.store.restore(checkpoint, rewind=True)
    is_watched = False
    toy.store.close()


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 9))]
)
def test_killed_at_any_operation(first: int, tmp_path: Path) -> None:
    """A restart finds the last commit, or the rewound one, and goes on from it."""
    toy, checkpoint = spiked(tmp_path)
    toy.store.close()
    found = []
    for operation in itertools.count(first, 9):
        run = shutil.copytree(tmp_path / "run", tmp_path / f"killed-{operation}")
        child = _processes.Process(target=_rewind_and_die, args=(run, checkpoint, operation))
        child.start()
        child.join()
        toy = Toy(run, resume=True)
        step = toy.store.restore()
        assert kept_by(toy.store) == {"seen": step}
        toy.assert_at(step)
        found.append(step)
        toy.step()
        toy.store.close()
        resumed(run, step + 1).store.close()
        shutil.rmtree(run)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert found == sorted(found, reverse=True)
    assert {*found} == {2, 5}
    assert found.count(5) > 1
    assert_holds_toy(checkpoint, 2)


@pytest.mark.parametrize("operation", ["write", "flush", "rename", "sync_directory", "create"])
def test_after_an_error_restore_finds_the_last_commit(operation: str, tmp_path: Path) -> None:
    toy, checkpoint = spiked(tmp_path)
    toy.store.close()
    storage = FaultyStorage(open_storage(tmp_path / "run" / RANK))
    toy = Toy(storage, resume=True)
    toy.store.restore()
    toy.step()
    toy.store.synchronize()
    storage.arm(Fault("error", operation, call=1))
    with pytest.raises(tierstore.StorageError):
        toy.store.restore(checkpoint, rewind=True)
    assert toy.store.restore() == 6
    toy.assert_at(6)
    assert toy.store.restore(checkpoint, rewind=True) == 2
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_out_of_a_run_with_a_damaged_page(damage: str, tmp_path: Path) -> None:
    toy, checkpoint = spiked(tmp_path)
    toy.store.close()
    for path in (tmp_path / "run" / RANK).glob("page-*"):
        if path.stat().st_nlink > 1:
            continue
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(bytes(path.stat().st_size))
    toy = Toy(tmp_path / "run", resume=True)
    with pytest.raises(tierstore.CorruptionError):
        toy.store.restore()
    toy.store.close()
    toy = Toy(tmp_path / "run", resume=True)
    assert toy.store.restore(checkpoint, rewind=True) == 2
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()


# -------------------------------------------------------------------------- several ranks


@pytest.mark.parametrize("options", TIERS, ids=["nvme", "host", "device"])
def test_two_ranks(options: dict[str, Any], tmp_path: Path) -> None:
    def train(ranks: Ranks) -> None:
        toy = rewound(tmp_path, process_group=ranks, **options)
        assert toy.store.committed.step == 2
        toy.assert_at(2)
        toy.step()
        toy.store.checkpoint(tmp_path / "step-3")
        toy.store.restore(tmp_path / "step-2", rewind=True)
        toy.step()
        toy.store.close()

    def resume(ranks: Ranks) -> None:
        resumed(tmp_path / "run", 3, process_group=ranks, **options).store.close()

    assert ThreadJob(2).run(train) == [None, None]
    assert ThreadJob(2).run(resume) == [None, None]
    assert_holds_toy(tmp_path / "step-3", 3)
    assert summarize(tmp_path / "run").epoch == 2


def test_a_rewind_that_one_rank_alone_has_committed(tmp_path: Path) -> None:
    """The commit of before is the newest that all ranks have."""
    saved: dict[str, Path] = {}

    def train(ranks: Ranks) -> None:
        toy, checkpoint = spiked(tmp_path, process_group=ranks)
        ranks.gather(None)
        if ranks.rank == 0:
            saved["before"] = shutil.copytree(tmp_path / "run", tmp_path / "before")
        ranks.gather(None)
        toy.store.restore(checkpoint, rewind=True)
        toy.store.close()

    assert ThreadJob(2).run(train) == [None, None]
    shutil.rmtree(tmp_path / "run" / "rank-00001")
    shutil.copytree(saved["before"] / "rank-00001", tmp_path / "run" / "rank-00001")

    def resume(ranks: Ranks) -> None:
        toy = resumed(tmp_path / "run", 5, process_group=ranks)
        assert toy.store.restore(tmp_path / "step-2", rewind=True) == 2
        toy.step()
        toy.store.close()

    assert ThreadJob(2).run(resume) == [None, None]
    assert (summarize(tmp_path / "run").step, summarize(tmp_path / "run").epoch) == (3, 1)


def test_muon_without_a_checkpoint(tmp_path: Path) -> None:
    parameters = training.make_parameters()
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        with pytest.raises(ValueError, match="also pass checkpoint="):
            optimizer.restore(rewind=True)
