"""register(): what a program has beside its optimizer is part of each commit, and comes back."""

from __future__ import annotations

import logging
import math
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import muon
import tierstore
from tests.support.faults import FaultyStorage
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import RANK, Toy, make_run, unchanged, unchanged_parameters
from tests.support.twins import parameter
from tierstore.ranks.peers import Ranks
from tierstore.storage.memory import MemoryFiles, MemoryStorage


class Loader:
    """A data loader that counts its batches, and how often it was asked for its state."""

    def __init__(self, loaded: list[str] | None = None, name: str = "") -> None:
        self.batch = self.asked = 0
        self._loaded, self._name = loaded, name

    def state_dict(self) -> dict[str, int]:
        self.asked += 1
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]
        if self._loaded is not None:
            self._loaded.append(self._name)


def train(toy: Toy, loader: Loader, steps: int = 1) -> None:
    for _ in range(steps):
        loader.batch += 1
        toy.step()
        toy.store.commit()


def opened(directory: Any, **options: Any) -> tuple[Toy, Loader]:
    toy, loader = Toy(directory, **options), Loader()
    toy.store.register(loader=loader)
    return toy, loader


def crash(toy: Toy) -> None:
    """End as a kill would: what has begun is committed, and nothing else."""
    with pytest.raises(KeyboardInterrupt), toy.store:
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------- commits


@pytest.mark.parametrize("commit_every", [1, 3, None])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("call", ["close", "synchronize", "checkpoint"])
def test_states_come_from_commit_or_the_call_that_commits(
    call: str, asks: bool, commit_every: int | None, tmp_path: Path
) -> None:
    toy, loader = opened(tmp_path / "run", commit_every=commit_every)
    train(toy, loader)
    loader.batch += 1
    toy.step()
    if asks:
        toy.store.commit()
    loader.batch += 5  # As a loop does that reads ahead.
    calls: dict[str, Callable[[], Any]] = {
        "close": toy.store.close,
        "synchronize": toy.store.synchronize,
        "checkpoint": lambda: toy.store.checkpoint(tmp_path / "published"),
    }
    calls[call]()
    crash(toy)
    toy, loader = opened(tmp_path / "run", commit_every=commit_every, resume=True)
    assert toy.store.committed.step == 2
    assert toy.store.committed.states == {"loader": {"batch": 2 if asks else 7}}
    assert toy.store.restore() == 2
    assert loader.batch == (2 if asks else 7)
    toy.store.close()


def test_every_commit_asks_and_only_what_is_new_is_committed() -> None:
    made: list[str] = []

    def watch(operation: str, name: str, when: str) -> None:
        if (operation, when) == ("rename", "after") and name.startswith("commit-"):
            made.append(name[13:].removesuffix(".tmp"))

    files = MemoryFiles()
    toy, loader = opened(FaultyStorage(MemoryStorage(files), on_operation=watch), commit_every=2)
    train(toy, loader)  # Not due.
    assert (loader.asked, made) == (1, [])
    train(toy, loader)
    toy.store.commit()
    toy.store.synchronize()
    assert (loader.asked, made) == (3, ["0002"])
    loader.batch += 1
    toy.store.synchronize()  # It has the states of commit().
    assert (loader.asked, made) == (3, ["0002"])
    toy.store.commit()
    toy.store.synchronize()
    assert made == ["0002", "0002.2"]
    toy.store.pages.write_states({})
    toy.store.commit()
    toy.store.close()
    assert made == ["0002", "0002.2", "0002.3"]
    toy, loader = opened(MemoryStorage(files), resume=True)
    assert toy.store.restore() == 2
    assert loader.batch == 3
    toy.store.commit()  # Nothing is new.
    toy.store.close()
    assert "commit-0000000002.4" not in files.contents


