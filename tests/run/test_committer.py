"""The committer: which steps are committed, and that a commit restores everything."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import training
from tests.support.faults import FaultyStorage
from tests.support.toy import (
    RANK,
    Toy,
    make_run,
    open_muon,
    resumed,
    unchanged_parameters,
)
from tierstore.storage.memory import MemoryFiles, MemoryStorage

# ----------------------------------------------------------------------------- which steps


def test_a_step_commits_the_one_before(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    assert toy.store.committed_step == 0
    toy.step()  # Its slots may be written once the commit of step 1 is durable.
    assert toy.store.committed_step == 1
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
            toy.store.commit(extra={"of": step})
    toy.store.close()
    assert committed == expected
    toy = Toy(MemoryStorage(files), resume=True)
    assert toy.store.restore() == 8
    toy.assert_at(8)
    assert toy.store.extra == ({"of": 8} if explicit else None)


def test_synchronize_commits_what_was_not_due(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=5)
    for _ in range(3):
        toy.step()
        toy.store.commit(extra=f"of step {toy.store.step}")
    assert toy.store.committed_step == 0
    toy.store.synchronize()
    assert toy.store.committed_step == 3
    manifest = (tmp_path / RANK / "commit-0000000003").read_bytes()
    assert b"of step 3" in manifest
    toy.store.close()


def test_an_extra_belongs_to_its_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path, commit_every=None)
    toy.step()
    toy.store.commit(extra="of step 1")
    toy.step()
    toy.store.close()
    toy = resumed(tmp_path, 2, commit_every=None)
    assert toy.store.extra is None
    toy.store.close()


@pytest.mark.parametrize("durable_between", [False, True])
def test_a_second_commit_of_a_step_replaces_the_extra(
    durable_between: bool, tmp_path: Path
) -> None:
    toy = Toy(tmp_path)
    toy.step()
    for extra in ("first", "second", "third"):
        toy.store.commit(extra=extra)
        if durable_between:
            toy.store.synchronize()
    assert toy.store.extra is None  # The extra of a restored commit; none was restored.
    toy.store.close()
    toy = resumed(tmp_path, 1)
    assert toy.store.extra == "third"
    toy.store.close()


@pytest.mark.parametrize(
    ("commit_every", "call"),
    [
        *(
            (every, call)
            for every in (None, 1, 3)
            for call in ("close", "synchronize", "checkpoint")
        ),
        (1, "step"),
    ],
)
def test_a_commit_without_an_extra_asks_for_one(
    commit_every: int | None, call: str, tmp_path: Path
) -> None:
    toy = Toy(tmp_path / "run", commit_every=commit_every)
    toy.store.provide_extra(lambda: {"given": torch.tensor(toy.store.step)})
    for _ in range(3):
        toy.step()
    calls = {
        "close": toy.store.close,
        "synchronize": toy.store.synchronize,
        "checkpoint": lambda: toy.store.checkpoint(tmp_path / "published"),
        "step": toy.step,
    }
    calls[call]()
    with pytest.raises(KeyboardInterrupt), toy.store:
        raise KeyboardInterrupt  # It commits no step that is not committed yet.
    toy = resumed(tmp_path / "run", 3, commit_every=commit_every)
    assert toy.store.extra["given"] == 3
    toy.store.close()


def test_a_commit_with_an_extra_does_not_ask(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.store.provide_extra(lambda: pytest.fail("it was asked"))
    toy.step()
    toy.store.commit(extra="committed")
    toy.store.close()
    toy = resumed(tmp_path, 1)
    assert toy.store.extra == "committed"
    toy.store.close()


def test_an_extra_that_cannot_be_stored_is_refused_by_the_call_that_asks(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.store.provide_extra(object)
    toy.step()
    with pytest.raises(TypeError, match="extra"):
        toy.store.synchronize()
    toy.store.provide_extra(lambda: "good")
    toy.store.close()
    toy = resumed(tmp_path, 1)
    assert toy.store.extra == "good"
    toy.store.close()


def test_nothing_is_committed_before_the_first_step(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.store.commit(extra="lost")
    toy.store.synchronize()
    toy.store.close()
    assert {path.name for path in (tmp_path / RANK).iterdir() if "commit" in path.name} == set()
    resumed(tmp_path, 0).store.close()


# ------------------------------------------------------------------------ what comes back


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()]


def test_random_generators_resume(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    extra = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    toy.store.commit(extra=extra)
    expected = draws()
    toy.store.close()
    toy = resumed(tmp_path, 1)
    torch.set_rng_state(toy.store.extra["torch"])
    random.setstate(toy.store.extra["python"])
    np.random.set_state(toy.store.extra["numpy"])
    assert draws() == expected
    toy.store.close()


def test_a_scheduler_resumes(tmp_path: Path) -> None:
    store, optimizer, parameters = open_muon(tmp_path)
    scheduler = training.make_scheduler(optimizer)
    training.train(optimizer, parameters, range(1, 4), scheduler=scheduler)
    store.commit(extra={"scheduler": scheduler.state_dict()})
    store.close()
    store, optimizer, parameters = open_muon(tmp_path, resume=True)
    scheduler = training.make_scheduler(optimizer)
    optimizer.restore()
    scheduler.load_state_dict(store.extra["scheduler"])
    training.train(optimizer, parameters, range(4, 7), scheduler=scheduler)
    training.assert_identical(
        training.snapshot(optimizer, parameters),
        training.resident_run(6, torch.bfloat16, page_bytes=10000),
    )
    store.close()


def test_an_extra_comes_back_with_its_types(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    extra = {"tuple": (1, [2.0, (True, None)]), 7: "an int as key", "huge": 10**30, "t": tensor}
    toy = Toy(tmp_path)
    toy.step()
    toy.store.commit(extra=[extra, math.nan, -math.inf, "text \N{SNOWMAN}"])
    tensor.zero_()  # Copied by commit(): later changes are not of this step.
    toy.store.close()
    toy = resumed(tmp_path, 1)
    found, nan, infinity, text = toy.store.extra
    toy.store.close()
    assert math.isnan(nan)
    assert (infinity, text) == (-math.inf, "text \N{SNOWMAN}")
    found_tensor = found.pop("t")
    assert found == {"tuple": (1, [2.0, (True, None)]), 7: "an int as key", "huge": 10**30}
    assert type(found["tuple"]) is type(found["tuple"][1][1]) is tuple
    assert type(found["huge"]) is int
    assert found_tensor.dtype == torch.int16
    assert found_tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("extra", "error", "expected"),
    [
        ({"a": [1, object()]}, TypeError, r"extra\['a'\]\[1\]"),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, r"extra\['model'\]"),
        ([torch.zeros(2**24 + 1)], ValueError, r"the largest is extra\[0\]"),
    ],
    ids=["object", "module", "large"],
)
def test_a_bad_extra_is_refused_by_its_key_path(
    extra: Any, error: type[Exception], expected: str, tmp_path: Path
) -> None:
    make_run(tmp_path, steps=1)
    toy = resumed(tmp_path, 1)
    toy.step()
    with pytest.raises(error, match=expected):
        toy.store.commit(extra=extra)
    assert toy.store.committed_step == 1
    assert not list((tmp_path / RANK).glob("commit-0000000002*"))
    toy.store.commit(extra="better")
    toy.step()
    toy.store.close()
    resumed(tmp_path, 3).store.close()


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
    toy.store.scalars["second"] = {"step": value, "other": 1e-310}
    toy.store.close()
    toy = resumed(tmp_path, 1)
    assert toy.store.scalars.keys() == {"second"}
    found = toy.store.scalars["second"]
    assert found["other"] == 1e-310
    assert found["step"] == value or (math.isnan(found["step"]) and math.isnan(value))
    toy.store.close()


def test_commit_of_states_written_after_a_commit(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.commit()
    toy.store.write_states({"second": {"average": torch.full((9,), 5.0)}})
    toy.store.commit()
    toy.store.synchronize()
    toy.step()
    assert toy.store.restore() == 1
    assert torch.equal(toy.store.read_states()["second"]["average"], torch.full((9,), 5.0))
    toy.store.close()
