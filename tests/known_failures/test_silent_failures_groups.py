"""Keys of param groups, schedulers that cycle betas, duplicates, maximize, and routing.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

import muon
from tests.support.twins import Twins, parameter

NOT_RAISED = pytest.fail.Exception

# ------------------------------------------------------------------------ use as in torch


@pytest.mark.xfail(
    strict=True, raises=ValueError, reason="the optimizer takes the names out of the groups"
)
def test_groups_print_after_an_optimizer_was_made_of_them() -> None:
    groups = muon.param_groups(nn.Linear(3, 4))
    muon.Muon(groups)
    assert "weight" in str(groups)


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def cyclic(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3)


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the scheduler cycles a momentum that AdamW lacks"
)
@pytest.mark.parametrize("make_scheduler", [one_cycle, cyclic])
def test_schedulers_cycle_betas(
    make_scheduler: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
) -> None:
    twins = Twins(algorithm="adamw")
    schedulers = [make_scheduler(optimizer) for optimizer, _ in twins.both]
    for _ in range(4):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    mine, other = (optimizer.param_groups[0]["betas"] for optimizer, _ in twins.both)
    assert mine == other
    twins.assert_identical()


@pytest.mark.xfail(strict=True, raises=ValueError, reason="duplicates are refused")
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_duplicate_parameter_warns_and_steps_once(algorithm: str) -> None:
    once, twice = parameter(), parameter()
    with pytest.warns(UserWarning, match="duplicate"):
        second = muon.Muon([{"params": [twice, twice], "algorithm": algorithm}])
    first = muon.Muon([{"params": [once], "algorithm": algorithm}])
    once.grad = twice.grad = parameter(1).detach()
    first.step()
    second.step()
    assert torch.equal(once, twice)


@pytest.mark.xfail(strict=True, raises=ValueError, reason="maximize=True is refused")
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_maximize_goes_up_the_gradient(algorithm: str) -> None:
    up, down = parameter(), parameter()
    maximizing = muon.Muon([{"params": [up], "algorithm": algorithm, "maximize": True}])
    minimizing = muon.Muon([{"params": [down], "algorithm": algorithm}])
    for step in range(2):
        up.grad = parameter(1 + step).detach()
        down.grad = -up.grad
        maximizing.step()
        minimizing.step()
    assert torch.equal(up, down)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the names are dropped")
def test_names_are_adopted_from_a_named_state_dict() -> None:
    found = []
    for algorithm in (torch.optim.Muon, muon.Muon):
        named = algorithm([("weight", parameter())])
        unnamed = algorithm([parameter()])
        unnamed.load_state_dict(named.state_dict())
        found.append(unnamed.param_groups[0].get("param_names"))
    stock, ours = found
    assert ours == stock


# -------------------------------------------------------------------------------- routing


class Network(nn.Module):
    """Two-dimensional parameters of models that are not hidden matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 4, bias=False)
        self.router = nn.Linear(8, 4, bias=False)
        self.scaled = parametrizations.weight_norm(nn.Linear(8, 8))
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def names_of(groups: list[dict[str, Any]], algorithm: str) -> set[str]:
    return {
        name for group in groups if group["algorithm"] == algorithm for name, _ in group["params"]
    }


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="every other matrix is for Muon")
@pytest.mark.parametrize(
    "name",
    [
        "gate.weight",
        "router.weight",
        "scaled.parametrizations.weight.original0",
        "classifier.2.weight",
    ],
)
def test_gates_heads_and_magnitudes_are_for_adamw(name: str) -> None:
    groups = muon.param_groups(Network())
    assert "hidden.weight" in names_of(groups, "muon")
    assert name in names_of(groups, "adamw")


@pytest.mark.xfail(
    strict=True, raises=ValueError, reason="a kernel is refused until each one is named"
)
def test_a_convolutional_model_takes_one_call() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, 2),
    )
    groups = muon.param_groups(model)
    assert {"0.weight", "2.weight"} <= names_of(groups, "adamw")
    assert "4.weight" in names_of(groups, "muon")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="these arguments are missing")
def test_routing_takes_rules_of_the_user() -> None:
    wanted = {"conv", "head", "is_muon", "no_decay", "betas", "eps", "momentum"}
    arguments = inspect.signature(muon.param_groups).parameters
    assert wanted <= arguments.keys()
    assert arguments["conv"].default == "adamw"


@pytest.mark.xfail(strict=True, raises=TypeError, reason="these arguments are missing")
def test_routing_hands_hyperparameters_to_their_groups() -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.9), "momentum": 0.5}
    by_algorithm = {
        group["algorithm"]: group for group in muon.param_groups(nn.Linear(3, 4), **options)
    }
    assert by_algorithm["adamw"]["betas"] == (0.8, 0.9)
    assert by_algorithm["muon"]["momentum"] == 0.5


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the table has no column for it")
def test_the_table_says_which_rule_decided() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    (line,) = [line for line in str(muon.param_groups(model)).splitlines() if " 0.weight " in line]
    assert "embedding" in line.lower()