def test_a_step_whose_predecessor_was_not_committed_is_refused(tmp_path: Path) -> None:
    toy, loader = opened(tmp_path)
    train(toy, loader)
    toy.step()
    refused = pytest.raises(tierstore.SweepError, match=r"step 2 was not committed.*commit\(\)")
    with unchanged_parameters(toy), refused:
        toy.step()
    toy.store.commit()
    toy.step()
    toy.store.synchronize()  # It has also asked.
    toy.step()
    toy.store.register(loader=None)
    toy.step()  # There is nothing that could be a batch ahead.
    toy.store.close()
    toy, loader = opened(tmp_path, resume=True)
    with pytest.warns(UserWarning, match="step 5 was committed without 'loader'"):
        assert toy.store.restore() == 5
    toy.step()  # A restored step is committed.
    toy.store.close()


def test_an_exception_between_step_and_commit_commits_nothing_new(tmp_path: Path) -> None:
    toy, loader = opened(tmp_path)
    train(toy, loader, 2)
    toy.step()
    loader.batch += 1
    crash(toy)
    toy, loader = opened(tmp_path, resume=True)
    assert (toy.store.restore(), loader.batch) == (2, 2)
    toy.store.close()


def test_a_skipped_step_is_committed_again_with_the_batch_after_it(tmp_path: Path) -> None:
    toy, loader = opened(tmp_path)
    train(toy, loader)
    loader.batch += 1  # Its gradients were not finite.
    toy.store.commit()
    toy.store.close()
    toy, loader = opened(tmp_path, resume=True)
    assert (toy.store.restore(), loader.batch) == (1, 2)
    toy.store.close()


@pytest.mark.parametrize(
    ("state", "error", "expected"),
    [
        ({"a": [1, object()]}, TypeError, r"registered\['own'\]\['a'\]\[1\]"),
        ({"model": torch.nn.Linear(1, 1)}, TypeError, r"registered\['own'\]\['model'\]"),
        ({0: torch.zeros(2**24 + 1)}, ValueError, r"the largest is registered\['own'\]\[0\]"),
    ],
    ids=["object", "module", "large"],
)
def test_a_bad_state_is_refused_by_its_path(
    state: dict[Any, Any], error: type[Exception], expected: str, tmp_path: Path
) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.synchronize()
    toy.step()
    toy.store.register(own=state)
    for call in (toy.store.commit, toy.store.synchronize):
        with pytest.raises(error, match=expected):
            call()
    assert toy.store.committed.step == 1
    assert not list((tmp_path / RANK).glob("commit-0000000002*"))
    state.clear()
    toy.store.commit()
    toy.store.close()
    toy = Toy(tmp_path, resume=True)
    assert toy.store.committed.states == {"own": {}}
    toy.store.close()


