"""``param_groups(matrices=)``: parameters that hold several matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import muon

STACK = (("stack",),)
HEADS = (("split", 0, (16, 8, 8)), ("blocks", 0, 8))


class Conv1D(nn.Module):
    """A projection whose weight has the inputs as rows, as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 24, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 12))
        self.bias = nn.Parameter(torch.zeros(4, 24))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.qkv = nn.Linear(16, 32)
        self.o = nn.Linear(16, 16, bias=False)
        self.mlp = Conv1D(16, 32)
        self.experts = Experts()
        self.head = nn.Linear(16, 40, bias=False)


def declared_of(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: group.get("matrices") for group in groups for name, _ in group["params"]}


def rules() -> dict[Any, Any]:
    return {
        "experts.gate_up_proj": (("stack",), ("interleaved", 1, 2)),
        "experts.*_proj": STACK,
        "qkv.weight": HEADS,
        Conv1D: (("transposed",),),
    }


def test_declared_parameters_are_in_groups_of_their_own() -> None:
    groups = muon.param_groups(Model(), matrices=rules(), lr=0.5, weight_decay=0.25, momentum=0.8)
    found = declared_of(groups)
    assert found["experts.gate_up_proj"] == (("stack",), ("interleaved", 1, 2))  # The first rule.
    assert found["experts.down_proj"] == STACK
    assert found["qkv.weight"] == HEADS
    assert found["mlp.weight"] == (("transposed",),)
    assert found["o.weight"] is None
    algorithms = {name: group["algorithm"] for group in groups for name, _ in group["params"]}
    assert {name for name, one in algorithms.items() if one == "muon"} == {
        *("o.weight", "qkv.weight", "mlp.weight", "experts.gate_up_proj", "experts.down_proj")
    }
    for group in groups:
        if group["algorithm"] == "muon":
            assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.5, 0.25, 0.8)


def test_the_table_says_what_parameters_hold() -> None:
    text = str(muon.param_groups(Model(), matrices=rules()))
    for row, count, rows, columns in (
        ("experts.gate_up_proj 4 x 24 x 16: 8 of 12 x 16", 8, 12, 16),
        ("experts.down_proj 4 x 16 x 12: 4 of 16 x 12", 4, 12, 16),
        ("qkv.weight 32 x 16: 4 of 8 x 16", 4, 8, 16),
        ("mlp.weight 16 x 32: 1 of 16 x 32", 1, 16, 32),
    ):
        work = count * (20 * rows**2 * columns + 10 * rows**3) / 1e9
        assert f"{row} {work:.3g} matrices" in " ".join(text.split())


def test_the_groups_train() -> None:
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = muon.Muon(muon.param_groups(model, matrices=rules()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_weight_decay_and_other_choices_come_first() -> None:
    def no_decay(name: str, parameter: nn.Parameter) -> bool:
        return "down" in name

    groups = muon.param_groups(
        Model(),
        matrices=rules(),
        no_decay=no_decay,
        adamw_names="qkv.weight",
        is_muon=lambda name, parameter: False if name.startswith("mlp") else None,
    )
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["experts.down_proj"]["weight_decay"] == 0
    assert "weight_decay" not in by_name["experts.gate_up_proj"]
    assert by_name["qkv.weight"]["algorithm"] == by_name["mlp.weight"]["algorithm"] == "adamw"
    assert "matrices" not in by_name["qkv.weight"]


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ({"*.expert.*": STACK}, r"matrices has the rule '\*\.expert\.\*', which fits no parameter"),
        ({nn.Conv2d: (("flatten",),)}, "matrices has the rule Conv2d, which fits no parameter"),
        ({"qkv.weight": (("blocks", 0, 5),)}, "'qkv.weight' has shape .* blocks of 5 do not fit"),
        ({"qkv.bias": (("blocks", 0, 8),)}, "'qkv.bias' has shape .*Muon needs two-dimensional"),
        ({"experts.*_proj": (("blocks", 1, 4),)}, "has shape .*: Muon needs two-dimensional"),
        ({"qkv.weight": 3}, "matrices must be a tuple of cuts"),
        ({3: STACK}, "matrices must map patterns of names, or classes of modules, to cuts"),
        ([("*", STACK)], "matrices must map patterns of names"),
        ({"experts.*": STACK}, r"'experts\.bias' has shape .* three dimensions or more"),
    ],
)
def test_rules_that_do_not_fit(matrices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon.param_groups(Model(), matrices=matrices)


def test_kernels_without_a_declaration_go_to_adamw() -> None:
    groups = muon.param_groups(Model())
    algorithms = {name: group["algorithm"] for group in groups for name, _ in group["params"]}
    assert algorithms["experts.down_proj"] == "adamw"
    with pytest.raises(ValueError, match="Declare the matrices that they hold with matrices="):
        muon.param_groups(Model(), conv="refuse")
    with pytest.raises(ValueError, match=r"is_muon is True for .* or matrices= that declares"):
        muon.param_groups(Model(), is_muon=lambda name, p: True if p.ndim > 2 else None)
