"""Cautious weight decay: x - lr (u + wd [u x >= 0] x), written from the paper."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from muon.coefficients import of_steps
from tests.muon.test_coefficients import reference

LR, WD, STEPS = 0.1, 0.5, 6
SHAPE = (12, 20)


def gradients(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    found = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return torch.where(found.abs() < 0.2, 0.0, found)  # With zeros.


def begin() -> torch.Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0] = 0
    return values


def cautious(values: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    return LR * WD * torch.where(update * values >= 0, values, 0.0)


def muon_reference() -> torch.Tensor:
    values, momentum = begin(), torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        momentum = 0.9 * momentum + 0.1 * gradients(step)
        update = reference(momentum, of_steps("keller_jordan", 5))
        values = values - LR * update - cautious(values, update)
    return values


def adamw_reference(sign: float = 1.0) -> torch.Tensor:
    values, first, second = begin(), 0.0, 0.0
    for step in range(1, STEPS + 1):
        gradient = sign * gradients(step)
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        root = (second / (1 - 0.95**step)).sqrt() + 1e-8
        update = first / (1 - 0.9**step) / root
        values = values - LR * update - cautious(values, update)
    return values


def trained(group: dict[str, Any], store: tierstore.TierStore | None = None) -> torch.Tensor:
    parameter = torch.nn.Parameter(begin())
    groups = [{"params": [("w", parameter)], "lr": LR, "weight_decay": WD, **group}]
    optimizer = muon.Muon(groups, store=store)
    for step in range(1, STEPS + 1):
        parameter.grad = gradients(step)
        optimizer.step()
    return parameter.detach()


OF_MUON = {
    **{"cautious_wd": True, "momentum": 0.9, "nesterov": False, "ns_dtype": torch.float64},
    **{"adjust_lr_fn": "unit"},
}
OF_ADAMW = {"algorithm": "adamw", "cautious_wd": True, "betas": (0.9, 0.95)}


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (OF_MUON, muon_reference),
        (OF_ADAMW, adamw_reference),
        ({**OF_ADAMW, "maximize": True}, lambda: adamw_reference(-1.0)),
    ],
)
def test_equals_the_formula(
    group: dict[str, Any], expected: Any, on_disk: bool, tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path if on_disk else None) as store:
        found = trained(group, store)
    # A few products of Newton-Schulz in float64 for each step.
    torch.testing.assert_close(found, expected(), rtol=1e-11, atol=1e-12)
    assert not torch.equal(found, trained({**group, "cautious_wd": False}))


def test_the_constructor_gives_it_to_muon_groups_alone() -> None:
    parameters = [torch.nn.Parameter(begin()) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "algorithm": "adamw"}]
    optimizer = muon.Muon(groups, cautious_wd=True)
    assert [group.get("cautious_wd") for group in optimizer.param_groups] == [True, None]


@pytest.mark.parametrize("group", [OF_MUON, OF_ADAMW])
def test_anything_but_a_choice_is_refused(group: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cautious_wd must be True or False, got 0\.5"):
        trained({**group, "cautious_wd": 0.5})


def test_a_nan_stays_a_nan() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), math.nan)
    group = {"params": [parameter], "algorithm": "adamw", "cautious_wd": True}
    muon.Muon([group], nonfinite="allow").step()
    assert parameter.isnan().all()
