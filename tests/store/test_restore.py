"""restore() to the last commit in an open store, after failures and without."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.faults import Fault, FaultyStorage
from tests.support.kept import commit_with, kept_by
from tests.support.toy import (
    FIRST,
    FOURTH,
    MODEL,
    RANK,
    Toy,
    open_muon,
    resumed,
    unchanged_parameters,
)
from tierstore.paging import buffers
from tierstore.storage.memory import MemoryFiles, MemoryStorage
from tierstore.storage.select import open_storage


def test_a_bad_scalar_is_refused_before_the_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.pages.scalars["first"] = {"step": object()}  # type: ignore[dict-item]
    for call in (toy.store.commit, toy.step):
        with pytest.raises(TypeError, match=r"scalars\['first'\]\['step'\]"):
            call()
    assert toy.store.step == 1
    toy.store.pages.scalars["first"]["step"] = 1.0
    toy.step()
    toy.store.close()
    resumed(tmp_path, 2).store.close()


def test_no_step_follows_a_commit_that_failed_for_any_reason(tmp_path: Path) -> None:
    """The step would overwrite pages that the commit before needs."""

    def watch(operation: str, name: str, when: str) -> None:
        if (operation, name, when) == ("rename", "commit-0000000002.tmp", "before"):
            raise MemoryError

    storage = FaultyStorage(open_storage(tmp_path / RANK), on_operation=watch)
    toy = Toy(storage)
    toy.step()
    toy.store.synchronize()
    toy.step()
    with pytest.raises(MemoryError):
        toy.store.synchronize()
    with pytest.raises(tierstore.StoreFailedError, match="MemoryError"):
        toy.step()
    toy.store.close()
    resumed(tmp_path, 1).store.close()


def test_after_a_failed_commit_only_restore_works(tmp_path: Path) -> None:
    files = MemoryFiles()
    storage = FaultyStorage(MemoryStorage(files))
    toy = Toy(storage)
    toy.step()
    toy.store.synchronize()
    toy.step()
    storage.arm(Fault("error", "rename", call=1))
    toy.store.commit()
    with pytest.raises(tierstore.StorageError, match="commit-0000000002"):
        toy.store.synchronize()
    for call in (toy.step, toy.store.commit, toy.store.synchronize, toy.store.pages.read_states):
        with pytest.raises(tierstore.StoreFailedError, match=r"restore\(\) goes back"):
            call()
    assert toy.store.committed.step == 1
    assert toy.store.restore() == 1
    toy.assert_at(1)
    toy.step()
    toy.store.close()
    assert sorted(name for name in files.contents if "commit" in name) == [
        "commit-0000000001",
        "commit-0000000002",
    ]


def test_a_restore_that_failed_half_way_commits_nothing(tmp_path: Path) -> None:
    files = MemoryFiles()
    storage = FaultyStorage(MemoryStorage(files))
    toy = Toy(storage, commit_every=3)
    toy.step()
    toy.store.synchronize()
    for _ in range(4):
        toy.step()
    storage.arm(Fault("error", "read", call=2))
    with pytest.raises(tierstore.StorageError):
        toy.store.restore()
    storage.disarm()
    for call in (toy.step, toy.store.commit, toy.store.synchronize, toy.store.pages.read_states):
        with pytest.raises(tierstore.RunDirectoryError, match=r"call restore\(\)"):
            call()
    assert toy.store.restore() == 4
    toy.assert_at(4)
    toy.store.close()


def test_restore_undoes_what_was_not_committed(tmp_path: Path) -> None:
    store, optimizer, parameters = open_muon(tmp_path, commit_every=100)
    training.train(optimizer, parameters, range(1, 5))
    commit_with(store, "kept")
    store.synchronize()
    expected = training.snapshot(optimizer, parameters)
    for attempt in (1, 2):
        training.train(optimizer, parameters, range(5, 8), seed=attempt)
        optimizer.param_groups[0]["lr"] = 7.0
        commit_with(store, "forgotten")
        assert optimizer.restore() == store.step == 4
        assert kept_by(store) == "kept"
        assert optimizer.param_groups[0]["lr"] == 0.02
        training.assert_identical(training.snapshot(optimizer, parameters), expected)
    training.train(optimizer, parameters, range(5, 9))
    actual = training.snapshot(optimizer, parameters)
    store.close()

    parameters = training.make_parameters(torch.bfloat16)
    store = tierstore.TierStore(None, page_bytes=10000)
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    training.train(optimizer, parameters, range(1, 9))
    training.assert_identical(actual, training.snapshot(optimizer, parameters))


def test_restore_without_a_commit(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=100)
    assert toy.store.restore() == 0
    toy.step()
    with (
        unchanged_parameters(toy),
        pytest.raises(tierstore.RunDirectoryError, match="no step was committed"),
    ):
        toy.store.restore()
    toy.assert_at(1)
    toy.step()
    toy.store.close()
    resumed(tmp_path, 2).store.close()


def test_states_written_before_the_first_step_are_committed(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.store.pages.write_states({"first": {"momentum": torch.full((5, 7), 3.0)}})
    toy.store.synchronize()
    toy.store.pages.write_states({"first": {"momentum": torch.full((5, 7), 4.0)}})
    for _ in range(2):
        assert toy.store.restore() == 0
        momentum = toy.store.pages.read_states()["first"]["momentum"]
        assert torch.equal(momentum, torch.full_like(momentum, 3.0))
        toy.store.close()
        toy = Toy(tmp_path, resume=True)
    toy.store.close()


# ------------------------------------------------------------------------- further groups


def test_a_group_attached_later_is_committed_and_restored(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.attach([FOURTH])
    toy.store.synchronize()  # Commits the old groups: no step has the new group yet.
    resumed_copy = Toy(copy_of(tmp_path), resume=True)
    assert resumed_copy.store.restore() == 1
    resumed_copy.store.close()
    toy.step()
    assert toy.store.restore() == 1  # The commit has the old groups only: the new one begins anew.
    assert not toy.store.pages.read_states(["fourth"])["fourth"]["average"].any()
    toy.step()
    toy.store.close()
    toy = Toy(tmp_path, [*MODEL, [FOURTH]], resume=True)
    assert toy.store.restore() == 2
    assert torch.equal(toy.parameters["first"], torch.full((5, 7), 0.5, dtype=torch.bfloat16))
    assert torch.equal(toy.parameters["fourth"], torch.full((2,), 0.5, dtype=torch.float64))
    states = toy.store.pages.read_states(["first", "fourth"])
    assert states["first"]["momentum"].tolist() == [[2] * 7] * 5
    assert states["fourth"]["average"].tolist() == [1, 1]
    toy.store.close()


def copy_of(directory: Path) -> MemoryStorage:
    """The current files of a run."""
    files = MemoryFiles()
    for path in (directory / RANK).iterdir():
        files.contents[path.name] = bytearray(path.read_bytes())
    return MemoryStorage(files)


def test_a_second_parameter_of_one_name_is_refused(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    with pytest.raises(ValueError, match="two parameters are named 'first'"):
        toy.attach([FIRST])
    toy.store.close()
    resumed(tmp_path, 1).store.close()


def interrupt_populating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the next allocation of host memory, once."""
    populate = buffers._populate

    def interrupted(arena: mmap.mmap, offset: int, nbytes: int) -> None:
        monkeypatch.setattr(buffers, "_populate", populate)
        raise KeyboardInterrupt

    monkeypatch.setattr(buffers, "_populate", interrupted)


