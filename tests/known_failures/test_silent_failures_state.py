"""States that users and frameworks write, and state dicts.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.twins import Twins, parameter

NOT_RAISED = pytest.fail.Exception
REFUSED = (ValueError, RuntimeError, tierstore.TierstoreError)

PLACES = pytest.mark.parametrize("place", ["memory", "disk"])


def open_store(place: str, directory: Path) -> tierstore.TierStore:
    return tierstore.TierStore(directory if place == "disk" else None)


# ------------------------------------------------------------------------- written states


def assign(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state[first]["momentum_buffer"] = torch.full_like(first, 2)


def pop(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state.pop(first)


def clear(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state.clear()


def replace_all(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state = collections.defaultdict(dict)


def rebuild(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Move all states to a device as frameworks do: each mapping is made anew."""
    for each, states in optimizer.state.items():
        optimizer.state[each] = {key: value.to("cpu") for key, value in states.items()}


def move(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Move all states to a device as frameworks do: each tensor is put back."""
    for states in optimizer.state.values():
        for key, value in list(states.items()):
            states[key] = value.to("cpu")


def failing(touch: Callable[..., None], raises: type[BaseException], reason: str) -> Any:
    mark = pytest.mark.xfail(strict=True, raises=raises, reason=reason)
    return pytest.param(touch, marks=mark, id=touch.__name__)


@pytest.mark.parametrize(
    "touch",
    [
        failing(assign, TypeError, "the mapping of states takes no assignment"),
        failing(pop, AttributeError, "the mapping of states has no pop()"),
        failing(clear, AttributeError, "the mapping of states has no clear()"),
        failing(replace_all, AssertionError, "the pages keep what the new mapping lacks"),
        failing(rebuild, TypeError, "the mapping of states takes no assignment"),
        failing(move, TypeError, "the mapping of states takes no assignment"),
    ],
)
@PLACES
def test_a_written_state_counts_as_in_torch(
    place: str, touch: Callable[..., None], tmp_path: Path
) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        for optimizer, parameters in twins.both:
            touch(optimizer, parameters["first"])
        twins.step()
        twins.assert_identical()


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the tensor is a copy of the state in the page"
)
def test_a_state_in_memory_changed_in_place_counts_as_in_torch() -> None:
    twins = Twins()
    twins.step()
    for optimizer, parameters in twins.both:
        optimizer.state[parameters["first"]]["momentum_buffer"].zero_()
    twins.step()
    twins.assert_identical()


@pytest.mark.xfail(
    strict=True, raises=NOT_RAISED, reason="the change is lost and nobody looks for it"
)
@pytest.mark.parametrize("call", ["step", "commit"])
def test_a_state_on_disk_changed_in_place_is_refused_by_name(call: str, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        twins.optimizer.state[twins.ours["first"]]["momentum_buffer"].zero_()
        twins.set_gradients()
        before = twins.ours["first"].detach().clone()
        with pytest.raises(REFUSED, match="first"):
            twins.optimizer.step() if call == "step" else store.commit(extra=1)
        assert torch.equal(twins.ours["first"], before)


@pytest.mark.xfail(
    strict=True, raises=TypeError, reason="the mapping of states takes no assignment"
)
@PLACES
def test_a_hook_may_keep_a_value_of_its_own_in_the_state(place: str, tmp_path: Path) -> None:
    def count(optimizer: Any, *_: Any) -> None:
        optimizer.state["calls"] = optimizer.state.get("calls", 0) + 1

    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        for optimizer, _ in twins.both:
            optimizer.register_step_pre_hook(count)
        twins.step()
        twins.step()
        assert [optimizer.state["calls"] for optimizer, _ in twins.both] == [2, 2]
        twins.assert_identical()


@pytest.mark.xfail(strict=True, raises=AttributeError, reason="there is no reset_state()")
@pytest.mark.parametrize("names", [None, ["first"]])
@PLACES
def test_reset_state_begins_anew(place: str, names: list[str] | None, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store, algorithm="adamw")
        twins.step()
        optimizer: Any = twins.optimizer
        if names is None:
            optimizer.reset_state()
            twins.stock.state.clear()
        else:
            optimizer.reset_state([twins.ours[name] for name in names])
            for name in names:
                del twins.stock.state[twins.theirs[name]]
        twins.step()
        twins.assert_identical()


@pytest.mark.xfail(
    strict=True, raises=TypeError, reason="an optimizer without a store on disk is refused, too"
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_an_optimizer_in_memory_is_copied(how: str) -> None:
    twins = Twins()
    twins.step()
    pair = twins.optimizer, twins.ours
    copied, parameters = (
        copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    )
    twins.set_gradients()
    for name, values in parameters.items():
        values.grad = twins.theirs[name].grad
    copied.step()
    twins.stock.step()
    for name, values in parameters.items():
        assert torch.equal(values, twins.theirs[name]), name
        assert not torch.equal(values, twins.ours[name]), name


# ---------------------------------------------------------------------------- state dicts


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the whole state is written again")
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


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="step has the default dtype")
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


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="bfloat16 has no number 301")
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


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="tensors are made in the context")
@PLACES
def test_a_state_dict_is_on_the_cpu_in_any_device_context(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        optimizer = adamw(store)
        with torch.device("meta"):
            saved = optimizer.state_dict()
        devices = {key: value.device.type for key, value in saved["state"][0].items()}
        assert set(devices.values()) == {"cpu"}, devices
