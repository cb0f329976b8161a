"""Parameters that are removed from an optimizer: as if they had never been there, from then on."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.independent_reader import read_checkpoint, read_run
from tests.support.kept import commit_with, wanted
from tests.support.references import assert_same
from tests.support.toy import Toy
from tests.support.training import SHAPES
from tests.support.twins import PLACES, Twins, open_store, parameter
from tierstore.inspection.summary import summarize
from tierstore.inspection.verify import verify

STREAMED: dict[str, Any] = {"page_bytes": 10000, "buffers": 3}
STORES: dict[str, dict[str, Any] | None] = {
    "memory": None,
    "streamed": STREAMED,
    "one slot": {**STREAMED, "commit_every": None},
    "resting": {"page_bytes": 10000, "host_memory": "64MiB"},
    "partly": {"page_bytes": 10000, "host_memory": 120000},
    "device": {"page_bytes": 10000, "host_memory": 65536, "device_memory": "1MiB"},
    "on the host": {**STREAMED, "compute": "host"},
}
# One parameter of a page with others, all of a page, all of a group, one without elements.
CHOICES: list[list[str]] = [
    ["tall"],
    ["embedding"],
    ["slow"],
    ["cube", "rarely", "empty"],
    ["wide", "bias", "empty"],
    list(SHAPES),
]
MIXED = ["tall", "slow", "cube", "bias", "empty"]


class Trained:
    """A training whose parameters can be compared with one in which none was removed."""

    def __init__(
        self,
        directory: Path | None,
        options: dict[str, Any] | None,
        dtype: torch.dtype = torch.float32,
        removed: list[str] | None = None,
        **more: Any,
    ) -> None:
        self.parameters = training.make_parameters(dtype)
        store_options = {} if options is None else {**options, **more}
        self.store = tierstore.TierStore(None if options is None else directory, **store_options)
        self.removed = removed or []
        kept = {name: shape for name, shape in SHAPES.items() if name not in self.removed}
        groups = training.make_all_groups(self.parameters, kept)
        self.optimizer = muon.Muon(groups, store=self.store)

    def train(self, *steps: int) -> None:
        for step in steps:
            training.set_gradients(self.parameters, step)
            self.optimizer.step()

    def remove(self, names: list[str]) -> None:
        self.optimizer.remove_parameters([self.parameters[name] for name in names[::2]])
        self.optimizer.remove_parameters(names[1::2])
        self.removed = names

    def assert_as(self, reference: Trained) -> None:
        kept = [name for name in SHAPES if name not in self.removed]
        for name in kept:
            assert torch.equal(self.parameters[name], reference.parameters[name]), name
        states, expected = self.store.read_states(), reference.store.read_states()
        assert_same(states, {name: expected[name] for name in states})
        assert sorted(states) == sorted(kept)
        scalars = reference.store.scalars
        assert self.store.scalars == {name: scalars[name] for name in kept if name in scalars}


def reference_and_ours(
    directory: Path,
    *steps: int,
    options: dict[str, Any] | None = STREAMED,
    dtype: torch.dtype = torch.float32,
) -> tuple[Trained, Trained]:
    """Train in memory, where nothing is to be removed, and in a directory."""
    both = Trained(None, None, dtype), Trained(directory, options, dtype)
    for trained in both:
        trained.train(*steps)
    return both


@pytest.mark.parametrize(
    ("kind", "dtype", "removed"),
    [
        *(("streamed", torch.float32, names) for names in CHOICES),
        *((kind, torch.bfloat16, MIXED) for kind in STORES),
    ],
)
def test_the_others_go_on_as_before(
    kind: str, dtype: torch.dtype, removed: list[str], tmp_path: Path
) -> None:
    reference, ours = reference_and_ours(
        tmp_path / "run", 1, 2, 3, options=STORES[kind], dtype=dtype
    )
    before = {name: ours.parameters[name].detach().clone() for name in removed}
    ours.remove(removed)
    ours.assert_as(reference)
    for trained in (reference, ours):
        trained.train(4, 5)
    ours.assert_as(reference)
    for name, values in before.items():
        assert torch.equal(ours.parameters[name], values)
    assert [len(group["params"]) for group in ours.optimizer.param_groups] == [
        sum(group == number and name not in removed for name, (_, group) in SHAPES.items())
        for number in range(5)
    ]
    if STORES[kind] is None:
        return
    ours.store.checkpoint(tmp_path / "published")
    ours.store.close()
    for path in (tmp_path / "run", tmp_path / "published"):
        report = verify(path)
        assert report.good, report.faults
        assert {found.name for found in summarize(path).parameters} == SHAPES.keys() - set(removed)
    assert read_run(tmp_path / "run").states.keys() == SHAPES.keys() - set(removed)
    assert read_checkpoint(tmp_path / "published").states.keys() == SHAPES.keys() - set(removed)
    again = Trained(tmp_path / "run", STORES[kind], dtype, removed, resume=True)
    assert again.optimizer.restore() == 5
    again.assert_as(reference)
    for trained in (reference, again):
        trained.train(6, 7)
    again.assert_as(reference)
    again.store.close()
    assert verify(tmp_path / "run").good


def test_begin_from_a_checkpoint_without_the_parameters(tmp_path: Path) -> None:
    removed = ["tall", "slow", "bias"]
    reference, ours = reference_and_ours(tmp_path / "run", 1, 2)
    ours.remove(removed)
    ours.store.checkpoint(tmp_path / "published")
    ours.store.close()
    again = Trained(tmp_path / "new", STREAMED, removed=removed)
    assert again.optimizer.restore(checkpoint=tmp_path / "published") == 2
    again.assert_as(reference)
    for trained in (reference, again):
        trained.train(3)
    again.assert_as(reference)
    again.store.close()


def test_state_dicts_and_schedulers_go_on() -> None:
    twins = Twins([["first", "second"], ["third"]], rates=[0.5, 0.25], algorithm="adamw")
    schedulers = [training.make_scheduler(optimizer) for optimizer, _ in twins.both]
    twins.step()
    twins.optimizer.remove_parameters(["first", "third"])
    for index, group in enumerate(twins.stock.param_groups):
        for key in ("params", "param_names"):
            del group[key][0]
        del twins.stock.state[twins.theirs["third" if index else "first"]]
    for _ in range(2):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.assert_identical()
    saved, expected = twins.optimizer.state_dict(), twins.stock.state_dict()
    assert_same(saved["state"], expected["state"])
    assert [group["params"] for group in saved["param_groups"]] == [[0], []]
    assert list(twins.optimizer.state) == [twins.ours["second"]]
    twins.optimizer.load_state_dict(expected)
    twins.step()
    twins.assert_identical()


def test_a_removed_parameter_is_not_kept_alive(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        named = {name: parameter(seed) for seed, name in enumerate(("kept", "removed"))}
        optimizer = muon.Muon(list(named.items()), store=store)
        for each in named.values():
            each.grad = torch.ones_like(each)
        optimizer.step()
        dead = weakref.ref(named["removed"])
        optimizer.remove_parameters(["removed"])
        del named["removed"], each
        gc.collect()
        assert dead() is None
        named["kept"].grad = torch.ones_like(named["kept"])
        optimizer.step()


def test_before_the_first_step_and_of_a_group_to_come(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins([["first", "second"]], store=store, algorithm="adamw")
        twins.optimizer.remove_parameters(["second"])
        assert twins.optimizer.param_groups[0]["param_names"] == ["first"]
        twins.step()
        twins.add("third")
        late = {"params": [("third", twins.ours["third"])], "algorithm": "adamw"}
        twins.optimizer.add_param_group(late)
        twins.optimizer.remove_parameters([twins.ours["third"]])
        twins.stock.param_groups[0]["params"].pop()
        twins.step()
        assert store.read_states().keys() == {"first"}
        assert torch.equal(twins.ours["first"], twins.theirs["first"])


@PLACES
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["first", "unknown"], "'unknown' is in no param group"),
        ([parameter(5)], r"of shape \[3, 4\] is in no param group"),
    ],
)
def test_an_unknown_parameter_is_refused(
    place: str, wrong: list[Any], message: str, tmp_path: Path
) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        with pytest.raises(ValueError, match=message):
            twins.optimizer.remove_parameters(wrong)
        twins.step()
        twins.assert_identical()


def test_a_name_of_the_run_is_not_used_again(tmp_path: Path) -> None:
    """In memory it may: frozen parameters thaw."""
    for directory in (tmp_path, None):
        with tierstore.TierStore(directory) as store:
            twins = Twins(store=store)
            twins.step()
            twins.optimizer.remove_parameters(["second"])
            twins.optimizer.add_param_group({"params": [("second", twins.ours["second"])]})
            if directory is None:
                twins.set_gradients()
                twins.optimizer.step()
                continue
            for _ in range(2):
                with pytest.raises(ValueError, match="'second', which was removed"):
                    twins.optimizer.step()
            twins.optimizer.remove_parameters(["second"])
            twins.optimizer.add_param_group({"params": [("another", twins.ours["second"])]})
            twins.set_gradients()
            twins.optimizer.step()
            assert store.read_states().keys() == {"first", "another"}


def interrupt(store: tierstore.TierStore) -> None:
    """End a run as a crash would: nothing is committed any more."""
    store.__exit__(RuntimeError)


@pytest.mark.parametrize("commits", [False, True])
def test_a_crash_before_the_next_commit_undoes_a_removal(commits: bool, tmp_path: Path) -> None:
    reference, ours = reference_and_ours(tmp_path, 1, 2)
    commit_with(ours.store, {"position": 7})
    ours.store.synchronize()
    ours.remove(["tall", "slow"])
    if commits:
        ours.store.synchronize()
    interrupt(ours.store)
    removed = ["tall", "slow"] if commits else []
    again = Trained(tmp_path, STREAMED, removed=removed, resume=True)
    with wanted(again.store) as kept:
        assert again.optimizer.restore() == 2
    assert kept == {"state": {"position": 7}}
    again.assert_as(reference)
    again.store.close()


def test_restore_in_the_same_process(tmp_path: Path) -> None:
    """Back to a commit after the removal; a commit before it is refused by name."""
    reference, ours = reference_and_ours(tmp_path, 1, 2)
    ours.store.synchronize()
    ours.remove(["tall", "slow"])
    with pytest.raises(tierstore.RunMismatchError, match=r"step 2 .*'slow', which was removed"):
        ours.optimizer.restore()
    ours.assert_as(reference)
    for trained in (reference, ours):
        trained.train(3)
    ours.store.synchronize()
    ours.train(4)
    assert ours.optimizer.restore() == 3
    ours.assert_as(reference)
    for trained in (reference, ours):
        trained.train(4, 5)
    ours.assert_as(reference)
    ours.store.close()


def test_resume_with_a_parameter_that_the_run_has_lost(tmp_path: Path) -> None:
    ours = Trained(tmp_path, STREAMED)
    ours.train(1)
    ours.remove(["tall", "slow"])
    ours.store.close()
    for removed in ([], ["tall"]):
        again = Trained(tmp_path, STREAMED, removed=removed, resume=True)
        with pytest.raises(tierstore.RunMismatchError, match=r"slow|tall"):
            again.optimizer.restore()
        again.store.close()
    again = Trained(tmp_path, STREAMED, resume=True)
    with pytest.raises(
        tierstore.RunMismatchError,
        match=r"no longer has parameter 'slow'.*without \['slow', 'tall'\]",
    ):
        again.optimizer.restore()
    again.store.close()


def test_groups_added_after_a_removal(tmp_path: Path) -> None:
    reference, ours = reference_and_ours(tmp_path, 1)
    late = [parameter(7), parameter(7)]
    for trained, each in zip((reference, ours), late, strict=True):
        if trained is ours:
            trained.remove(["tall", "slow", "cube"])
        trained.optimizer.add_param_group({"params": [("late", each)], "lr": 0.125})
        trained.parameters["late"] = each
        for step in (2, 3):
            training.set_gradients(
                {name: p for name, p in trained.parameters.items() if name != "late"}, step
            )
            each.grad = torch.ones_like(each)
            trained.optimizer.step()
    assert torch.equal(*late)
    ours.store.close()
    again = Trained(tmp_path, STREAMED, removed=["tall", "slow", "cube"], resume=True)
    last = parameter(0)
    again.optimizer.add_param_group({"params": [("late", last)]})
    assert again.optimizer.restore() == 3
    assert torch.equal(last, late[0])
    assert again.optimizer.param_groups[5]["lr"] == 0.125
    again.store.close()
    assert verify(tmp_path).good


def page_names(run: Path) -> set[str]:
    return {path.name for path in (run / "rank-00000").glob("page-*")}


@pytest.mark.parametrize("commit_every", [1, None])
def test_files_go_when_no_commit_has_the_page(commit_every: int | None, tmp_path: Path) -> None:
    """And the files and slots of the other pages are those of a run without a removal."""
    runs = []
    for name in ("control", "ours"):
        trained = Trained(tmp_path / name, STREAMED, commit_every=commit_every)
        trained.train(1, 2)
        trained.store.checkpoint(tmp_path / f"{name}-published")  # The run now has spare files.
        runs.append(trained)
    ours = runs[1]
    whole = page_names(tmp_path / "ours")
    assert whole == page_names(tmp_path / "control")
    ours.remove(["slow"])
    assert page_names(tmp_path / "ours") == whole
    for count in (1, 2):
        for trained in runs:
            trained.train(2 + count)
            trained.store.synchronize()
        left = page_names(tmp_path / "ours")
        gone = page_names(tmp_path / "control") - left
        assert len({name[:11] for name in gone}) == (commit_every is None or count == 2)
    for name in left:
        one, other = (tmp_path / run / "rank-00000" / name for run in ("ours", "control"))
        assert one.stat().st_size == other.stat().st_size
    for trained in runs:
        trained.store.close()
    for published in ("ours-published", "control-published"):
        assert verify(tmp_path / published).good


def test_a_mapped_state_outlives_its_file(tmp_path: Path) -> None:
    ours = Trained(tmp_path, STREAMED)
    ours.train(1, 3)
    found = ours.store.read_states(["slow"])["slow"]["momentum_buffer"]
    expected = found.clone()
    assert expected.any()
    ours.remove(["slow"])
    ours.train(4, 5, 7, 8)
    ours.store.close()
    assert torch.equal(found, expected)


def test_removal_with_a_prefetch_and_writes_in_flight(tmp_path: Path) -> None:
    reference, ours = reference_and_ours(tmp_path, 1)
    ours.optimizer.prefetch()
    ours.remove(["wide", "tall", "square", "row", "column"])
    for trained in (reference, ours):
        trained.train(2)
    ours.assert_as(reference)
    ours.store.close()


def test_a_wrapped_model_resumes_without_the_parameters(tmp_path: Path) -> None:
    """The run has the names of one wrapper, the program that resumes has another."""
    shared = {"tail": parameter(3), "kept": parameter(1), "lost": parameter(2)}
    with tierstore.TierStore(tmp_path, page_bytes=4096) as store:
        optimizer = muon.Muon(
            [(f"_orig_mod.{name}", each) for name, each in shared.items()], store=store
        )
        for each in shared.values():
            each.grad = torch.ones_like(each)
        optimizer.step()
        optimizer.remove_parameters(["_orig_mod.lost"])
        expected = store.read_states()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        again = {"tail": parameter(8), "kept": parameter(9)}
        optimizer = muon.Muon(list(again.items()), store=store)
        assert optimizer.restore() == 1
        for name, each in again.items():
            assert torch.equal(each, shared[name])
        found = store.read_states()
        assert_same({f"_orig_mod.{name}": states for name, states in found.items()}, expected)
        for each in again.values():
            each.grad = torch.ones_like(each)
        optimizer.step()
    assert verify(tmp_path).good


def test_a_string_is_not_an_iterable_of_names(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([(name, parameter()) for name in ("a", "b", "ab")], store=store)
        with pytest.raises(TypeError, match="iterable of parameters or names"):
            optimizer.remove_parameters("ab")
        with pytest.raises(TypeError, match="iterable of names"):
            store.remove("ab")
        assert optimizer.param_groups[0]["param_names"] == ["a", "b", "ab"]


@PLACES
def test_an_iterator_is_used_once(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins([["first", "second", "third"]], store=store)
        twins.step()
        members = [twins.ours[name] for name in ("first", "third")]
        twins.optimizer.remove_parameters(each for each in members)
        del twins.stock.param_groups[0]["params"][::2]
        twins.step()
        twins.assert_identical()
        assert store.read_states(iter(["second"])).keys() == {"second"}
        store.write_states({}, names=iter(["second"]))
        assert not store.read_states()["second"]["momentum_buffer"].any()


@PLACES
def test_a_removal_from_the_store_alone_is_refused(place: str, tmp_path: Path) -> None:
    """The store of an optimizer that follows nothing takes an iterator."""
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        with pytest.raises(ValueError, match=r"which is optimizer\.remove_parameters\(\) for muon"):
            store.remove(["second"])
        twins.step()
        twins.assert_identical()
    toy = Toy(None if place == "memory" else tmp_path / "toy")
    toy.step()
    toy.store.remove(name for name in list(toy.parameters) if name != "second")
    assert toy.store.read_states().keys() == {"second"}
    toy.step(["second"])
    assert toy.parameters["second"].tolist() == [0.5] * 9
    toy.store.close()
