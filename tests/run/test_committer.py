"""The committer: which steps are committed, and that a commit restores everything."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.support import training
from tests.support.faults import FaultyStorage
from tests.support.kept import commit_with, kept_by
from tests.support.toy import (
    RANK,
    Toy,
    open_muon,
    resumed,
    unchanged_parameters,
)
from tierstore.storage.memory import MemoryFiles, MemoryStorage

# ----------------------------------------------------------------------------- which steps


def test_a_step_commits_the_one_before(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    assert toy.store.committed.step == 0
    toy.step()  # Its slots may be written once the commit of step 1 is durable.
    assert toy.store.committed.step == 1
    toy.store.close()
    resumed(tmp_path, 2).store.close()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("commit_every", "expected"),
    [(1, [1, 2, 3, 4, 5, 6, 7, 8]), (3, [3, 6, 8]), (4, [4, 8]), (9, [8]), (None, [8])],
)
def test_commit_every(commit_every: int | None, expected: list[int], explicit: bool) -> None:
    committed = []

    def watch(operation: str, name: str, when: str) -> None:
        if (operation, when) == ("rename", "after") and name.startswith("commit-"):
            committed.append(int(name[7:17]))

    files = MemoryFiles()
    storage = FaultyStorage(MemoryStorage(files), on_operation=watch)
    toy = Toy(storage, commit_every=commit_every)
    for step in range(1, 9):
        toy.step()
        if explicit:
            commit_with(toy.store, {"of": step})
    toy.store.close()
    assert committed == expected
    toy = Toy(MemoryStorage(files), resume=True)
    assert toy.store.restore() == 8
    toy.assert_at(8)
    assert kept_by(toy.store) == ({"of": 8} if explicit else None)


def test_synchronize_commits_what_was_not_due(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=5)
    for _ in range(3):
        toy.step()
        commit_with(toy.store, f"of step {toy.store.step}")
    assert toy.store.committed.step == 0
    toy.store.synchronize()
    assert toy.store.committed.step == 3
    manifest = (tmp_path / RANK / "commit-0000000003").read_bytes()
    assert b"of step 3" in manifest
    toy.store.close()


def test_nothing_is_committed_before_the_first_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    commit_with(toy.store, "lost")
    toy.store.synchronize()
    toy.store.close()
    assert {path.name for path in (tmp_path / RANK).iterdir() if "commit" in path.name} == set()
    resumed(tmp_path, 0).store.close()


def test_a_bad_hyperparameter_is_refused_before_the_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.groups[1].hyperparameters["rule"] = object()
    with (
        unchanged_parameters(toy),
        pytest.raises(TypeError, match=r"param_groups\[1\]\['rule'\]"),
    ):
        toy.step()
    assert toy.store.step == 1
    del toy.groups[1].hyperparameters["rule"]
    toy.step()
    toy.store.close()
    resumed(tmp_path, 2).store.close()


def test_edited_hyperparameters_come_back_with_value_and_type(tmp_path: Path) -> None:
    edits = {
        "lr": torch.tensor(0.0078125, dtype=torch.float64),
        "betas": (0.5, 0.75),
        "weight_decay": 0,
        "eps": 1e-300,
        "added": [None, True, "x"],
    }
    store, optimizer, parameters = open_muon(tmp_path)
    training.train(optimizer, parameters, range(1, 3))
    optimizer.param_groups[1].update(edits)
    optimizer.param_groups[0]["lr"] = 0.5
    training.train(optimizer, parameters, range(3, 4))
    store.close()
    store, optimizer, parameters = open_muon(tmp_path, resume=True)
    assert optimizer.restore() == 3
    found = {key: optimizer.param_groups[1][key] for key in edits}
    assert found == edits
    assert {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in edits.items()
    }
    assert found["lr"].dtype == torch.float64
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[1]["params"] == [
        parameters[name] for name in ("embedding", "bias", "scalar", "one")
    ]
    store.close()


@pytest.mark.parametrize("value", [3.0, 0.1, math.inf, -math.inf, math.nan])
def test_scalars_come_back(value: float, tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.pages.scalars["second"] = {"step": value, "other": 1e-310}
    toy.store.close()
    toy = resumed(tmp_path, 1)
    assert toy.store.pages.scalars.keys() == {"second"}
    found = toy.store.pages.scalars["second"]
    assert found["other"] == 1e-310
    assert found["step"] == value or (math.isnan(found["step"]) and math.isnan(value))
    toy.store.close()


def test_commit_of_states_written_after_a_commit(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.commit()
    toy.store.pages.write_states({"second": {"average": torch.full((9,), 5.0)}})
    toy.store.commit()
    toy.store.synchronize()
    toy.step()
    assert toy.store.restore() == 1
    assert torch.equal(toy.store.pages.read_states()["second"]["average"], torch.full((9,), 5.0))
    toy.store.close()
