"""Arguments and calls that Muon refuses, with a reason and without a change."""

from __future__ import annotations

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
from tests.support.references import assert_same, stored


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def integers() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 4, dtype=torch.int64), requires_grad=False)


def on_meta() -> nn.Parameter:
    return nn.Parameter(torch.empty(3, 4, device="meta"))


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse().requires_grad_()


BAD_PARAMETERS: list[tuple[str, Callable[[], torch.Tensor], str]] = [
    ("muon", lambda: weight(2, 3, 4), r"'bad' has shape \(2, 3, 4\).*adamw"),
    ("muon", lambda: weight(5), r"'bad' has shape \(5,\).*adamw"),
    ("muon", lambda: weight(), r"'bad' has shape \(\).*adamw"),
    ("muon", lambda: weight(3, 4, dtype=torch.complex64), "'bad' has dtype complex64"),
    ("adamw", lambda: weight(3, 4, dtype=torch.complex64), "'bad' has dtype complex64"),
    ("muon", integers, "'bad' has dtype int64"),
    ("adamw", integers, "'bad' has dtype int64"),
    ("muon", on_meta, "'bad' is on meta"),
    ("adamw", on_meta, "'bad' is on meta"),
    ("adamw", sparse, "'bad' is a Tensor of layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("algorithm", "make", "message"), BAD_PARAMETERS)
def test_a_parameter_that_cannot_be_stepped(
    algorithm: str, make: Callable[[], torch.Tensor], message: str
) -> None:
    good = weight(3, 4)
    group = {"params": [("fine", weight(2, 2)), ("bad", make())], "algorithm": algorithm}
    with pytest.raises(ValueError, match=message):
        muon.Muon([{"params": [("good", good)]}, copy_of(group)])
    assert_add_is_refused(group, message)


def copy_of(group: dict[str, Any]) -> dict[str, Any]:
    """A new dict, since torch.optim adds keys to the dict it gets."""
    return {**group, "params": list(group["params"])}


def assert_add_is_refused(group: dict[str, Any], message: str) -> None:
    """Adding the group raises, and changes nothing."""
    optimizers = []
    for tried in (False, True):
        good = weight(3, 4)
        optimizer = muon.Muon([("good", good)])
        optimizers.append(optimizer)
        for step in range(3):
            good.grad = weight(3, 4, seed=step).detach()
            optimizer.step()
            if tried:
                before = stored(optimizer)
                with pytest.raises(ValueError, match=message):
                    optimizer.add_param_group(copy_of(group))
                assert_same(stored(optimizer), before)
    assert_same(stored(optimizers[1]), stored(optimizers[0]))


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("muon", {"lr": -1.0}, "lr must not be negative, got -1.0"),
        ("muon", {"lr": float("nan")}, "lr must be finite, got nan"),
        ("muon", {"lr": torch.tensor([0.1, 0.2])}, "lr must have one element"),
        ("muon", {"weight_decay": -0.1}, "weight_decay must not be negative"),
        ("muon", {"eps": -1e-7}, "eps must not be negative"),
        ("muon", {"momentum": -0.1}, r"momentum must lie in \[0, 1\], got -0.1"),
        ("muon", {"momentum": 1.1}, r"momentum must lie in \[0, 1\], got 1.1"),
        ("muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three"),
        ("muon", {"ns_steps": 100}, r"ns_steps must be a whole number in \[0, 100\), got 100"),
        ("muon", {"adjust_lr_fn": "mine"}, "adjust_lr_fn must be one of .*'mine'"),
        ("adamw", {"lr": -1.0}, "lr must not be negative"),
        ("adamw", {"weight_decay": -0.1}, "weight_decay must not be negative"),
        ("adamw", {"eps": -1e-8}, "eps must not be negative"),
        ("adamw", {"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ("adamw", {"betas": (-0.1, 0.9)}, r"betas must be two numbers in \[0, 1\)"),
        ("adamw", {"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\)"),
        ("adamw", {"amsgrad": True}, "amsgrad is not supported"),
        ("adamw", {"capturable": True}, "capturable is not supported"),
        ("adamw", {"differentiable": True}, "differentiable is not supported"),
        ("sgd", {}, "algorithm must be 'muon' or 'adamw', got 'sgd'"),
    ],
)
def test_hyperparameter_out_of_range(algorithm: str, options: dict[str, Any], message: str) -> None:
    group = {"params": [("other", weight(2, 3))], "algorithm": algorithm, **options}
    with pytest.raises(ValueError, match=message):
        muon.Muon([copy_of(group)])
    assert_add_is_refused(group, message)


def test_default_out_of_range() -> None:
    with pytest.raises(ValueError, match="lr must not be negative"):
        muon.Muon([weight(2, 3)], lr=-1.0)


def test_hyperparameter_of_another_type_leaves_the_optimizer_as_it_was() -> None:
    optimizer = muon.Muon([weight(3, 4)])
    before = stored(optimizer)
    with pytest.raises(ValueError, match="lr must be a number, got 'fast'"):
        optimizer.add_param_group({"params": [weight(2, 3)], "lr": "fast"})
    assert_same(stored(optimizer), before)


def test_options_of_torch_that_are_off_are_accepted() -> None:
    """A group made for torch.optim.AdamW names all of them."""
    group: dict[str, Any] = {"params": [weight(3)], "algorithm": "adamw"}
    muon.Muon([{**group, "amsgrad": False, "maximize": False, "foreach": None, "fused": None}])


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_names_must_be_unique(algorithm: str) -> None:
    twice = [("good", weight(2, 2)), ("good", weight(2, 2))]
    with pytest.raises(ValueError, match="'good' occurs twice"):
        muon.Muon([{"params": twice, "algorithm": algorithm}])
    group = {"params": [("new", weight(2, 2)), ("good", weight(2, 2))], "algorithm": algorithm}
    assert_add_is_refused(group, "'good' occurs twice")


def test_parameter_in_two_groups() -> None:
    shared = weight(2, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        muon.Muon([{"params": [("a", shared)]}, {"params": [("b", shared)]}])


def test_named_and_unnamed_groups_do_not_mix() -> None:
    assert_add_is_refused({"params": [weight(2, 2)]}, "with/without names")


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        muon.Muon([])


def test_sparse_gradient(tmp_path: Path) -> None:
    """Refused before anything is stepped; a dense gradient is accepted afterwards."""
    embedding, matrix = nn.Embedding(7, 3, sparse=True), weight(4, 5)
    with tierstore.TierStore(tmp_path) as store:
        groups: list[dict[str, Any]] = [
            {"params": [("matrix", matrix)]},
            {"params": [("table", embedding.weight)], "algorithm": "adamw"},
        ]
        optimizer = muon.Muon(groups, store=store)
        for parameter in (matrix, embedding.weight):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        before = stored(optimizer)
        optimizer.zero_grad()
        matrix.grad = torch.ones_like(matrix)
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ValueError, match="gradient of 'table' is sparse"):
            optimizer.step()
        assert_same(stored(optimizer), before)
        assert embedding.weight.grad is not None
        embedding.weight.grad = embedding.weight.grad.to_dense()
        optimizer.step()
        assert store.step == 2


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_parameter_converted_after_the_first_step(change: str) -> None:
    parameter, other = weight(4, 5), weight(3, 3)
    optimizer = muon.Muon([("other", other), ("weight", parameter)])
    for each in (parameter, other):
        each.grad = torch.ones_like(each)
    optimizer.step()
    start, other_start = parameter.detach().clone(), other.detach().clone()
    parameter.grad = None
    parameter.data = start.bfloat16() if change == "dtype" else start[:2]
    with pytest.raises(ValueError, match=r"'weight' was torch.float32 \[4, 5\] and is now"):
        optimizer.step()
    assert torch.equal(other, other_start)
    parameter.data = start
    optimizer.step()
    assert not torch.equal(other, other_start)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_optimizer_with_a_store_is_not_copied(
    duplicate: Callable[[Any], Any], tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([weight(3, 4)], store=store)
        with pytest.raises(TypeError, match=r"with a store.*use state_dict\(\), or resume the run"):
            duplicate(optimizer)


def test_step_of_a_closed_store(tmp_path: Path) -> None:
    parameter = weight(3, 4)
    store = tierstore.TierStore(tmp_path)
    optimizer = muon.Muon([parameter], store=store)
    parameter.grad = torch.ones_like(parameter)
    store.close()
    with pytest.raises(tierstore.StoreClosedError, match="closed"):
        optimizer.step()
    assert torch.equal(parameter, weight(3, 4))


def test_step_before_restore(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        parameter = weight(3, 4)
        optimizer = muon.Muon([("p", parameter)], store=store)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        again = weight(3, 4, seed=1)
        optimizer = muon.Muon([("p", again)], store=store)
        again.grad = torch.ones_like(again)
        with pytest.raises(tierstore.RunDirectoryError, match=r"call restore\(\)"):
            optimizer.step()
        assert optimizer.restore() == 1
        assert torch.equal(again, parameter)


def test_a_second_optimizer_on_the_same_store() -> None:
    store = tierstore.TierStore(None)
    first, second = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3, 4))
    optimizers = [muon.Muon([p], store=store, lr=lr) for p, lr in ((first, 0.0), (second, 100.0))]
    for parameter in (first, second):
        parameter.grad = torch.ones(3, 4)
    optimizers[0].step()
    with pytest.raises(ValueError, match="another optimizer uses this store"):
        optimizers[1].step()
    optimizers[0].step()
    assert torch.equal(first, torch.ones(3, 4))
    assert torch.equal(second, torch.ones(3, 4))


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float8_e4m3fn, "bfloat16"])
@pytest.mark.parametrize("argument", ["momentum_dtype", "ns_dtype"])
def test_dtypes_that_cannot_hold_an_average(argument: str, dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be one of"):
        muon.Muon([torch.nn.Parameter(torch.ones(3, 4))], **{argument: dtype})


@pytest.mark.parametrize(
    ("name", "value"), [("ns_steps", 2.5), ("ns_coefficients", (1.0, 2.0)), ("momentum", 2)]
)
def test_a_hyperparameter_damaged_between_steps(name: str, value: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    parameter.grad = torch.ones(3, 4)
    optimizer = muon.Muon([parameter])
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(3, 4))
    optimizer.param_groups[0][name] = good
    optimizer.step()  # Nothing was applied, so the store did not fail.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("momentum_dtype", [torch.float64, torch.float32, torch.float16])
def test_momentum_of_any_width(dtype: torch.dtype, momentum_dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4, dtype=dtype))
    optimizer = muon.Muon([parameter], momentum_dtype=momentum_dtype, momentum=0.5)
    parameter.grad = torch.ones(3, 4, dtype=dtype)
    for _ in range(2):
        optimizer.step()
    momentum = optimizer.state[parameter]["momentum_buffer"]
    assert torch.equal(momentum, torch.full((3, 4), 0.75, dtype=momentum_dtype))
