"""Gradients that are not in ``.grad``: the argument ``gradient``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.fake_cuda import fake_cuda
from tests.support.twins import PLACES, open_store, parameter

STEPS = 3
SHAPE = (24, 16)


def main_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter from the attribute that Megatron keeps it in."""
    found: torch.Tensor | None = tensor.main_grad  # type: ignore[attr-defined]
    return found


def pair(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(parameter(seed, SHAPE).detach().to(dtype)) for seed in range(2)]


def optimizer_of(params: list[nn.Parameter], **options: Any) -> muon.Muon:
    groups = [
        {"params": [(f"{index}", param)], "algorithm": algorithm}
        for index, (param, algorithm) in enumerate(zip(params, ("muon", "adamw"), strict=True))
    ]
    return muon.Muon(groups, lr=0.1, ns_dtype=torch.float32, **options)


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_steps_with_the_same_gradients(
    dtype: torch.dtype, place: str, tmp_path: Path
) -> None:
    ours, theirs = pair(dtype), pair(dtype)
    other = optimizer_of(theirs)
    with open_store(place, tmp_path) as store:
        optimizer = optimizer_of(ours, store=store, gradient=main_grad)
        for step in range(STEPS):
            for index, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
                its.grad = parameter(10 * step + index, SHAPE).detach().to(dtype)
                mine.main_grad = its.grad.clone()
                mine.grad = torch.full_like(mine, 7.0)  # Nobody looks at it.
            optimizer.step()
            other.step()
        assert all(map(torch.equal, ours, theirs))


def test_gradients_are_summed_up_in_float32() -> None:
    """Of a bfloat16 parameter: the momentum has the bits of the sum, which bfloat16 has not."""
    [param, _] = pair(torch.bfloat16)
    optimizer = muon.Muon(
        [("weight", param)],
        momentum_dtype=torch.float32,
        ns_dtype=torch.float32,
        gradient=main_grad,
    )
    param.main_grad = torch.zeros(SHAPE)

    def accumulate(tensor: torch.Tensor) -> None:
        tensor.main_grad += tensor.grad
        tensor.grad = None

    param.register_post_accumulate_grad_hook(accumulate)
    grads = [parameter(seed, SHAPE).detach().bfloat16() for seed in range(8)]
    for grad in grads:
        (param * grad).sum().backward()
    optimizer.step()
    whole = torch.stack([grad.float() for grad in grads]).sum(0)
    rounded = grads[0].clone()
    for grad in grads[1:]:
        rounded += grad
    momentum = optimizer.state[param]["momentum_buffer"]
    torch.testing.assert_close(momentum, 0.05 * whole, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(momentum, 0.05 * rounded.float(), rtol=1e-3, atol=1e-4)


def test_gradients_in_float32_of_a_device_are_stepped_on_the_host(tmp_path: Path) -> None:
    theirs = pair(torch.bfloat16)
    other = optimizer_of(theirs, gradient=main_grad)
    with fake_cuda():
        ours = pair(torch.bfloat16)
        options = {"host_memory": "64KiB", "page_bytes": 16384, "step_on": "cpu"}
        with tierstore.TierStore(tmp_path / "narrow", **options) as store:
            wide = torch.ones(SHAPE)
            narrow = optimizer_of(ours, store=store, gradient=lambda p: wide)
            with pytest.raises(ValueError, match=r"open it with gradient_dtype=torch\.float32"):
                narrow.step()
            assert store.step == 0
        options |= {"gradient_dtype": torch.float32}
        with tierstore.TierStore(tmp_path / "wide", **options) as store:
            optimizer = optimizer_of(ours, store=store, gradient=main_grad)
            for step in range(STEPS):
                for index, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
                    mine.main_grad = its.main_grad = parameter(10 * step + index, SHAPE).detach()
                optimizer.step()
                other.step()
            store.synchronize()
            assert all(map(torch.equal, ours, theirs))


def test_a_parameter_without_one_is_not_stepped() -> None:
    params = pair(torch.float32)
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_of(params, gradient=main_grad)
    params[0].main_grad, params[1].main_grad = None, torch.ones(SHAPE)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])


def test_gradients_that_are_not_finite_are_refused() -> None:
    params = pair(torch.float32)
    optimizer = optimizer_of(params, gradient=main_grad)
    params[0].main_grad, params[1].main_grad = torch.ones(SHAPE), torch.ones(SHAPE)
    params[1].main_grad[3, 3] = float("nan")
    with pytest.raises(tierstore.NonFiniteGradientError, match="'1'"):
        optimizer.step()


@pytest.mark.parametrize(
    ("grad", "text"),
    [
        (3.0, "is of type float, expected a tensor or None"),
        (
            torch.ones(4, 4),
            "is float32 [4, 4] on cpu, but the parameter is float32 [24, 16]",
        ),
        (torch.ones(SHAPE, dtype=torch.int64), "is int64 [24, 16] on cpu"),
        (torch.ones(SHAPE, device="meta"), "is float32 [24, 16] on meta"),
        (torch.ones(SHAPE).to_sparse(), "is sparse"),
    ],
)
def test_what_does_not_fit_is_refused(grad: Any, text: str) -> None:
    params = pair(torch.float32)
    before = [param.detach().clone() for param in params]
    optimizer = optimizer_of(params, gradient=main_grad)
    params[0].main_grad, params[1].main_grad = torch.ones(SHAPE), grad
    with pytest.raises(ValueError, match=f"the gradient of '1' {re.escape(text)}"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("steps_with", ["a copy each time", "what it takes away"])
def test_a_function_that_gives_another_tensor_each_time_is_refused(steps_with: str) -> None:
    [param, _] = pair(torch.float32)

    def give(tensor: torch.Tensor) -> torch.Tensor | None:
        found = main_grad(tensor)
        if steps_with == "a copy each time":
            return None if found is None else found / 4
        tensor.main_grad = None
        return found

    optimizer = muon.Muon([("weight", param)], ns_dtype=torch.float32, gradient=give)
    param.main_grad = torch.ones(SHAPE)
    with pytest.raises(ValueError, match="gradient of 'weight' returns another tensor each time"):
        optimizer.step()


def test_an_error_of_the_function_names_the_parameter() -> None:
    params = pair(torch.float32)
    optimizer = muon.Muon([("first", params[0]), ("second", params[1])], gradient=lambda p: p.main)
    with pytest.raises(AttributeError) as caught:
        optimizer.step()
    assert caught.value.__notes__[-1] == "in the function that gives the gradient of 'first'"


def test_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient must be a function of a parameter, got 5"):
        muon.Muon(pair(torch.float32), gradient=5)  # type: ignore[arg-type]


def test_they_are_not_freed() -> None:
    with tierstore.TierStore(None, free_gradients=True) as store:
        params = pair(torch.float32)
        optimizer = optimizer_of(params, store=store, gradient=main_grad)
        params[0].main_grad = params[1].main_grad = torch.ones(SHAPE)
        with pytest.raises(ValueError, match="'0' has its gradient elsewhere: leave it out"):
            optimizer.step()
