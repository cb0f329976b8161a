"""muon.param_groups over common models: the rule of each parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import muon

VOCABULARY = 11
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return result


class Gpt(nn.Module):
    """Embeddings, two blocks, and a head, which may be tied to the embedding."""

    def __init__(self, *, tied: bool, head_name: str = "lm_head") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(5, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            head.weight = self.tokens.weight
        self.add_module(head_name, head)


BLOCK_MATRICES = {f"blocks.{block}.{name}.weight" for block in range(2) for name in ("up", "down")}


def routed(groups: list[dict[str, object]]) -> dict[str, set[str]]:
    """Parameter names of each algorithm; no name is in two groups."""
    result: dict[str, set[str]] = {}
    for group in groups:
        names = [name for name, _ in group["params"]]  # type: ignore[attr-defined]
        assert len(names) == len(set(names))
        assert str(group["algorithm"]) not in result
        result[str(group["algorithm"])] = set(names)
    return result


def named(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied: bool) -> None:
    model = Gpt(tied=tied)
    found = routed(muon.param_groups(model))
    assert found == {"muon": BLOCK_MATRICES, "adamw": named(model) - BLOCK_MATRICES}
    assert ("lm_head.weight" in found["adamw"]) is not tied


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=16)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    matrices = {
        f"layers.{number}.{name}"
        for number in range(2)
        for name in (
            "self_attn.in_proj_weight",
            "self_attn.out_proj.weight",
            "linear1.weight",
            "linear2.weight",
        )
    }
    found = routed(muon.param_groups(model))
    assert found == {"muon": matrices, "adamw": named(model) - matrices}


def test_a_matrix_may_be_named() -> None:
    found = routed(muon.param_groups(Gpt(tied=True), adamw_names={"blocks.0.up.weight"}))
    assert found["muon"] == BLOCK_MATRICES - {"blocks.0.up.weight"}
    assert "blocks.0.up.weight" in found["adamw"]


def test_frozen_parameters_are_left_out() -> None:
    model = Gpt(tied=False)
    frozen = {"tokens.weight", "blocks.0.up.weight", "blocks.1.norm.bias"}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    found = routed(muon.param_groups(model))
    assert found["muon"] == BLOCK_MATRICES - frozen
    assert found["adamw"] == named(model) - BLOCK_MATRICES - frozen


@pytest.mark.parametrize("name", ["lm_head", "head", "output", "embed_out", "classifier", "score"])
def test_head_by_name(name: str) -> None:
    """Only its name distinguishes a head of two classes from a hidden matrix."""
    model = nn.Module()
    model.body = nn.Linear(WIDTH, WIDTH)
    model.add_module(name, nn.Linear(WIDTH, 2))
    model.pooler = nn.Linear(WIDTH, WIDTH)
    found = routed(muon.param_groups(model))
    assert found["muon"] == {"body.weight", "pooler.weight"}


def test_head_by_width() -> None:
    """The head is the last Linear layer if its width is the vocabulary; earlier layers are not."""
    found = routed(muon.param_groups(Gpt(tied=False, head_name="to_logits")))
    assert "to_logits.weight" in found["adamw"]
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), nn.Linear(VOCABULARY, WIDTH)
    )
    assert routed(muon.param_groups(model))["muon"] == {"1.weight", "2.weight"}


class WithOutputEmbeddings(nn.Module):
    """A model with get_output_embeddings(), which may return None."""

    def __init__(self, *, has_head: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.has_head = has_head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.first if self.has_head else None


def test_head_by_get_output_embeddings() -> None:
    found = routed(muon.param_groups(WithOutputEmbeddings(has_head=True)))
    assert found["muon"] == {"second.weight"}
    found = routed(muon.param_groups(WithOutputEmbeddings(has_head=False)))
    assert found["muon"] == {"first.weight", "second.weight"}


def test_table_names_every_parameter() -> None:
    model = Gpt(tied=False)
    groups = muon.param_groups(model, lr=0.02, adamw_lr=3e-4)
    lines = str(groups).splitlines()
    for name, parameter in model.named_parameters():
        (line,) = [line for line in lines if f" {name} " in line]
        assert " x ".join(str(size) for size in parameter.shape) in line
    (muon_line,) = [line for line in lines if " muon " in line]
    assert " 0.02 " in muon_line
    rows, columns = sorted(groups[0]["params"][0][1].shape)
    assert f" {(20 * rows**2 * columns + 10 * rows**3) / 1e9:.3g} " in muon_line
    (adamw_line,) = [line for line in lines if " adamw " in line]
    assert " 0.0003 " in adamw_line


def test_table_keeps_long_names() -> None:
    """Long names of deep models are not cut at the width of the terminal."""
    model = inner = nn.Module()
    for _ in range(8):
        inner.a_rather_long_module_name = nn.Module()
        inner = inner.a_rather_long_module_name
    inner.linear = nn.Linear(2, 2)
    table = str(muon.param_groups(model))
    for name in named(model):
        assert name in table


def test_groups_are_accepted_by_the_optimizer() -> None:
    model = Gpt(tied=True)
    groups = muon.param_groups(
        model, lr=0.02, adamw_lr=3e-4, weight_decay=0.3, adamw_weight_decay=0.2
    )
    optimizer = muon.Muon(groups)
    matrices, others = optimizer.param_groups
    assert (matrices["algorithm"], matrices["lr"], matrices["weight_decay"]) == ("muon", 0.02, 0.3)
    assert (others["algorithm"], others["lr"], others["weight_decay"]) == ("adamw", 3e-4, 0.2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_defaults_equal_torch() -> None:
    matrices, others = muon.Muon(muon.param_groups(Gpt(tied=True))).param_groups
    weight = [nn.Parameter(torch.zeros(2, 2))]
    for group, reference in (
        (matrices, torch.optim.Muon(weight)),
        (others, torch.optim.AdamW(weight)),
    ):
        assert group["lr"] == reference.defaults["lr"]
        assert group["weight_decay"] == reference.defaults["weight_decay"]


def test_groups_without_parameters_are_left_out() -> None:
    assert set(routed(muon.param_groups(nn.Linear(2, 2, bias=False)))) == {"muon"}
    assert set(routed(muon.param_groups(nn.Embedding(2, 2)))) == {"adamw"}


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter"):
        muon.param_groups(nn.ReLU())
    with pytest.raises(ValueError, match="no parameter"):
        muon.param_groups(nn.Linear(2, 2).requires_grad_(False))


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no parameter 'blocks\.9\.up\.weight'"):
        muon.param_groups(Gpt(tied=True), adamw_names=["tokens.weight", "blocks.9.up.weight"])


def test_both_names_of_a_tied_parameter_are_accepted() -> None:
    model = nn.Module()
    model.first = nn.Linear(WIDTH, WIDTH, bias=False)
    model.second = nn.Linear(WIDTH, WIDTH, bias=False)
    model.second.weight = model.first.weight
    found = routed(muon.param_groups(model, adamw_names=["second.weight"]))
    assert found == {"adamw": {"first.weight"}}


def test_groups_print_after_an_optimizer_was_made_of_them() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    groups = muon.param_groups(model)
    assert "1.weight" in str(groups)
    assert "default" in str(groups)
    optimizer = muon.Muon(groups, lr=0.5)
    assert "default" not in str(groups)
    assert "0.5" in str(groups)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    assert "0.125" in str(groups)


def test_arguments_of_the_optimizer_take_effect() -> None:
    """Groups that param_groups() makes have only the keys that it was given."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    matrices, others = muon.Muon(muon.param_groups(model), lr=0.5, weight_decay=0.0).param_groups
    assert (matrices["lr"], matrices["weight_decay"]) == (0.5, 0.0)
    assert (others["lr"], others["weight_decay"]) == (1e-3, 0.01)  # AdamW's own.
    groups = muon.param_groups(model, lr=0.25, adamw_weight_decay=0.125)
    matrices, others = muon.Muon(groups, lr=0.5, weight_decay=0.0).param_groups
    assert (matrices["lr"], others["weight_decay"]) == (0.25, 0.125)
