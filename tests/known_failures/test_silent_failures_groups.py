"""Routing of parameters to param groups.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import parametrizations

import muon

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
