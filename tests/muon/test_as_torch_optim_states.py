"""State dicts, hooks and copies as torch.optim promises them, with every store."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.support.references import assert_same
from tests.support.stock_case import (
    StockCase,
    Twins,
    in_each_place,
    parameter,
    set_gradients,
    tensors,
    two,
)

StateDict = dict[str, Any]
Log = list[str]


def named() -> list[tuple[str, nn.Parameter]]:
    return [("first", parameter(1, 3, 4)), ("second", parameter(2, 5, 2))]


def copy_values(optimizer: torch.optim.Optimizer, source: torch.optim.Optimizer) -> None:
    for mine, other in zip(tensors(optimizer), tensors(source), strict=True):
        mine.data.copy_(other)


def is_as_before(optimizer: torch.optim.Optimizer, saved: StateDict) -> None:
    now = optimizer.state_dict()
    assert now["param_groups"] == saved["param_groups"]
    assert_same(now["state"], saved["state"])


def test_a_step_makes_the_states_of_torch(case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    for mine, other in zip(tensors(twins.ours), tensors(twins.stock), strict=True):
        states = twins.ours.state[mine]
        assert [*states] == [*twins.stock.state[other]]
        for name, value in twins.stock.state[other].items():
            assert torch.equal(states[name], value)
            assert states[name].dtype == value.dtype
    assert len(twins.ours.state) == len(twins.stock.state)


def test_a_state_dict_equals_torch(case: StockCase) -> None:
    twins = case.twins()
    twins.step(2)
    mine, other = (optimizer.state_dict() for optimizer in twins.both)
    assert_same(mine["state"], other["state"])
    (ours,), (stock,) = mine["param_groups"], other["param_groups"]
    assert {key: ours[key] for key in stock.keys() - {"foreach"}} == {
        key: stock[key] for key in stock.keys() - {"foreach"}
    }


@pytest.mark.parametrize(
    ("make", "steps_before", "place"), in_each_place([(two, 1), (two, 0), (named, 0), (named, 1)])
)
def test_a_state_dict_goes_to_another_optimizer(
    make: Callable[[], Any], steps_before: int, case: StockCase
) -> None:
    twins = case.twins(make, lr=0.02)
    twins.step(3)
    saved = twins.ours.state_dict()
    other = Twins(case.ours(make()), twins.stock)
    for step in range(steps_before):
        set_gradients(other.ours, step)
        other.ours.step()
    other.ours.load_state_dict(saved)
    copy_values(other.ours, twins.stock)
    assert other.ours.param_groups[0]["lr"] == 0.02
    other.step(2)
    other.assert_equal()


def test_torch_continues_from_our_state_dict(case: StockCase) -> None:
    twins = case.twins()
    twins.step(2)
    stock = case.stock(two())
    stock.load_state_dict(twins.ours.state_dict())
    copy_values(stock, twins.ours)
    other = Twins(twins.ours, stock)
    other.step(2)
    other.assert_equal()


def test_we_continue_from_the_state_dict_of_torch(case: StockCase) -> None:
    twins = case.twins()
    twins.step(2)
    ours = case.ours(two())
    ours.load_state_dict(twins.stock.state_dict())
    copy_values(ours, twins.stock)
    other = Twins(ours, twins.stock)
    other.step(2)
    other.assert_equal()


def test_state_dicts_of_equal_optimizers_are_equal(case: StockCase) -> None:
    saved = []
    for _ in range(2):
        optimizer = case.ours(two())
        for step in range(2):
            set_gradients(optimizer, step)
            optimizer.step()
        saved.append(optimizer.state_dict())
    first, second = saved
    assert first["param_groups"] == second["param_groups"]
    assert [*first["state"]] == [*second["state"]]
    assert_same(first["state"], second["state"])
    for index, states in first["state"].items():
        assert [*states] == [*second["state"][index]]


def test_a_loaded_state_dict_is_not_changed_by_steps(case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    saved = copy.deepcopy(twins.stock.state_dict())
    before = copy.deepcopy(saved)
    twins.ours.load_state_dict(saved)
    twins.step(2)
    assert_same(saved["state"], before["state"])
    assert saved["param_groups"] == before["param_groups"]


def test_a_state_dict_of_an_older_version_lacks_keys(case: StockCase) -> None:
    """Values that are not in the state dict stay, as for the flags of torch.optim."""
    twins = case.twins()
    twins.step(2)
    for optimizer in twins.both:
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            for flag in (
                ("nesterov", "ns_steps", "adjust_lr_fn")
                if optimizer is twins.ours and case.is_muon
                else ("maximize", "foreach", "differentiable", "capturable", "fused", "amsgrad")
            ):
                group.pop(flag, None)
        optimizer.load_state_dict(saved)
    twins.step(2)
    twins.assert_equal()


@pytest.mark.parametrize(
    ("is_named", "steps_before", "place"),
    in_each_place([(True, 1), (True, 0), (False, 0), (False, 1)]),
)
def test_names_of_a_state_dict(is_named: bool, steps_before: int, case: StockCase) -> None:
    """Parameters keep the names that they have, or have none."""
    twins = case.twins(two if is_named else named)
    twins.step(2)
    saved = twins.ours.state_dict()
    assert ("param_names" in saved["param_groups"][0]) != is_named
    other = case.ours([(f"my {n}", p) for n, p in named()] if is_named else two())
    for step in range(steps_before):
        set_gradients(other, step)
        other.step()
    other.load_state_dict(saved)
    assert_same(other.state_dict()["state"], saved["state"])
    expected = ["my first", "my second"] if is_named else None
    assert other.param_groups[0].get("param_names") == expected
    copy_values(other, twins.stock)
    pair = Twins(other, twins.stock)
    pair.step(2)
    pair.assert_equal()


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_state_dict_is_saved_and_loaded(
    weights_only: bool, case: StockCase, tmp_path: Path
) -> None:
    twins = case.twins(lr=torch.tensor(0.01))
    twins.step(2)
    saved = twins.ours.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=weights_only)
    assert_same(loaded["state"], saved["state"])
    assert loaded["param_groups"] == saved["param_groups"]
    twins.ours.load_state_dict(loaded)
    twins.step(2)
    twins.assert_equal()


@pytest.mark.parametrize("value", [2, 2.0, torch.tensor([2.0]), torch.tensor(2)])
def test_the_step_of_a_state_dict_need_not_be_a_float_tensor(value: Any, adamw: StockCase) -> None:
    twins = adamw.twins()
    twins.step(2)
    saved = copy.deepcopy(twins.stock.state_dict())
    for states in saved["state"].values():
        states["step"] = value
    twins.ours.load_state_dict(saved)
    for states in twins.ours.state_dict()["state"].values():
        assert torch.equal(states["step"], torch.tensor(2.0))
    twins.step()
    twins.assert_equal()


def test_states_are_loaded_in_the_dtype_of_the_parameter(case: StockCase) -> None:
    twins = case.twins()
    twins.step(2)
    saved = twins.ours.state_dict()
    for states in saved["state"].values():
        for name, value in states.items():
            states[name] = value.double()
    twins.ours.load_state_dict(saved)
    twins.stock.load_state_dict(saved)
    twins.step()
    twins.assert_equal()
    for states in twins.ours.state_dict()["state"].values():
        assert {value.dtype for value in states.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("edit", "place"), in_each_place([("a parameter more",), ("a group more",), ("no groups",)])
)
def test_a_state_dict_of_other_groups_changes_nothing(edit: str, case: StockCase) -> None:
    twins = case.twins()
    twins.step(2)
    saved = twins.ours.state_dict()
    before = copy.deepcopy(saved)
    groups = saved["param_groups"]
    saved["param_groups"] = {
        "a parameter more": [{**groups[0], "params": [0, 1, 2]}],
        "a group more": [*groups, groups[0]],
        "no groups": [],
    }[edit]
    for optimizer in twins.both:
        with pytest.raises(ValueError, match="group"):
            optimizer.load_state_dict(saved)
    is_as_before(twins.ours, before)
    twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("when", ["pre", "post"])
def test_step_hooks(when: str, case: StockCase) -> None:
    twins = case.twins()
    logs: list[Log] = [[], []]
    for optimizer, log in zip(twins.both, logs, strict=True):

        def hook(given: Any, args: Any, kwargs: Any, log: Log = log, me: Any = optimizer) -> None:
            assert given is me
            log.append(f"{len(args)} {kwargs}")

        register = getattr(optimizer, f"register_step_{when}_hook")
        register(hook)
        second = register(hook)
        for each in range(2):
            set_gradients(optimizer, each)
            optimizer.step()
            second.remove()
    # As many calls as of the stock optimizer.
    assert len(logs[0]) == len(logs[1]) == 3
    assert logs[0] == logs[1]
    twins.assert_equal()


def test_a_hook_before_a_step_may_change_its_arguments(case: StockCase) -> None:
    optimizer = case.ours(two())
    calls = []

    def closure(value: int) -> int:
        set_gradients(optimizer, 1)
        calls.append(value)
        return value

    optimizer.register_step_pre_hook(lambda _, args, __: ((args[0], lambda: closure(2)), {}))
    assert optimizer.step(lambda: closure(1)) == 2  # type: ignore[func-returns-value]
    assert calls == [2]


def test_hooks_of_all_optimizers_run_around_hooks_of_one(case: StockCase) -> None:
    twins = case.twins()
    logs: list[Log] = []
    for optimizer in twins.both:
        log: Log = []
        handles = [
            register_optimizer_step_pre_hook(lambda *_, log=log: log.append("all, before")),
            register_optimizer_step_post_hook(lambda *_, log=log: log.append("all, after")),
            optimizer.register_step_pre_hook(lambda *_, log=log: log.append("before")),
            optimizer.register_step_post_hook(lambda *_, log=log: log.append("after")),
        ]
        try:
            set_gradients(optimizer, 1)
            optimizer.step()
        finally:
            for handle in handles:
                handle.remove()
        set_gradients(optimizer, 2)
        optimizer.step()
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4
    twins.assert_equal()


@pytest.mark.parametrize("prepend", [True, False])
def test_hooks_of_state_dict(prepend: bool, case: StockCase) -> None:
    twins = case.twins(lr=0.01)
    twins.step()
    logs: list[Log] = []
    for optimizer in twins.both:
        log: Log = []

        def before(given: Any, log: Log = log) -> None:
            log.append("before")
            given.param_groups[0]["lr"] = 0.5

        def after(given: Any, saved: StateDict, log: Log = log) -> StateDict:
            log.append(f"after {saved['param_groups'][0]['lr']}")
            return {**saved, "more": 1}

        optimizer.register_state_dict_pre_hook(before)
        optimizer.register_state_dict_pre_hook(lambda _, log=log: log.append("2"), prepend=prepend)
        optimizer.register_state_dict_post_hook(after)
        optimizer.register_state_dict_post_hook(
            lambda *_, log=log: log.append("3"),  # type: ignore[misc]
            prepend=prepend,
        )
        saved = optimizer.state_dict()
        assert saved["more"] == 1
        assert saved["param_groups"][0]["lr"] == 0.5
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4
    assert (logs[0][0] == "2") == prepend


@pytest.mark.parametrize("prepend", [True, False])
def test_hooks_of_load_state_dict(prepend: bool, case: StockCase) -> None:
    twins = case.twins(lr=0.01)
    twins.step()
    logs: list[Log] = []
    for optimizer in twins.both:
        log: Log = []

        def before(given: Any, saved: StateDict, log: Log = log) -> StateDict:
            log.append(f"before {given.param_groups[0]['lr']}")
            return {**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.25}]}

        def after(given: Any, log: Log = log) -> None:
            log.append(f"after {given.param_groups[0]['lr']}")
            given.param_groups[0]["weight_decay"] = 0.3

        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_pre_hook(
            lambda *_, log=log: log.append("2"),  # type: ignore[misc]
            prepend=prepend,
        )
        optimizer.register_load_state_dict_post_hook(after)
        optimizer.register_load_state_dict_post_hook(
            lambda _, log=log: log.append("3"), prepend=prepend
        )
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert saved["param_groups"][0]["lr"] == 0.01  # The caller's is not changed.
        assert optimizer.param_groups[0]["lr"] == 0.25
        logs.append(log)
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4
    assert (logs[0][0] == "2") == prepend
    twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("place", ["none"])
def test_a_copy_has_all_public_attributes(
    how: str, steps: int, case: StockCase, tmp_path: Path
) -> None:
    twins = case.twins(lr=0.02)
    twins.step(steps)
    if how == "deepcopy":
        copied = copy.deepcopy(twins.ours)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(twins.ours))
    else:
        torch.save(twins.ours, tmp_path / "optimizer.pt")
        copied = torch.load(tmp_path / "optimizer.pt", weights_only=False)
    public = {name for name in vars(twins.ours) if not name.startswith("_")}
    assert {name for name in vars(copied) if not name.startswith("_")} == public
    assert copied.defaults == twins.ours.defaults
    # The store of a copy counts its own steps.
    assert repr(copied) == repr(twins.ours).replace(f"step {steps}", "step 0")
    is_as_before(copied, twins.ours.state_dict())
    other = Twins(copied, twins.stock)
    other.step(2)
    other.assert_equal()


def test_a_state_dict_is_copied_and_pickled(case: StockCase) -> None:
    """The way for an optimizer with a store."""
    twins = case.twins()
    twins.step(2)
    copies: list[Callable[[StateDict], StateDict]] = [
        copy.deepcopy,
        lambda saved: pickle.loads(pickle.dumps(saved)),
    ]
    for copied in copies:
        twins.ours.load_state_dict(copied(twins.ours.state_dict()))
        twins.step()
        twins.assert_equal()


def test_states_are_changed_in_between(case: StockCase) -> None:
    """The state of a parameter is assigned, or removed."""
    twins = case.twins()
    twins.step(2)
    for optimizer in twins.both:
        first, second = tensors(optimizer)
        optimizer.state[first] = {
            name: value if name == "step" else value * 0.5
            for name, value in optimizer.state[first].items()
        }
        optimizer.state.pop(second)
    twins.step(2)
    twins.assert_equal()
