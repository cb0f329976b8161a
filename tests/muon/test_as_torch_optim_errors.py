"""Refusals of torch.optim, and refusals of Muon alone: docs/reference/torch-optim.md."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.references import assert_same
from tests.support.stock_case import (
    ALGORITHMS,
    StockCase,
    Twins,
    in_each_place,
    parameter,
    random,
    set_gradients,
    tensors,
    two,
)

TEXT = (Path(__file__).parents[2] / "docs/reference/torch-optim.md").read_text()
PAGE = re.sub(r"\n *", " ", TEXT)


def assert_listed(raised: pytest.ExceptionInfo[Exception]) -> None:
    """Assert that the page of differences has a message."""
    assert f"`{raised.type.__name__}`: `{raised.value}`" in PAGE


def assert_steps_on(twins: Twins) -> None:
    """Assert that a refused call changed nothing."""
    twins.step(2)
    twins.assert_equal()


def make(case: StockCase, is_ours: bool) -> Callable[..., torch.optim.Optimizer]:
    return case.ours if is_ours else case.stock


# Groups that both refuse in the constructor, or in add_param_group().
one = parameter(1, 3, 4)
GROUPS: dict[str, tuple[Any, type[Exception], str]] = {
    "not a dict": (3, TypeError, "must be a dict"),
    "a set": ({"params": {one}}, TypeError, "ordered collections"),
    "not tensors": ({"params": [1]}, TypeError, "can only optimize Tensors"),
    "not a leaf": ({"params": [one * 2]}, ValueError, "non-leaf"),
    "names": ({"params": [("x", one)]}, ValueError, "with/without names"),
    "some names": ({"params": [("x", one), one]}, ValueError, "with/without names"),
    "no params": ({}, KeyError, "params"),
}


@pytest.mark.parametrize(("name", "place"), in_each_place([(name,) for name in GROUPS]))
def test_a_group_that_cannot_be_added(name: str, case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    group, error, message = GROUPS[name]
    for optimizer in twins.both:
        added = copy.copy(group)
        if optimizer is twins.ours and isinstance(group, dict):
            added["algorithm"] = case.algorithm
        with pytest.raises(error, match=message):
            optimizer.add_param_group(added)
        assert len(optimizer.param_groups) == 1
    assert_steps_on(twins)


def test_a_parameter_of_another_group_cannot_be_added(case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    for optimizer in twins.both:
        group = case.group([tensors(optimizer)[0]])
        if optimizer is twins.stock:
            del group["algorithm"]
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group(group)
    assert_steps_on(twins)


@pytest.mark.parametrize("is_ours", [True, False])
def test_groups_may_not_share_a_parameter(is_ours: bool, case: StockCase) -> None:
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        make(case, is_ours)([{"params": [one]}, {"params": [one]}])


def test_a_parameter_twice_in_a_group_warns(case: StockCase) -> None:
    ours, theirs = parameter(1, 3, 4), parameter(1, 3, 4)
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        optimizer = case.ours([ours, ours])
    stock = case.stock([theirs])
    for step in range(3):
        ours.grad = theirs.grad = random(step, 3, 4)
        optimizer.step()
        stock.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("number", "is_ours", "place"), in_each_place([(0, True), (0, False), (1, True), (1, False)])
)
def test_all_parameters_have_names_or_none(number: int, is_ours: bool, case: StockCase) -> None:
    other = parameter(2, 3, 4)
    message = "all optimizer param" + ("s" if number == 0 else " groups")
    params: list[Any] = [("a", one), other]
    if number:
        params = [{"params": [("a", one)]}, {"params": [other]}]
    with pytest.raises(ValueError, match=f"{message} should be with/without names"):
        make(case, is_ours)(params)


@pytest.mark.parametrize("cls", [muon.Muon, torch.optim.Muon, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (one, TypeError, "should be an iterable of Tensors or dicts"),
        ([], ValueError, "empty parameter list"),
        (3, TypeError, "not iterable"),
        ([one, 3], TypeError, "can only optimize Tensors"),
        ([one * 2], ValueError, "non-leaf"),
    ],
)
def test_params_of_another_kind(cls: Any, params: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        cls(params)


# Values that both refuse, with a message of ours.
BOTH: list[tuple[str, dict[str, Any], str]] = [
    ("both", {"lr": -1.0}, "lr must not be negative, got -1.0"),
    ("both", {"lr": torch.tensor([0.1, 0.2])}, "lr must have one element"),
    ("both", {"weight_decay": -1}, "weight_decay must not be negative, got -1"),
    ("muon", {"momentum": -1.0}, r"momentum must lie in \[0, 1\], got -1.0"),
    ("muon", {"ns_steps": 100}, r"ns_steps must be a whole number in \[0, 100\), got 100"),
    ("muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
    ("muon", {"adjust_lr_fn": "arbitrary"}, "adjust_lr_fn must be one of"),
    ("adamw", {"eps": -1.0}, "eps must not be negative"),
    ("adamw", {"betas": (1.0, 0.0)}, r"betas must be two numbers in \[0, 1\), got \(1.0, 0.0\)"),
    ("adamw", {"betas": (0.9, -0.1)}, "betas must be two numbers in"),
]

# Values that torch.optim takes: rows of docs/reference/torch-optim.md.
ONLY_OURS: list[tuple[str, dict[str, Any], str]] = [
    ("muon", {"momentum": 1.5}, r"momentum must lie in \[0, 1\], got 1.5"),
    ("muon", {"eps": -1.0}, "eps must not be negative, got -1.0"),
    ("adamw", {"amsgrad": True}, "amsgrad is not supported, got True in param group 0: leave it"),
    ("adamw", {"capturable": True}, "capturable is not supported, got True in param group 0"),
    ("adamw", {"differentiable": True}, "differentiable is not supported, got True in param"),
    (
        "adamw",
        {"betas": np.array([0.9, 0.99])},
        r"betas must be two numbers in \[0, 1\), got array\(.*\): pass a tuple of Python numbers",
    ),
    (
        "both",
        {"lr": np.array(0.1)},
        r"lr must be a number, got array\(0.1\): pass a Python number, or a tensor of one element",
    ),
    (
        "muon",
        {"ns_coefficients": np.array([3.4, -4.7, 2.0])},
        r"ns_coefficients must be .*, got array\(.*\): pass a tuple of Python numbers",
    ),
]


def cases(values: list[tuple[str, dict[str, Any], str]]) -> list[Any]:
    found = []
    for algorithm in ALGORITHMS:
        own = [(algorithm, *row) for name, *row in values if name in ("both", algorithm)]
        for _, options, message, place in in_each_place(own):
            name = f"{algorithm}-{options}-{place}"
            found.append(pytest.param(algorithm, options, message, place, id=name))
    return found


@pytest.mark.parametrize(("algorithm", "options", "message", "place"), cases(BOTH))
def test_a_value_out_of_range(options: dict[str, Any], message: str, case: StockCase) -> None:
    """torch.optim.Muon checks some values in step()."""

    def step_stock() -> None:
        stock = case.stock(two(), **options)
        set_gradients(stock, 1)
        stock.step()

    with pytest.raises(ValueError):
        step_stock()
    with pytest.raises(ValueError, match=message):
        case.ours(two(), **options)


@pytest.mark.parametrize(("algorithm", "options", "message", "place"), cases(BOTH + ONLY_OURS))
def test_a_value_out_of_range_is_refused_at_the_next_step(
    options: dict[str, Any], message: str, case: StockCase
) -> None:
    """torch.optim checks most values in the constructor only."""
    twins = case.twins()
    twins.step()
    group = twins.ours.param_groups[0]
    before = {key: group.get(key) for key in options}
    group.update(options)
    set_gradients(twins.ours, 2)
    with pytest.raises(ValueError, match=message):
        twins.ours.step()
    group.update(before)
    assert_steps_on(twins)


@pytest.mark.parametrize(("algorithm", "options", "message", "place"), cases(ONLY_OURS))
def test_a_value_that_torch_takes(options: dict[str, Any], message: str, case: StockCase) -> None:
    case.stock(two(), **options)
    with pytest.raises(ValueError, match=message) as raised:
        case.ours(two(), **options)
    assert_listed(raised)


def test_foreach_with_a_tensor_lr_is_not_refused(adamw: StockCase) -> None:
    """Ours takes it; torch.optim.AdamW refuses it."""
    options = {"lr": torch.tensor(0.01), "foreach": True}
    with pytest.raises(ValueError, match="lr as a Tensor is not supported"):
        adamw.stock(two(), **options)
    twins = Twins(adamw.ours(two(), **options), adamw.stock(two(), lr=torch.tensor(0.01)))
    twins.step(2)
    twins.assert_equal()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_muon_needs_matrices(shape: tuple[int, ...], muon_case: StockCase) -> None:
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        muon_case.stock([parameter(1, *shape)])
    with pytest.raises(ValueError, match="Muon needs two-dimensional parameters"):
        muon_case.ours([parameter(1, *shape)])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_dtypes_that_cannot_be_paged(dtype: torch.dtype, case: StockCase) -> None:
    message = f"parameter '0.0' has dtype {str(dtype)[6:]}; only bfloat16, float16, float32"
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        case.ours([torch.ones(2, 3, dtype=dtype)])
    if dtype.is_complex:
        assert_listed(raised)


def test_parameters_on_meta(case: StockCase) -> None:
    with pytest.raises(ValueError, match=r"'0\.0' is on meta") as raised:
        case.ours([nn.Parameter(torch.empty(2, 3, device="meta"))])
    assert_listed(raised)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_sparse_gradients(steps_before: int, case: StockCase) -> None:
    stock = case.stock(two())
    twins = case.twins()
    twins.step(steps_before)
    for optimizer in (twins.ours, stock):
        set_gradients(optimizer, 2)
        second = tensors(optimizer)[1]
        second.grad = torch.ones(second.shape).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        stock.step()
    with pytest.raises(ValueError, match=r"gradient of '0\.1' is sparse") as raised:
        twins.ours.step()
    assert_listed(raised)
    assert_steps_on(twins)


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_an_optimizer_with_a_store_is_not_copied(
    how: Callable[[Any], Any], case: StockCase
) -> None:
    twins = case.twins()
    twins.step()
    with pytest.raises(
        TypeError, match="a Muon optimizer with a store, or on several ranks"
    ) as raised:
        how(twins.ours)
    assert_listed(raised)
    assert_steps_on(twins)


def test_a_gradient_that_is_not_finite(case: StockCase) -> None:
    twins = case.twins()
    twins.step()
    set_gradients(twins.ours, 2)
    gradient = tensors(twins.ours)[1].grad
    assert gradient is not None
    gradient[0, 0] = torch.inf
    with pytest.raises(tierstore.NonFiniteGradientError, match=r"'0\.1'"):
        twins.ours.step()
    assert_steps_on(twins)


def test_a_step_without_gradients_warns_once(case: StockCase) -> None:
    optimizer = case.ours(two())
    with pytest.warns(UserWarning, match="no parameter has a gradient") as warned:
        optimizer.step()
    assert f"`{warned[0].message}`" in PAGE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_states_are_there_before_the_first_step(case: StockCase) -> None:
    twins = case.twins()
    saved = twins.ours.state_dict()
    assert [*saved["state"]] == [0, 1]
    assert not any(value.any() for states in saved["state"].values() for value in states.values())
    assert twins.stock.state_dict()["state"] == {}
    twins.stock.load_state_dict(saved)
    assert_steps_on(twins)


def test_the_step_is_float32_whatever_the_default_dtype(adamw: StockCase) -> None:
    twins = adamw.twins()
    torch.set_default_dtype(torch.float64)
    try:
        twins.step()
        saved = [optimizer.state_dict()["state"][0]["step"] for optimizer in twins.both]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.dtype for each in saved] == [torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("stock", "message"),
    [
        (torch.optim.Adam, "decoupled_weight_decay is not supported, got False in param group 0"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "amsgrad is not supported, got"),
    ],
)
def test_a_state_dict_of_another_rule(
    stock: Callable[..., torch.optim.Optimizer], message: str, adamw: StockCase
) -> None:
    twins = adamw.twins()
    twins.step()
    other = stock(two())
    set_gradients(other, 1)
    other.step()
    before = twins.ours.state_dict()
    with pytest.raises(ValueError, match=message) as raised:
        twins.ours.load_state_dict(other.state_dict())
    assert_listed(raised)
    assert_same(twins.ours.state_dict()["state"], before["state"])
    assert_steps_on(twins)


def test_values_that_a_loaded_group_lacks_stay(case: StockCase) -> None:
    """torch.optim drops the keys that a state dict lacks."""
    twins = case.twins(lr=0.02)
    twins.step()
    saved = twins.ours.state_dict()
    saved["param_groups"] = [{"params": group["params"]} for group in saved["param_groups"]]
    twins.ours.load_state_dict(saved)
    assert_steps_on(twins)


def test_defaults_come_from_muon_groups(adamw: StockCase) -> None:
    """A later AdamW group has the defaults of torch.optim.AdamW, not of the optimizer."""
    optimizer = adamw.ours(two())
    optimizer.defaults["lr"] = 0.5
    optimizer.add_param_group(adamw.group([parameter(3, 2, 2)]))
    assert optimizer.param_groups[1]["lr"] == 0.001
    set_gradients(optimizer, 1)
    optimizer.step()


def test_a_matrix_without_columns(muon_case: StockCase) -> None:
    optimizer = muon_case.ours([parameter(1, 3, 0), parameter(2, 3, 4)])
    stock = muon_case.stock([parameter(1, 3, 0)])
    for each in (optimizer, stock):
        set_gradients(each, 1)
    with pytest.raises(ZeroDivisionError):
        stock.step()
    optimizer.step()


def test_other_names_of_parameters_are_refused(case: StockCase) -> None:
    """torch.optim goes by position, and takes the names in the state dict."""
    ours, stock = (build([("a", parameter(1, 3, 4))]) for build in (case.ours, case.stock))
    saved = [build([("b", parameter(1, 3, 4))]).state_dict() for build in (case.ours, case.stock)]
    with pytest.raises(ValueError, match=r"lacks 1, such as 'a' and has further 1, such as 'b'"):
        ours.load_state_dict(saved[0])
    stock.load_state_dict(saved[1])
    assert [one.param_groups[0]["param_names"] for one in (ours, stock)] == [["a"], ["b"]]
