"""Names of parameters that come with a state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.twins import parameter


def test_names_are_adopted_from_a_named_state_dict() -> None:
    found = []
    for algorithm in (torch.optim.Muon, muon.Muon):
        named = algorithm([("weight", parameter())])
        unnamed = algorithm([parameter()])
        unnamed.load_state_dict(named.state_dict())
        found.append(unnamed.param_groups[0].get("param_names"))
    stock, ours = found
    assert ours == stock


def test_a_run_has_the_adopted_names(tmp_path: Path) -> None:
    saved = muon.Muon([("weight", parameter())]).state_dict()
    with tierstore.TierStore(tmp_path) as store:
        weight = parameter()
        optimizer = muon.Muon([weight], store=store)
        optimizer.load_state_dict(saved)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert list(store.read_states()) == ["weight"]
    with tierstore.TierStore(tmp_path, resume=True) as store:
        assert muon.Muon([("weight", parameter(1))], store=store).restore() == 1


@pytest.mark.parametrize("steps", [0, 1])
def test_names_in_use_stay(steps: int) -> None:
    """Pages have the names that parameters had at the first step."""
    saved = muon.Muon([("theirs", parameter())]).state_dict()
    weight = parameter()
    optimizer = muon.Muon([weight] if steps else [("ours", weight)])
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].get("param_names") == (None if steps else ["ours"])
    optimizer.step()


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a", "a"], "one name"), (["a", "\n"], "printable"), (["a", "b"], "ns_steps")],
)
def test_a_refused_state_dict_leaves_no_names(names: list[str], message: str) -> None:
    saved = muon.Muon([("a", parameter()), ("b", parameter(1))]).state_dict()
    edit: dict[str, Any] = {"param_names": names, "ns_steps": -1 if names == ["a", "b"] else 5}
    saved["param_groups"][0].update(edit)
    optimizer = muon.Muon([parameter(), parameter(1)])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert "param_names" not in optimizer.param_groups[0]
    optimizer.step()


def test_a_state_dict_of_other_groups_is_refused_as_before() -> None:
    saved = muon.Muon([("a", parameter()), ("b", parameter(1))]).state_dict()
    optimizer = muon.Muon([parameter()])
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="has the keys 'state' and 'param_groups'"):
        optimizer.load_state_dict({"state": {}})
