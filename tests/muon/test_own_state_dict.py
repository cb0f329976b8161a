"""State dicts that are loaded into the optimizer they came from, and their dtypes and devices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.twins import PLACE_NAMES, PLACES, Twins, open_store, parameter


def test_loading_its_own_state_dict_writes_nothing(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        store.synchronize()
        saved = twins.optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.25
        written = store.stats().bytes_written
        twins.optimizer.load_state_dict(saved)
        assert twins.optimizer.param_groups[0]["lr"] == 0.25
        store.synchronize()
        assert store.stats().bytes_written == written


@PLACES
def test_a_change_that_leaves_no_trace_is_loaded(place: str, tmp_path: Path) -> None:
    """numpy, ``.data`` and collectives change a tensor without a new version."""
    with open_store(place, tmp_path) as store:
        optimizer = adamw(store)
        saved = optimizer.state_dict()
        saved["state"][0]["exp_avg"].numpy().fill(5)
        optimizer.load_state_dict(saved)
        assert (optimizer.state_dict()["state"][0]["exp_avg"] == 5).all()


@pytest.fixture
def default_dtype() -> Any:
    """Return what sets the default dtype until the test ends."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def adamw(store: tierstore.TierStore, steps: int = 1) -> muon.Muon:
    weight = parameter()
    optimizer = muon.Muon([{"params": [("weight", weight)], "algorithm": "adamw"}], store=store)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer


@PLACES
def test_step_is_float32_whatever_the_default_dtype(
    place: str, default_dtype: Callable[[torch.dtype], None], tmp_path: Path
) -> None:
    with open_store(place, tmp_path) as store:
        optimizer = adamw(store)
        default_dtype(torch.float64)
        assert optimizer.state_dict()["state"][0]["step"].dtype == torch.float32
        (states,) = optimizer.state.values()
        assert states["step"].dtype == torch.float32


def test_a_state_dict_counts_steps_exactly_whatever_the_default_dtype(
    default_dtype: Callable[[torch.dtype], None],
) -> None:
    with tierstore.TierStore(None) as store:
        optimizer = adamw(store)
        saved = optimizer.state_dict()
        saved["state"][0]["step"] = torch.tensor(301.0)
        optimizer.load_state_dict(saved)
        default_dtype(torch.bfloat16)
        assert optimizer.state_dict()["state"][0]["step"].item() == 301


@PLACES
def test_a_state_dict_is_on_the_cpu_in_any_device_context(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        optimizer = adamw(store)
        with torch.device("meta"):
            saved = optimizer.state_dict()
        devices = {key: value.device.type for key, value in saved["state"][0].items()}
        assert set(devices.values()) == {"cpu"}, devices


def to_device(value: Any) -> Any:
    """Move a state dict as accelerate does in prepare()."""
    if isinstance(value, list | tuple):
        return type(value)(to_device(item) for item in value)
    if isinstance(value, dict):
        return type(value)({key: to_device(item) for key, item in value.items()})
    return value.to("cpu") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_framework_that_moves_the_state_dict_writes_nothing(
    steps: int, algorithm: str, tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store, algorithm=algorithm)
        for _ in range(steps):
            twins.step()
        if steps:
            store.synchronize()
        written = store.stats().bytes_written
        twins.optimizer.load_state_dict(to_device(twins.optimizer.state_dict()))
        if steps:
            store.synchronize()
        assert store.stats().bytes_written == written
        twins.step()
        twins.assert_identical()


def changed_in_place(twins: Twins, saved: Any) -> None:
    saved["state"][0]["exp_avg"].zero_()


def step_changed(twins: Twins, saved: Any) -> None:
    saved["state"][0]["step"] = torch.tensor(9.0)


def copied(twins: Twins, saved: Any) -> None:
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].clone()


def left_out(twins: Twins, saved: Any) -> None:
    del saved["state"][0]


def stepped(twins: Twins, saved: Any) -> None:
    twins.step()


def written(twins: Twins, saved: Any) -> None:
    twins.optimizer.reset_state([twins.ours["second"]])


def restored(twins: Twins, saved: Any) -> None:
    twins.optimizer.restore()


@pytest.mark.parametrize(
    ("place", "change"),
    [
        *product(PLACE_NAMES, [changed_in_place, step_changed, copied, left_out, stepped, written]),
        ("disk", restored),
    ],
)
def test_anything_else_is_loaded_as_in_torch(
    place: str, change: Callable[..., None], tmp_path: Path
) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store, algorithm="adamw")
        twins.step()
        if place == "disk":
            store.synchronize()
        saved = twins.optimizer.state_dict()
        before = store.stats().bytes_written
        change(twins, saved)
        expected = {
            index: {name: value.clone() for name, value in states.items()}
            for index, states in saved["state"].items()
        }
        twins.optimizer.load_state_dict(saved)
        if place == "disk":
            store.synchronize()
            assert store.stats().bytes_written > before
        for index, states in twins.optimizer.state_dict()["state"].items():
            for name, value in states.items():
                given = expected.get(index, {}).get(name, torch.zeros_like(value))
                assert torch.equal(value, given), (index, name)


def test_loading_its_own_state_dict_drops_a_change_in_place(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        store.synchronize()
        saved = twins.optimizer.state_dict()
        twins.optimizer.state[twins.ours["first"]]["momentum_buffer"].zero_()
        twins.optimizer.load_state_dict(saved)
        twins.step()
        twins.assert_identical()


@PLACES
def test_a_device_context_matters_nowhere(place: str, tmp_path: Path) -> None:
    """In steps, states, commits and a restart."""
    directory = tmp_path / "run"
    with open_store(place, directory) as store:
        twins = Twins(store=store, algorithm="adamw")
        twins.set_gradients()
        with torch.device("meta"):
            twins.optimizer.step()
            (states, _) = twins.optimizer.state.values()
            assert {value.device.type for value in states.values()} == {"cpu"}
            found = store.pages.read_states()["first"].values()
            assert {value.device.type for value in found} == {"cpu"}
            if place == "disk":
                store.register(random=tierstore.RandomState())
                store.commit()
                store.checkpoint(tmp_path / "out")
        twins.stock.step()
        twins.step()
        twins.assert_identical()
    if place == "disk":
        with tierstore.TierStore(directory, resume=True) as store:
            again = Twins(store=store, algorithm="adamw")
            with torch.device("meta"):
                store.register(random=tierstore.RandomState())
                assert again.optimizer.restore() == 2
        for name, value in twins.ours.items():
            assert torch.equal(again.ours[name], value)
