"""AdamW groups with the fused kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.devices import needs_cuda

STEPS = 8
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.85, 0.97), "eps": 1e-7, "weight_decay": 0.05}


def train(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    for step in range(1, STEPS + 1):
        training.set_gradients(parameters, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def group(parameters: dict[str, torch.nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    named = list(parameters.items())
    return [{"params": named, "algorithm": "adamw", "fused": True, **OPTIONS, **options}]


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A few roundings of each step, of values of about one; a bfloat16 may round either way."""
    for name, value in found.items():
        eps = torch.finfo(value.dtype).eps
        torch.testing.assert_close(value, expected[name], rtol=4 * eps, atol=STEPS * 2**-20)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_fused_adamw_of_torch(dtype: torch.dtype, maximize: bool) -> None:
    ours, theirs = training.make_parameters(dtype), training.make_parameters(dtype)
    found = train(ours, muon.Muon(group(ours, maximize=maximize)))
    stock = torch.optim.AdamW(theirs.values(), fused=True, maximize=maximize, **OPTIONS)
    expected = train(theirs, stock)
    for name, value in found.items():
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value, expected[name], rtol=4 * eps, atol=STEPS * 8 * eps)


@pytest.mark.parametrize("store_options", [{"page_bytes": 4096, "buffers": 2}, {"buffers": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_is_near_the_other_kernel_in_every_tier(
    dtype: torch.dtype, store_options: dict[str, Any], tmp_path: Path
) -> None:
    plain = training.make_parameters(dtype)
    expected = train(plain, muon.Muon(group(plain, fused=False)))
    parameters = training.make_parameters(dtype)
    with tierstore.TierStore(tmp_path, **store_options) as store:
        found = train(parameters, muon.Muon(group(parameters), store=store))
    assert_close(found, expected)


def test_parameters_of_several_dtypes() -> None:
    def make() -> dict[str, torch.nn.Parameter]:
        wide, narrow = training.make_parameters(torch.float64), training.make_parameters()
        return {**wide, **{f"narrow {name}": parameter for name, parameter in narrow.items()}}

    plain, fused = make(), make()
    expected = train(plain, muon.Muon(group(plain, fused=False)))
    assert_close(train(fused, muon.Muon(group(fused))), expected)


def test_a_group_steps_in_its_own_way() -> None:
    """A state dict of a stock AdamW does not change it."""
    parameters = training.make_parameters()
    optimizer = muon.Muon(group(parameters))
    stock = torch.optim.AdamW(parameters.values(), **OPTIONS)
    train(parameters, stock)
    optimizer.load_state_dict(stock.state_dict())
    assert optimizer.param_groups[0]["fused"] is True


def test_hyperparameters_of_one_element() -> None:
    expected_of, found_of = training.make_parameters(), training.make_parameters()
    tensors = {name: torch.tensor(OPTIONS[name]) for name in ("lr", "weight_decay", "eps")}
    expected = train(expected_of, muon.Muon(group(expected_of)))
    assert_close(train(found_of, muon.Muon(group(found_of, **tensors))), expected)


def test_cautious_weight_decay_is_refused() -> None:
    parameters = training.make_parameters()
    with pytest.raises(ValueError, match="cautious_wd and fused cannot be combined"):
        muon.Muon(group(parameters, cautious_wd=True))


@needs_cuda
def test_on_a_gpu() -> None:
    def on_gpu(**options: Any) -> dict[str, torch.Tensor]:
        made = training.make_parameters()
        parameters = {name: torch.nn.Parameter(p.detach().cuda()) for name, p in made.items()}
        optimizer = muon.Muon(group(parameters, **options))
        for step in range(1, STEPS + 1):
            training.set_gradients(made, step)
            for name, parameter in parameters.items():
                grad = made[name].grad
                parameter.grad = None if grad is None else grad.cuda()
            optimizer.step()
        return {name: parameter.detach().cpu() for name, parameter in parameters.items()}

    assert_close(on_gpu(), on_gpu(fused=False))
