"""The key ``maximize`` of param groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import muon
from tests.support.adamw import AdamW
from tests.support.twins import parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nesterov": False}, {"momentum_dtype": torch.float32}])
def test_muon_goes_up_the_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    up, down = (nn.Parameter(parameter().detach().to(dtype)) for _ in range(2))
    maximizing = muon.Muon([{"params": [up], "maximize": True, **options}])
    minimizing = muon.Muon([{"params": [down], **options}])
    for step in range(3):
        grad = parameter(1 + step).detach().to(dtype)
        up.grad, down.grad = grad.clone(), -grad
        maximizing.step()
        minimizing.step()
        assert torch.equal(up.grad, grad)
    assert torch.equal(up, down)


@pytest.mark.parametrize("shape", [(3, 4), (1300, 700)])
def test_adamw_equals_torch(shape: tuple[int, int]) -> None:
    """The large parameter is stepped in several pieces."""
    ours, theirs = parameter(shape=shape), parameter(shape=shape)
    optimizer = muon.Muon([{"params": [ours], "algorithm": "adamw", "maximize": True}])
    stock = AdamW([theirs], maximize=True)
    for step in range(3):
        ours.grad = theirs.grad = parameter(1 + step, shape).detach()
        optimizer.step()
        stock.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_an_edit_turns_round(algorithm: str) -> None:
    up, down = parameter(), parameter()
    edited, plain = (muon.Muon([{"params": [each], "algorithm": algorithm}]) for each in (up, down))
    for step, sign in enumerate((1, -1, 1)):
        grad = parameter(1 + step).detach()
        up.grad, down.grad = grad, sign * grad
        edited.param_groups[0]["maximize"] = sign < 0
        edited.step()
        plain.step()
    assert torch.equal(up, down)