def test_restoring_after_a_late_group_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step attaches the group."""
    store, optimizer, parameters = open_muon(tmp_path)
    training.set_gradients(parameters, 1)
    optimizer.step()
    store.synchronize()
    committed = training.snapshot(optimizer, parameters)
    late = torch.nn.Parameter(torch.ones(40, 60))
    optimizer.add_param_group({"params": [("late", late)], "algorithm": "adamw"})
    late.grad = torch.ones_like(late)
    interrupt_populating(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(tierstore.StoreFailedError):
        optimizer.step()
    assert optimizer.restore() == 1
    training.assert_identical(training.snapshot(optimizer, parameters), committed)
    optimizer.step()
    assert not torch.equal(late, torch.ones_like(late))
    store.close()


def test_an_interrupt_before_the_first_step_or_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call can be repeated: nothing was changed."""
    store, optimizer, parameters = open_muon(tmp_path)
    training.set_gradients(parameters, 1)
    interrupt_populating(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    expected = training.snapshot(optimizer, parameters)
    store.close()
    store, optimizer, parameters = open_muon(tmp_path, resume=True)
    interrupt_populating(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        optimizer.restore()
    assert optimizer.restore() == 1
    training.assert_identical(training.snapshot(optimizer, parameters), expected)
    store.close()
