"""The table of keys: the reference page, the commands and stock optimizers agree with it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import muon
from muon.keys import DEFAULTS, KEYS
from muon.plan import MuonPlan
from tests.support.twins import parameter

PAGE = Path(__file__).parents[2] / "docs/reference/param-groups.md"


def test_the_page_names_the_keys_of_other_optimizers() -> None:
    expected = [f"`{key.name}={not key.only}`" for key in KEYS.values() if key.only is not None]
    text = PAGE.read_text().partition("## Refused values")[2]
    assert re.findall(r"`\w+=(?:True|False)`", text) == expected


def test_a_plan_takes_the_text_of_every_value() -> None:
    model = nn.Linear(2, 3, bias=False, device="meta", dtype=torch.bfloat16)
    for key in KEYS.values():
        texts = [str(v).removeprefix("torch.").lower() for v in key.one_of or (True, False)]
        for text in texts if key.is_planned else ():
            planned = MuonPlan().plan(model, "muon", on_gpu=False, options={key.name: text})
            assert f", {key.name}=" in planned.call


def test_arguments_have_the_defaults_of_keys() -> None:
    arguments = inspect.signature(muon.Muon).parameters
    assert {name: arguments[name].default for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_group_has_the_keys_and_defaults_of_torch(algorithm: str) -> None:
    stock: torch.optim.Optimizer = (
        torch.optim.Muon([parameter()]) if algorithm == "muon" else torch.optim.AdamW([parameter()])
    )
    (ours,) = muon.Muon([{"params": [parameter()], "algorithm": algorithm}]).param_groups
    (theirs,) = stock.param_groups
    own = {key.name for key in KEYS.values() if algorithm in key.of} - theirs.keys()
    assert {key: ours[key] for key in theirs if key != "params"} == {
        key: value for key, value in theirs.items() if key != "params"
    }
    assert ours.keys() - theirs.keys() <= own
