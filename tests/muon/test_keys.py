"""The table of keys: the reference page, the commands and stock optimizers agree with it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
from muon.keys import DEFAULTS, KEYS, Key
from tests.support.twins import parameter
from tierstore.tools.cli.plan import plan

PAGE = Path(__file__).parents[2] / "docs/reference/param-groups.md"


def code(value: Any) -> str:
    return f"`{value}`" if isinstance(value, torch.dtype) else f"`{value!r}`"


def row(key: Key) -> str:
    """Return the line of a key in the table of the page."""
    groups = "all" if len(key.of) > 1 else {"muon": "Muon", "adamw": "AdamW"}[key.of[0]]
    values = dict.fromkeys(map(code, (key.defaults[a] for a in key.of if a in key.defaults)))
    default = "" if key.name == "algorithm" else ", ".join(values)
    fixed = "yes" if key.form is not None else ""
    return f"| `{key.name}` | {groups} | {default} | {fixed} | {key.meaning} |"


def test_the_page_has_the_table() -> None:
    """Copy the table from the failed comparison to the page."""
    expected = [row(key) for key in KEYS.values() if key.only is None]
    found = re.findall(r"^\| `\w+` \| (?:all|Muon|AdamW) \|.*$", PAGE.read_text(), re.MULTILINE)
    assert "\n".join(found) == "\n".join(expected)


def test_the_page_names_the_keys_of_other_optimizers() -> None:
    expected = [f"`{key.name}={not key.only}`" for key in KEYS.values() if key.only is not None]
    text = PAGE.read_text().partition("## Refused values")[2]
    assert re.findall(r"`\w+=(?:True|False)`", text) == expected


def test_the_plan_has_an_option_for_each_key_of_a_state() -> None:
    planned = {key.name for key in KEYS.values() if key.is_planned and key.form is not None}
    assert planned <= inspect.signature(plan).parameters.keys()


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
