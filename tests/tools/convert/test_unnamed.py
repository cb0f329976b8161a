"""Optimizers without names of parameters: names are unique, or said by the user, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tests.support.published import tensors_in
from tierstore.tools.convert.convert import convert


def trained(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], groups: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Save model and AdamW with these groups; return the first moments under keys of DCP."""
    torch.manual_seed(0)
    model = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW([{"params": [model[n] for n in group]} for group in groups])
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = {name: parameter.detach() for name, parameter in model.items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    return {
        f"optimizer.state.{name}.exp_avg": optimizer.state[model[name]]["exp_avg"]
        for group in groups
        for name in group
    }


SORTED = ({"q": (4, 4), "up": (8, 4), "head": (4, 4)}, [["up", "q"], ["head"]])
SWAPPED = ({"a": (3,), "b": (5,), "c": (3,)}, [["b", "c"]])
ALL = ({"a": (3, 3), "bias": (3,), "b": (3, 3)}, [["a", "bias", "b"]])


@pytest.mark.parametrize(("shapes", "groups"), [SORTED, SWAPPED, ALL])
def test_shapes_that_leave_a_choice_are_refused(shapes: Any, groups: Any, tmp_path: Path) -> None:
    """Optimizers may sort their groups, as MuonWithAuxAdam does by size."""
    trained(tmp_path, shapes, groups)
    with no_trace(tmp_path):
        code, _, error = call("convert", tmp_path / "in.pt", tmp_path / "out", "--to", "dcp")
    assert code == 2
    assert "leave a choice" in error
    assert "model.named_parameters()" in error
    assert "--assume-model-order" in error


def test_shapes_that_occur_once_give_names_in_any_order(tmp_path: Path) -> None:
    expected = trained(tmp_path, {"q": (4, 4), "up": (8, 4), "b": (4,)}, [["up", "q"], ["b"]])
    conversion = convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")
    assert conversion.notes == []
    found = tensors_in(tmp_path / "out")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_the_order_of_the_model_is_assumed_if_the_user_says_so(tmp_path: Path) -> None:
    expected = trained(tmp_path, *ALL)
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "out", "--to", "dcp")
    code, _, error = call(*arguments, "--assume-model-order")
    assert (code, "its 3 parameters: they were assigned in the order" in error) == (0, True)
    found = tensors_in(tmp_path / "out")
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_an_assumption_that_shapes_refute_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, ALL[0], [["b", "a", "bias"]])
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="fit no tensors"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", assume_model_order=True)


def test_factored_states_tell_no_shape(tmp_path: Path) -> None:
    """The longest state of the weight has the shape of the bias."""
    state = {
        0: {"exp_avg_sq_row": torch.rand(4), "exp_avg_sq_col": torch.rand(8)},
        1: {"exp_avg_sq": torch.rand(7)},
    }
    model = {"weight": torch.randn(4, 8), "bias": torch.randn(4), "last": torch.randn(7)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="tell no shape"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")
