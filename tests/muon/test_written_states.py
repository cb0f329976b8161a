"""States that users and frameworks write through ``optimizer.state``."""

from __future__ import annotations

import collections
import collections.abc
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
from tests.support.adamw import AdamW
from tests.support.twins import PLACE_NAMES, PLACES, SHAPE, Twins, open_store, parameter

# ------------------------------------------------------------------------- written states


def state_of(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> str:
    """Return the name of a state."""
    return "momentum_buffer" if "momentum_buffer" in optimizer.state[first] else "exp_avg"


def assign(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state[first][state_of(optimizer, first)] = torch.full(SHAPE, 2.0)


def assign_through_item(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    states = {key: value.clone() * 2 for key, value in optimizer.state[first].items()}
    optimizer.state[first] = states


def pop(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state.pop(first)


def delete(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    del optimizer.state[first]


def clear_one(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state[first].clear()


def empty_one(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state[first] = {}


def clear(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state.clear()


def replace_all(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state = collections.defaultdict(dict)


def replace_by_a_dict(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    optimizer.state = collections.defaultdict(dict, {first: optimizer.state[first]})


def swap(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Give each parameter the states of the other."""
    one, two = (dict(states) for states in optimizer.state.values())
    names = list(optimizer.state)
    optimizer.state = collections.defaultdict(dict, {names[0]: two, names[1]: one})


def scale(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Change a tensor in place and put it back."""
    states, name = optimizer.state[first], state_of(optimizer, first)
    value = states[name]
    value *= 3
    states[name] = value


def to_another_parameter(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    _, second = optimizer.state
    optimizer.state[second] = optimizer.state.pop(first)


def move_as_lightning_does(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Rebuild each mapping of states as its own class, and leave other objects as they are."""
    for each, states in optimizer.state.items():
        if isinstance(states, collections.abc.Mapping):
            states = type(states)({key: value.to("cpu") for key, value in states.items()})
        optimizer.state[each] = states


def rebuild(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Move all states to a device as frameworks do: each mapping is made anew."""
    for each, states in optimizer.state.items():
        optimizer.state[each] = {key: value.to("cpu") for key, value in states.items()}


def move(optimizer: torch.optim.Optimizer, first: nn.Parameter) -> None:
    """Move all states to a device as frameworks do: each tensor is put back."""
    for states in optimizer.state.values():
        for key, value in list(states.items()):
            states[key] = value.to("cpu")


@pytest.mark.parametrize(
    "touch",
    [
        assign,
        assign_through_item,
        pop,
        delete,
        clear,
        clear_one,
        empty_one,
        replace_all,
        replace_by_a_dict,
        swap,
        scale,
        rebuild,
        move,
        move_as_lightning_does,
        to_another_parameter,
    ],
)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@PLACES
def test_a_written_state_counts_as_in_torch(
    place: str, algorithm: str, touch: Callable[..., None], tmp_path: Path
) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store, algorithm=algorithm)
        twins.step()
        for optimizer, parameters in twins.both:
            touch(optimizer, parameters["first"])
        twins.step()
        twins.assert_identical()


def test_a_state_in_memory_changed_in_place_counts_as_in_torch() -> None:
    twins = Twins()
    twins.step()
    for optimizer, parameters in twins.both:
        optimizer.state[parameters["first"]]["momentum_buffer"].zero_()
    twins.step()
    twins.assert_identical()


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


@pytest.mark.parametrize("call", ["step", "commit", "synchronize", "checkpoint"])
def test_a_refused_change_is_written_once_it_is_assigned(call: str, tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path / "run") as store:
        twins = Twins(store=store)
        twins.step()
        calls: dict[str, Callable[[], Any]] = {
            "step": twins.optimizer.step,
            "commit": store.commit,
            "synchronize": store.synchronize,
            "checkpoint": lambda: store.checkpoint(tmp_path / "out"),
        }
        states = twins.optimizer.state[twins.ours["first"]]
        states["momentum_buffer"].zero_()
        twins.stock.state[twins.theirs["first"]]["momentum_buffer"].zero_()
        for _ in range(2):
            with (
                twins.unchanged(),
                pytest.raises(ValueError, match="'momentum_buffer' of parameter 'first'"),
            ):
                calls[call]()
        states["momentum_buffer"] = states["momentum_buffer"]
        if call != "step":
            calls[call]()
        twins.step()
        twins.assert_identical()


def test_a_change_in_place_that_nothing_else_found_is_raised_by_close(tmp_path: Path) -> None:
    store = tierstore.TierStore(tmp_path)
    twins = Twins(store=store, algorithm="adamw")
    twins.step()
    twins.optimizer.state[twins.ours["first"]]["step"].zero_()
    with pytest.raises(ValueError, match="'step' of parameter 'first'"):
        store.close()
    with tierstore.TierStore(tmp_path, resume=True) as store:  # The step was committed.
        assert Twins(store=store, algorithm="adamw").optimizer.restore() == 1


def test_restore_drops_a_change_in_place(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        store.synchronize()
        twins.optimizer.state[twins.ours["first"]]["momentum_buffer"].zero_()
        assert twins.optimizer.restore() == 1
        twins.step()
        twins.assert_identical()


def test_tensors_of_a_state_dict_are_the_callers_own(tmp_path: Path) -> None:
    for place in PLACE_NAMES:
        with open_store(place, tmp_path) as store:
            twins = Twins(store=store)
            twins.step()
            twins.optimizer.state_dict()["state"][0]["momentum_buffer"].zero_()
            twins.step()
            twins.assert_identical()


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq", "step"])
def test_states_of_adamw_in_memory_are_changed_in_place(state: str) -> None:
    twins = Twins(algorithm="adamw")
    twins.step()
    for optimizer, parameters in twins.both:
        optimizer.state[parameters["first"]][state].mul_(0.5).add_(1)
    twins.step()
    twins.assert_identical()


def test_a_view_in_memory_stays_one_while_steps_go_on() -> None:
    twins = Twins()
    twins.step()
    held = [optimizer.state[of["first"]]["momentum_buffer"] for optimizer, of in twins.both]
    twins.step()
    assert torch.equal(*held)
    for tensor in held:
        tensor.zero_()
    twins.step()
    twins.assert_identical()


def test_a_parameter_larger_than_a_page_has_one_view_in_memory() -> None:
    weight, other = (parameter(shape=(300, 20)) for _ in range(2))
    with tierstore.TierStore(None, page_bytes=4096) as store:
        optimizer = muon.Muon([{"params": [("weight", weight)], "algorithm": "adamw"}], store=store)
        stock = AdamW([other], lr=1e-3)
        for step in range(3):
            weight.grad, other.grad = (parameter(step, (300, 20)).detach() for _ in range(2))
            optimizer.step()
            stock.step()
            optimizer.state[weight]["exp_avg"].zero_()
            stock.state[other]["exp_avg"].zero_()
        assert torch.equal(weight, other)


def test_a_view_in_memory_is_saved_alone(tmp_path: Path) -> None:
    weights = [parameter(shape=(200, 200)) for _ in range(8)]
    optimizer = muon.Muon(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.save(optimizer.state[weights[0]]["momentum_buffer"], tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 2 * weights[0].nbytes


@PLACES
def test_states_are_changed_before_the_first_step(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        state = torch.full(SHAPE, 2.0)
        twins.optimizer.state[twins.ours["first"]]["momentum_buffer"] = state
        twins.stock.state[twins.theirs["first"]]["momentum_buffer"] = state.clone()
        twins.step()
        twins.assert_identical()


def test_only_the_pages_of_a_written_state_are_written(tmp_path: Path) -> None:
    weights = [parameter(shape=(100, 100)) for _ in range(4)]
    named = [(f"weight{number}", weight) for number, weight in enumerate(weights)]
    with tierstore.TierStore(tmp_path, page_bytes=100_000, buffers=2) as store:
        optimizer = muon.Muon(named, store=store)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        store.synchronize()
        assert store.stats().pages == 4
        written = store.stats().bytes_written
        optimizer.state[weights[1]]["momentum_buffer"] = torch.zeros(100, 100)
        store.synchronize()
        assert 0 < store.stats().bytes_written - written <= store.stats().state_bytes // 4
    with tierstore.TierStore(tmp_path, resume=True) as store:
        optimizer = muon.Muon(named, store=store)
        assert optimizer.restore() == 1
        zeros = [not optimizer.state[weight]["momentum_buffer"].any() for weight in weights]
        assert zeros == [False, True, False, False]


@pytest.mark.parametrize("touch", [rebuild, move, move_as_lightning_does])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_move_to_the_same_device_writes_nothing(
    steps: int, touch: Callable[..., None], tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store, algorithm="adamw")
        for _ in range(steps):
            twins.step()
            store.synchronize()
        written = store.stats().bytes_written
        touch(twins.optimizer, twins.ours["first"])
        if steps:
            store.synchronize()
        assert store.stats().bytes_written == written
        twins.step()
        twins.assert_identical()


def refused(twins: Twins, raises: Any, match: str | None, call: Callable[[Any], Any]) -> None:
    before = copy.deepcopy(twins.optimizer.state_dict()["state"])
    with pytest.raises(raises, match=match):
        call(twins.optimizer.state)
    for index, states in twins.optimizer.state_dict()["state"].items():
        for name, value in states.items():
            assert torch.equal(value, before[index][name])


@PLACES
def test_states_that_do_not_fit_are_refused_by_name(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store, algorithm="adamw")
        twins.step()
        first, mine = twins.ours["first"], torch.zeros(SHAPE)
        known = "'first' has no state 'mine', only 'step', 'exp_avg', 'exp_avg_sq'"
        refused(twins, KeyError, known, lambda state: state[first].__setitem__("mine", mine))
        refused(twins, KeyError, known, lambda state: state.__setitem__(first, {"mine": mine}))
        refused(
            twins, ValueError, "exp_avg_sq", lambda state: state.__setitem__(first, {"step": 1})
        )
        refused(
            twins,
            ValueError,
            "'exp_avg'",
            lambda state: state[first].__setitem__("exp_avg", torch.zeros(2)),
        )
        refused(twins, TypeError, "'first'", lambda state: state[first].__delitem__("exp_avg"))
        refused(twins, KeyError, None, lambda state: state.__setitem__(nn.Parameter(mine), {}))
        refused(twins, KeyError, None, lambda state: state.pop(nn.Parameter(mine)))
        with pytest.raises(ValueError, match="parameters of this optimizer"):
            twins.optimizer.reset_state([nn.Parameter(mine)])


@PLACES
def test_entries_of_others_are_in_the_state_dict_as_in_torch(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        saved = []
        for optimizer, _ in twins.both:
            optimizer.state["calls"] = 7
            saved.append(optimizer.state_dict())
            del optimizer.state["calls"]
            assert "calls" not in optimizer.state
        ours, theirs = (list(each["state"]) for each in saved)
        assert ours == theirs == [0, 1, "calls"]
        for (optimizer, _), each in zip(twins.both, saved, strict=True):
            optimizer.load_state_dict(each)
            assert optimizer.state["calls"] == 7
            assert optimizer.state.pop("calls") == 7
            assert optimizer.state.pop("calls", None) is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_an_optimizer_has_its_own_states(how: str, dtype: torch.dtype) -> None:
    weights = [nn.Parameter(parameter(seed).detach().to(dtype)) for seed in range(2)]
    groups = [
        {"params": [("matrix", weights[0])], "lr": 0.5},
        {"params": [("other", weights[1])], "algorithm": "adamw", "lr": 0.25},
    ]
    optimizer = muon.Muon(groups, ns_steps=3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
    optimizer.state["calls"] = 3
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    scheduler.step()
    pair = optimizer, weights
    copied, others = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert copied.param_groups[1]["params"][0] is others[1]
    assert copied.defaults == optimizer.defaults
    mine, theirs = optimizer.state_dict(), copied.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert theirs["state"]["calls"] == 3
    for index in range(2):
        for name, value in mine["state"][index].items():
            assert torch.equal(value, theirs["state"][index][name])
    for weight, other in zip(weights, others, strict=True):
        other.grad = weight.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.equal(weights[0], others[0])
    copied.step()
    assert all(map(torch.equal, weights, others))
    copied.state[others[0]]["momentum_buffer"].zero_()
    assert optimizer.state[weights[0]]["momentum_buffer"].any()


def test_states_read_in_inference_mode_are_watched(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        with torch.inference_mode():
            state = twins.optimizer.state[twins.ours["first"]]["momentum_buffer"]
            twins.optimizer.load_state_dict(twins.optimizer.state_dict())
        state = twins.optimizer.state[twins.ours["first"]]["momentum_buffer"]
        state.zero_()
        with pytest.raises(ValueError, match="'momentum_buffer' of parameter 'first'"):
            store.synchronize()


# --------------------------------------------------------------- methods of a mapping


@PLACES
def test_the_states_of_a_parameter_have_the_methods_of_a_mapping(
    place: str, tmp_path: Path
) -> None:
    """They have all methods of a dict that torch.optim code calls, and lose no single state."""
    with open_store(place, tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        states = twins.optimizer.state[twins.ours["first"]]
        other = torch.zeros(SHAPE)
        assert torch.equal(states.setdefault("momentum_buffer", other), states["momentum_buffer"])
        assert states["momentum_buffer"].any()
        with pytest.raises(KeyError, match="has no state 'mine'"):
            states.setdefault("mine", other)
        assert states.pop("mine", None) is None
        with pytest.raises(KeyError, match="has no state 'mine'"):
            states.pop("mine")
        with pytest.raises(TypeError, match="cannot be removed alone"):
            states.pop("momentum_buffer", None)
        assert not isinstance(states, collections.abc.Mapping)  # Frameworks would rebuild it.
        twins.step()
        twins.assert_identical()


def test_states_after_a_move_are_views_of_the_memory_that_counts() -> None:
    """A store without a directory shows its memory, which a move replaces."""
    weight = torch.nn.Parameter(torch.ones(8, 8))
    with tierstore.TierStore(None, host_memory="1MiB", device_memory="1MiB") as store:
        optimizer = muon.Muon([{"params": [("w", weight)], "algorithm": "adamw"}], store=store)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        before = optimizer.state[weight]["exp_avg"]
        for tier in ("device", "host"):
            store.move(tier)
            shown = optimizer.state[weight]["exp_avg"]
            assert torch.equal(shown, before)
            shown.fill_(0.5)
            assert torch.equal(store.pages.read_states()["w"]["exp_avg"], torch.full((8, 8), 0.5))
            shown.copy_(before)
        optimizer.step()
        assert torch.equal(optimizer.state[weight]["exp_avg"], 0.9 * before + 0.1)