def test_what_cannot_be_registered(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        weight = parameter()
        optimizer = muon.Muon([("weight", weight)], store=store)
        with pytest.raises(TypeError, match=r"register\(number=\) takes a dict, or an object with"):
            store.register(good={}, number=1)
        with pytest.raises(TypeError, match="got the class RandomState: pass an object"):
            store.register(random=tierstore.RandomState)
        with pytest.raises(ValueError, match=r"got the Muon whose state is in the pages"):
            store.register(optimizer=optimizer)
        with pytest.raises(ValueError, match=r"cannot begin with '\$'"):
            store.register(**{"$tuple": {}})
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        store.synchronize()
        assert store.committed.states == {}
    with (
        tierstore.TierStore(None) as store,
        pytest.raises(tierstore.RunDirectoryError, match=r"register\(\) needs a store with a dir"),
    ):
        store.register(own={})
    with pytest.raises(tierstore.StoreClosedError):
        store.register(own={})


@pytest.mark.parametrize(
    ("before", "after"), [(True, 1), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
)
def test_a_state_that_is_equal_and_not_the_same_is_committed_again(
    before: Any, after: Any, tmp_path: Path
) -> None:
    toy, own = Toy(tmp_path), {"value": before}
    toy.store.register(own=own)
    toy.step()
    toy.store.commit()
    own["value"] = after
    toy.store.commit()
    toy.store.close()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        assert repr(store.committed.states["own"]["value"]) == repr(after)


def test_ranks_that_register_other_objects_are_refused(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> None:
        toy = Toy(tmp_path, process_group=ranks)
        toy.store.register(**{"common": {}, **({} if ranks.rank else {"log": {}})})
        toy.step()
        with pytest.raises(ValueError, match="registered is common, log on rank 0 and common on"):
            toy.store.commit()
        toy.store.register(log={})
        toy.store.commit()
        toy.store.close()

    on_ranks(2, act)


# ------------------------------------------------------------------------ what comes back


def test_a_state_that_a_dict_cannot_take_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    class Scale:
        value = 2.0

        def state_dict(self) -> float:
            return self.value

        def load_state_dict(self, state: float) -> None:
            self.value = state

    toy, scale = Toy(tmp_path), Scale()
    toy.store.register(scale=scale)
    toy.step()
    toy.store.commit()
    toy.store.close()
    toy, own, scale.value = Toy(tmp_path, resume=True), {"kept": 1}, 3.0
    toy.store.register(scale=own)
    with (
        unchanged_parameters(toy),
        pytest.raises(
            ValueError, match="with a float as the state of 'scale', which a dict cannot"
        ),
    ):
        toy.store.restore()
    assert own == {"kept": 1}
    toy.store.register(scale=scale)
    assert (toy.store.restore(), scale.value) == (1, 2.0)
    toy.store.close()


def test_values_come_back_with_their_types_as_they_were_at_commit(tmp_path: Path) -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    own = {"tuple": (1, [2.0, (True, None)]), 7: "a key", "huge": 10**30, "t": tensor}
    own |= {"nan": math.nan, "inf": -math.inf, "text": "\N{SNOWMAN}"}
    toy = Toy(tmp_path)
    toy.store.register(own=own)
    toy.step()
    toy.store.commit()
    tensor.zero_()
    own["huge"] = 0
    toy.store.close()
    toy = Toy(tmp_path, resume=True)
    found: dict[Any, Any] = {"of the program": 1}
    toy.store.register(own=found)
    toy.store.restore()
    toy.store.close()
    assert math.isnan(found.pop("nan"))
    assert found.pop("t").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found == {
        **{"tuple": (1, [2.0, (True, None)]), 7: "a key", "huge": 10**30},
        **{"inf": -math.inf, "text": "\N{SNOWMAN}"},
    }
    assert type(found["tuple"]) is type(found["tuple"][1][1]) is tuple


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()]


def test_random_generators_resume(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.store.register(random=tierstore.RandomState())
    toy.step()
    toy.store.commit()
    expected = draws()
    toy.store.close()
    draws()
    toy = Toy(tmp_path, resume=True)
    toy.store.register(random=tierstore.RandomState())
    toy.store.restore()
    assert draws() == expected
    toy.store.close()


def test_objects_are_loaded_in_order_after_pages_and_before_hyperparameters(tmp_path: Path) -> None:
    class Eager:
        """A scheduler that sets the learning rate of its optimizer when it is loaded."""

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            found.append(toy.parameters["second"].tolist())
            toy.groups[0].hyperparameters["lr"] = 7.0

    toy = Toy(tmp_path)
    toy.store.register(b=Loader(), scheduler=Eager(), a=Loader())
    toy.step()
    toy.store.close()
    toy, found = Toy(tmp_path, resume=True), []
    toy.store.register(a=Loader(found, "a"), scheduler=Eager(), b=Loader(found, "b"))
    toy.store.restore()
    assert found == ["a", [0.75] * 9, "b"]
    assert toy.groups[0].hyperparameters["lr"] == 0.25
    toy.assert_at(1)
    toy.store.close()


def test_a_state_that_nothing_takes_is_refused_before_anything_changes(tmp_path: Path) -> None:
    toy, loader = opened(tmp_path)
    train(toy, loader)
    toy.store.close()
    toy = Toy(tmp_path, resume=True)
    with (
        unchanged(tmp_path),
        unchanged_parameters(toy),
        pytest.raises(ValueError, match=r"step 1 was committed with 'loader'.*\(loader=None\)"),
    ):
        toy.store.restore()
    toy.store.register(loader=None)
    assert toy.store.restore() == 1
    toy.store.register(loader=loader)  # What is registered later is not loaded.
    loader.batch = 5
    train(toy, loader)
    toy.store.close()
    toy, loader = opened(tmp_path, resume=True)
    assert (toy.store.restore(), loader.batch) == (2, 6)
    toy.store.close()


def test_an_object_without_a_state_warns_and_stays(tmp_path: Path) -> None:
    make_run(tmp_path, steps=1)
    toy, loader = opened(tmp_path, resume=True)
    loader.batch = 4
    with pytest.warns(UserWarning, match="step 1 was committed without 'loader', which keeps"):
        assert toy.store.restore() == 1
    assert loader.batch == 4
    toy.store.close()
    toy, loader = opened(tmp_path / "new", resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toy.store.restore() == 0  # Nothing was committed: nothing is missing.
    assert toy.store.committed == tierstore.CommittedStep(step=0)
    toy.store.close()


def test_an_object_that_cannot_take_its_state_leaves_a_store_to_restore_again(
    tmp_path: Path,
) -> None:
    toy, loader = opened(tmp_path)
    train(toy, loader)
    toy.store.close()
    toy, loader = opened(tmp_path, resume=True)
    toy.store.register(loader=torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="state_dict") as caught:
        toy.store.restore()
    assert caught.value.__notes__ == ["the registered object 'loader' raised this"]
    with pytest.raises(tierstore.RunDirectoryError, match=r"call restore\(\)"):
        toy.step()
    toy.store.register(loader=loader)
    assert (toy.store.restore(), loader.batch) == (1, 1)
    toy.store.close()


# --------------------------------------------------------------------------- checkpoints


def published(directory: Path) -> Path:
    """A run of two steps, published after the first."""
    toy, loader = opened(directory / "run")
    train(toy, loader)
    toy.store.checkpoint(directory / "step-1")
    train(toy, loader)
    toy.store.close()
    return directory / "step-1"


def test_a_checkpoint_may_have_more_and_less_than_is_registered(tmp_path: Path) -> None:
    checkpoint = published(tmp_path)
    toy = Toy(tmp_path / "new")
    own = {"stays": 1}
    toy.store.register(own=own)
    with pytest.warns(UserWarning, match="loader|own") as caught:
        assert toy.store.restore(checkpoint) == 1
    texts = [str(warning.message) for warning in caught]
    assert any("the checkpoint has 'loader', but no object of that name" in text for text in texts)
    assert any("step 1 was committed without 'own'" in text for text in texts)
    assert own == {"stays": 1}
    toy.store.close()
    toy = Toy(tmp_path / "new", resume=True)
    assert toy.store.committed.states == {"own": {"stays": 1}}
    toy.store.close()


def test_a_run_that_begins_is_committed_as_it_began(tmp_path: Path) -> None:
    """The step commits the step of the checkpoint when the loader is a batch ahead."""
    checkpoint = published(tmp_path)
    toy, loader = opened(tmp_path / "new")
    assert (toy.store.restore(checkpoint), loader.batch) == (1, 1)
    loader.batch += 1
    toy.step()
    crash(toy)
    toy, loader = opened(tmp_path / "new", resume=True)
    assert (toy.store.restore(), loader.batch) == (1, 1)
    toy.store.close()


def test_a_rewind_brings_back_the_states_of_its_step(tmp_path: Path) -> None:
    checkpoint = published(tmp_path)
    toy, loader = opened(tmp_path / "run", resume=True)
    assert (toy.store.restore(), loader.batch) == (2, 2)
    train(toy, loader)
    assert (toy.store.restore(checkpoint, rewind=True), loader.batch) == (1, 1)
    assert toy.store.committed.states == {"loader": {"batch": 1}}
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    killed, again = opened(tmp_path / "killed", resume=True)
    assert (killed.store.restore(), again.batch) == (1, 1)
    killed.store.close()
    train(toy, loader)
    toy.store.close()
    toy, loader = opened(tmp_path / "run", resume=True)
    assert (toy.store.restore(), loader.batch) == (2, 2)
    toy.store.close()


# --------------------------------------------------------------------------------- ranks


def on_ranks(count: int, act: Callable[[Ranks], Any]) -> list[Any]:
    outcomes = ThreadJob(count).run(act)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def committed_by_two(directory: Path) -> None:
    """A step of two ranks, whose loaders are at other batches, and what is equal on both."""

    def act(ranks: Ranks) -> None:
        toy, loader = opened(directory / "run", process_group=ranks)
        toy.store.register(common={"epoch": 3}, random=tierstore.RandomState())
        loader.batch = 10 * ranks.rank
        train(toy, loader)
        toy.store.checkpoint(directory / "published")
        toy.store.close()

    on_ranks(2, act)


@pytest.mark.parametrize("source", ["run", "published"])
def test_each_of_as_many_ranks_gets_its_own_states(source: str, tmp_path: Path) -> None:
    committed_by_two(tmp_path)

    def act(ranks: Ranks) -> int:
        is_run = source == "run"
        toy, loader = opened(
            tmp_path / ("run" if is_run else "new"), resume=is_run, process_group=ranks
        )
        toy.store.register(common={}, random=None)
        toy.store.restore(None if is_run else tmp_path / "published")
        toy.store.close()
        return loader.batch

    assert on_ranks(2, act) == [1, 11]


@pytest.mark.parametrize("source", ["run", "published"])
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_ranks_gets_what_is_equal(
    count: int, source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    committed_by_two(tmp_path)
    caplog.set_level(logging.WARNING)
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    is_run = source == "run"

    def act(ranks: Ranks) -> tuple[int, Any, int]:
        toy, loader = opened(
            tmp_path / ("run" if is_run else "new"),
            resume=is_run,
            process_group=ranks,
        )
        if is_run:
            assert toy.store.committed.step == 1
            assert toy.store.committed.states["common"] == {"epoch": 3}
            assert "loader" not in toy.store.committed.states
        common: dict[str, int] = {}
        toy.store.register(common=common, random=tierstore.RandomState())
        refused = r"states of 'loader' differ.*as many ranks; or call store.register\(loader="
        with unchanged_parameters(toy), pytest.raises(ValueError, match=refused):
            toy.store.restore(None if is_run else tmp_path / "published")
        toy.store.register(loader=None)
        step = toy.store.restore(None if is_run else tmp_path / "published")
        toy.store.register(loader=loader)
        toy.store.close()
        return step, common, loader.batch

    torch.manual_seed(5)
    assert on_ranks(count, act) == [(1, {"epoch": 3}, 0)] * count
    assert torch.rand(2).tolist() == expected
    assert "the random generators 'random' keep the seeds of this program" in caplog.text


def test_a_state_that_changes_on_one_rank_is_committed_by_all(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> None:
        toy, loader = opened(tmp_path, process_group=ranks)
        train(toy, loader)
        toy.store.commit()
        toy.store.synchronize()
        assert toy.store._session.committer.committed.number == 1  # type: ignore[union-attr]
        loader.batch += ranks.rank
        toy.store.commit()
        toy.store.synchronize()
        assert toy.store._session.committer.committed.number == 2  # type: ignore[union-attr]
        toy.store.close()

    on_ranks(2, act)

    def find(ranks: Ranks) -> int:
        toy, loader = opened(tmp_path, resume=True, process_group=ranks)
        toy.store.restore()
        toy.store.close()
        return loader.batch

    assert on_ranks(2, find) == [1, 2]
