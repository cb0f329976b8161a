"""muon.param_groups: the rule that decides for each parameter, and the rules of the user."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, weight_norm

import muon

WIDTH = 8


def names_of(groups: list[dict[str, Any]], algorithm: str) -> set[str]:
    return {
        name for group in groups if group["algorithm"] == algorithm for name, _ in group["params"]
    }


def modules(**children: nn.Module) -> nn.Module:
    """Return a module with these children, in this order."""
    parent = nn.Module()
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def holder(*shape: int, name: str = "weight") -> nn.Module:
    """Return a module with one parameter of its own."""
    module = nn.Module()
    module.register_parameter(name, nn.Parameter(torch.empty(shape)))
    return module


def linear(out: int = 2 * WIDTH, width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, out, bias=False)


def convolution(bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, bias=bias)


class Network(nn.Module):
    """Two-dimensional parameters of models that are not hidden matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 4, bias=False)
        self.router = nn.Linear(8, 4, bias=False)
        self.scaled = parametrizations.weight_norm(nn.Linear(8, 8))
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


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
    matrices = {
        "hidden.weight",
        "scaled.parametrizations.weight.original1",
        "classifier.0.weight",
    }
    assert names_of(groups, "muon") == matrices
    assert name in names_of(groups, "adamw")


# ----------------------------------------------------------------------------------- rules

# What each model is like, the model, and the rules of its parameters.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a residual network": (
        lambda: modules(
            conv1=convolution(),
            bn1=nn.BatchNorm2d(4),
            layer1=nn.Sequential(modules(conv1=convolution(), se=modules(fc=linear()))),
            fc=linear(10),
        ),
        {
            "conv1.weight": "input",
            "bn1.weight": "vector",
            "bn1.bias": "vector",
            "layer1.0.conv1.weight": "kernel",
            "layer1.0.se.fc.weight": "matrix",
            "fc.weight": "head",
        },
    ),
    "a vision transformer": (
        lambda: modules(
            tokens=holder(1, 1, WIDTH, name="cls_token"),
            positions=holder(1, 5, WIDTH, name="pos_embed"),
            patch_embed=modules(proj=nn.Conv2d(3, WIDTH, 4, bias=False)),
            blocks=nn.Sequential(modules(attn=modules(qkv=linear(24), output=linear(WIDTH)))),
            heads=nn.Sequential(linear(WIDTH), linear(10)),
        ),
        {
            "tokens.cls_token": "vector",
            "positions.pos_embed": "table",
            "patch_embed.proj.weight": "input",
            "blocks.0.attn.qkv.weight": "matrix",
            "blocks.0.attn.output.weight": "matrix",
            "heads.0.weight": "matrix",
            "heads.1.weight": "head",
        },
    ),
    "a window transformer": (
        lambda: modules(
            patch_embed=modules(proj=linear()),
            bias=holder(9, 3, name="relative_position_bias_table"),
            head=modules(norm=nn.LayerNorm(WIDTH, bias=False), fc=linear(10)),
        ),
        {
            "patch_embed.proj.weight": "input",
            "bias.relative_position_bias_table": "table",
            "head.norm.weight": "vector",
            "head.fc.weight": "head",
        },
    ),
    "a mixture of experts": (
        lambda: modules(
            layers=nn.ModuleList(
                [
                    modules(
                        gate=holder(4, WIDTH),
                        router=modules(layer=linear(4)),
                        experts=holder(4, WIDTH, 16, name="gate_up_proj"),
                        biases=holder(4, 16, name="gate_up_proj_bias"),
                        shared=modules(gate_proj=linear(4), gate=linear(16), up_proj=linear(4)),
                        shared_expert_gate=linear(1),
                    )
                ]
            ),
        ),
        {
            "layers.0.gate.weight": "router",
            "layers.0.router.layer.weight": "router",
            "layers.0.experts.gate_up_proj": "kernel",
            "layers.0.biases.gate_up_proj_bias": "table",
            "layers.0.shared.gate_proj.weight": "matrix",
            "layers.0.shared.gate.weight": "matrix",
            "layers.0.shared.up_proj.weight": "matrix",
            "layers.0.shared_expert_gate.weight": "vector",
        },
    ),
    "a state space model": (
        lambda: modules(
            embeddings=nn.Embedding(7, WIDTH),
            layers=nn.ModuleList(
                [
                    modules(
                        conv1d=nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, bias=False),
                        decay=holder(WIDTH, 4, name="A_log"),
                        x_proj=linear(),
                    )
                ]
            ),
        ),
        {
            "embeddings.weight": "embedding",
            "layers.0.conv1d.weight": "kernel",
            "layers.0.decay.A_log": "table",
            "layers.0.x_proj.weight": "matrix",
        },
    ),
    "a recurrent network": (
        lambda: modules(tokens=nn.Embedding(7, WIDTH), rnn=nn.LSTM(WIDTH, 4, bias=False)),
        {
            "tokens.weight": "embedding",
            "rnn.weight_ih_l0": "matrix",
            "rnn.weight_hh_l0": "matrix",
        },
    ),
    "a pretrained encoder with two heads": (
        lambda: modules(
            layer=nn.ModuleList([modules(output=modules(dense=linear()))]),
            pre_classifier=linear(WIDTH),
            cls=modules(transform=linear(), seq_relationship=linear(2)),
            class_head=nn.ModuleList([linear(3), modules(first=linear(), last=linear(4))]),
        ),
        {
            "layer.0.output.dense.weight": "matrix",
            "pre_classifier.weight": "matrix",
            "cls.transform.weight": "matrix",
            "cls.seq_relationship.weight": "head",
            "class_head.0.weight": "head",
            "class_head.1.first.weight": "matrix",
            "class_head.1.last.weight": "head",
        },
    ),
    "a layer in front of the head, in a module named head": (
        lambda: modules(head=modules(dense=linear(WIDTH)), classifier=linear(WIDTH)),
        {"head.dense.weight": "matrix", "classifier.weight": "head"},
    ),
    "a model in a sequence": (
        lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False), modules(body=linear(), fc=linear())),
        {"1.body.weight": "matrix", "1.fc.weight": "head"},
    ),
    "a block named output": (
        lambda: modules(attention=modules(output=modules(dense=linear())), output=linear()),
        {"attention.output.dense.weight": "matrix", "output.weight": "head"},
    ),
    "a hidden layer named fc": (
        lambda: modules(fc=linear(), last=linear()),
        {"fc.weight": "matrix", "last.weight": "matrix"},
    ),
    "a diffusion transformer": (
        lambda: modules(
            x_embedder=linear(),
            blocks=nn.ModuleList([modules(table=holder(6, WIDTH, name="scale_shift_table"))]),
            single=nn.ModuleList([modules(proj_out=linear())]),
            proj_out=linear(),
        ),
        {
            "x_embedder.weight": "input",
            "blocks.0.table.scale_shift_table": "table",
            "single.0.proj_out.weight": "matrix",
            "proj_out.weight": "head",
        },
    ),
    "parameters of a module of the user": (
        lambda: modules(
            attention=holder(WIDTH, WIDTH, name="wq"),
            queries=holder(4, WIDTH, name="queries"),
            norm=nn.LayerNorm((2, WIDTH), bias=False),
            attend=nn.MultiheadAttention(WIDTH, 2, bias=False),
        ),
        {
            "attention.wq": "matrix",
            "queries.queries": "table",
            "norm.weight": "table",
            "attend.in_proj_weight": "matrix",
            "attend.out_proj.weight": "matrix",
        },
    ),
    "a parametrized embedding and head": (
        lambda: modules(
            tokens=parametrizations.spectral_norm(nn.Embedding(7, WIDTH)),
            lm_head=parametrizations.weight_norm(linear(5)),
        ),
        {
            "tokens.parametrizations.weight.original": "embedding",
            "lm_head.parametrizations.weight.original0": "head",
            "lm_head.parametrizations.weight.original1": "head",
        },
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_rules(kind: str) -> None:
    make, expected = MODELS[kind]
    groups = muon.param_groups(make())
    assert groups.rules == expected
    assert names_of(groups, "muon") == {n for n, rule in expected.items() if rule == "matrix"}


def test_magnitude_of_the_older_weight_norm() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        layer = weight_norm(linear())
    assert muon.param_groups(layer).rules == {"weight_g": "vector", "weight_v": "matrix"}


def test_a_tied_parameter_has_the_rules_of_all_its_names() -> None:
    model = modules(body=linear(), tokens=nn.Embedding(16, WIDTH))
    model.body.weight = model.tokens.weight
    assert muon.param_groups(model).rules == {"body.weight": "embedding"}


def test_the_table_says_which_rule_decided() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    lines = str(muon.param_groups(model)).splitlines()
    (line,) = [line for line in lines if " 0.weight " in line]
    assert line.split()[-1] == "embedding"
    (line,) = [line for line in lines if " 1.weight " in line]
    assert line.split()[-1] == "matrix"


def test_groups_made_without_rules_print() -> None:
    groups = muon.ParamGroups(muon.param_groups(nn.Linear(3, 4)))
    assert groups.rules == {}
    assert " weight " in str(groups)


# --------------------------------------------------------------------------------- kernels


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, 2),
    )


def test_a_convolutional_model_takes_one_call(caplog: pytest.LogCaptureFixture) -> None:
    groups = muon.param_groups(convolutional())
    assert {"0.weight", "2.weight"} <= names_of(groups, "adamw")
    assert "4.weight" in names_of(groups, "muon")
    (record,) = caplog.records
    assert record.name == "muon"
    assert record.levelno == logging.WARNING
    assert "more than two dimensions, routed to AdamW: 1, 18% of" in record.getMessage()
    assert "'2.weight' of shape (4, 4, 3, 3)" in record.getMessage()


def test_kernels_that_the_user_names_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    muon.param_groups(convolutional(), adamw_names=["2.weight"])
    assert caplog.records == []


def test_matrices_with_names_of_tables_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Each layer of a library may call its matrix "matrix"; a positional table is not a matrix."""
    model = modules(
        position=holder(1, 6, WIDTH, name="position"),
        first=holder(WIDTH, WIDTH, name="matrix"),
        second=holder(WIDTH, WIDTH, name="matrix"),
        last=linear(2 * WIDTH),
    )
    groups = muon.param_groups(model)
    assert groups.rules["first.matrix"] == "table"
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("muon", logging.WARNING)
    assert record.getMessage() == (
        "matrices whose own name is not the name of a weight, routed to AdamW: 2, 42% of elements; "
        "the first is 'first.matrix' of shape (8, 8). is_muon= routes them to Muon; adamw_names= "
        "ends this warning"
    )
    caplog.clear()
    muon.param_groups(model, is_muon=lambda name, _: True if name.endswith("matrix") else None)
    assert caplog.records == []


def test_kernels_may_be_refused() -> None:
    with pytest.raises(ValueError, match=r"'2\.weight' of shape \(4, 4, 3, 3\).*adamw_names"):
        muon.param_groups(convolutional(), conv="refuse")
    groups = muon.param_groups(convolutional(), conv="refuse", adamw_names=["2.weight"])
    assert groups.rules["2.weight"] == "adamw_names"


def test_an_unknown_value_of_conv_is_refused() -> None:
    with pytest.raises(ValueError, match=r"conv must be 'adamw' or 'refuse', got 'muon'"):
        muon.param_groups(convolutional(), conv="muon")


# --------------------------------------------------------------------- rules of the user


@pytest.mark.parametrize("head", ["classifier", ["classifier.0.weight", "classifier.2"]])
def test_head_by_name_of_modules_or_parameters(head: str | list[str]) -> None:
    groups = muon.param_groups(Network(), head=head)
    assert groups.rules["classifier.0.weight"] == groups.rules["classifier.2.weight"] == "head"


def test_a_head_that_the_user_names_is_the_only_one() -> None:
    groups = muon.param_groups(Network(), head="hidden")
    assert groups.rules["hidden.weight"] == "head"
    assert groups.rules["classifier.2.weight"] == "matrix"


def test_a_model_may_have_no_head() -> None:
    assert muon.param_groups(Network(), head=()).rules["classifier.2.weight"] == "matrix"


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no parameter or module 'class', named in head"):
        muon.param_groups(Network(), head="class")


def test_is_muon_overrules_the_rules() -> None:
    def is_muon(name: str, parameter: nn.Parameter) -> bool | None:
        assert isinstance(parameter, nn.Parameter)
        return {"router.weight": True, "hidden.weight": False}.get(name)

    groups = muon.param_groups(Network(), is_muon=is_muon)
    assert "router.weight" in names_of(groups, "muon")
    assert "hidden.weight" in names_of(groups, "adamw")
    assert groups.rules["router.weight"] == groups.rules["hidden.weight"] == "is_muon"
    assert groups.rules["gate.weight"] == "router"


def test_muon_for_other_than_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is_muon .*'0\.weight' of shape \(4, 3, 3, 3\)"):
        muon.param_groups(convolutional(), is_muon=lambda name, parameter: True)


@pytest.mark.parametrize(
    "no_decay", ["*.bias", ["*.bias"], lambda name, parameter: parameter.ndim < 2]
)
def test_no_decay(no_decay: Any) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 3))
    groups = muon.param_groups(model, weight_decay=0.3, adamw_weight_decay=0.2, no_decay=no_decay)
    assert [
        (group["algorithm"], group.get("weight_decay"), [name for name, _ in group["params"]])
        for group in groups
    ] == [
        ("muon", 0.3, ["1.weight", "2.weight"]),
        ("adamw", 0.2, ["0.weight"]),
        ("adamw", 0.0, ["1.bias", "2.bias"]),
    ]


def test_no_decay_of_a_matrix() -> None:
    groups = muon.param_groups(nn.Sequential(linear(), linear()), no_decay="1.weight")
    assert [(group["algorithm"], group.get("weight_decay")) for group in groups] == [
        ("muon", None),
        ("muon", 0.0),
    ]
    assert [g["weight_decay"] for g in muon.Muon(groups).param_groups] == [0.1, 0.0]


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no_decay .*'LayerNorm'"):
        muon.param_groups(Network(), no_decay=["LayerNorm"])


def test_routing_hands_hyperparameters_to_their_groups() -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-9, "momentum": 0.5}
    optimizer = muon.Muon(muon.param_groups(nn.Linear(3, 4), **options))
    by_algorithm = {group["algorithm"]: group for group in optimizer.param_groups}
    assert by_algorithm["adamw"]["betas"] == (0.8, 0.9)
    assert by_algorithm["adamw"]["eps"] == 1e-9
    assert by_algorithm["muon"]["momentum"] == 0.5
    assert by_algorithm["muon"]["eps"] == torch.optim.Muon([torch.zeros(1, 1)]).defaults["eps"]


# ------------------------------------------------------------------------- wrapped models


class LanguageModel(nn.Sequential):
    """A model whose layers have numbers, with a head that only its method and number show."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(9, WIDTH), linear(), linear(WIDTH, 2 * WIDTH), linear(3))

    def get_output_embeddings(self) -> nn.Module:
        return self[2]


def compiled(model: nn.Module) -> nn.Module:
    module = torch.compile(model)
    assert isinstance(module, nn.Module)
    return module


class Parallel(nn.Module):
    """A wrapper with the names of DistributedDataParallel, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "": lambda model: model,
    "_orig_mod.": compiled,
    "module.": Parallel,
    "module._orig_mod.": lambda model: Parallel(compiled(model)),
    "_orig_mod.module.": lambda model: compiled(Parallel(model)),
}


@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("given", ["", "_orig_mod.", "module.", "_orig_mod.module."])
def test_names_fit_with_and_without_names_of_wrappers(prefix: str, given: str) -> None:
    model = WRAPPERS[prefix](LanguageModel())
    groups = muon.param_groups(
        model, head=f"{given}3", adamw_names=f"{given}1.weight", no_decay=f"{given}[12].weight"
    )
    assert groups.rules == {
        f"{prefix}0.weight": "embedding",
        f"{prefix}1.weight": "adamw_names",
        f"{prefix}2.weight": "matrix",
        f"{prefix}3.weight": "head",
    }
    decays = {
        name: group.get("weight_decay") != 0 for group in groups for name, _ in group["params"]
    }
    assert decays == {f"{prefix}{number}.weight": number in (0, 3) for number in range(4)}


@pytest.mark.parametrize("prefix", WRAPPERS)
def test_wrappers_change_no_rule(prefix: str) -> None:
    for make in (LanguageModel, Network, lambda: nn.Sequential(modules(head=linear(3)))):
        expected = muon.param_groups(make()).rules
        found = muon.param_groups(WRAPPERS[prefix](make())).rules
        assert found == {f"{prefix}{name}": rule for name, rule in expected.items()}


def test_a_name_that_is_there_as_given_means_that_parameter_alone() -> None:
    model = modules(module=linear(), inner=modules(_orig_mod=linear()))
    model.add_module("weight", linear())
    groups = muon.param_groups(model, adamw_names=["module.weight"])
    assert names_of(groups, "adamw") == {"module.weight"}


@pytest.mark.parametrize("wrapped", [(), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("pattern", ["layers.[0-9].bias", "module.layers.[0-9].bias", "*.bias"])
@pytest.mark.parametrize("wrap", [lambda model: model, Parallel])
def test_names_fit_if_some_layers_are_wrapped(
    wrapped: tuple[int, ...], pattern: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Selective activation checkpointing wraps some of the layers."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for index in wrapped:
        layers[index] = checkpoint_wrapper(layers[index])
    model = wrap(modules(layers=nn.ModuleList(layers)))
    (group,) = [g for g in muon.param_groups(model, no_decay=pattern) if g.get("weight_decay") == 0]
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert [name for name, _ in group["params"]] == biases
    assert len(biases) == 4


def test_a_head_fits_if_some_layers_are_wrapped() -> None:
    block = nn.Sequential(checkpoint_wrapper(linear()), linear(WIDTH, 2 * WIDTH))
    model = modules(first=linear(), block=block)
    groups = muon.param_groups(model, head="block")
    assert names_of(groups, "muon") == {"first.weight"}


class WrappedOutput(nn.Module):
    """A model whose output layer has an unusual name and is wrapped."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.readout = wrap(linear())
        self.hidden = linear()

    def get_output_embeddings(self) -> nn.Module:
        return self.readout


@pytest.mark.parametrize("wrap", [lambda module: module, checkpoint_wrapper, compiled])
@pytest.mark.parametrize("prefix", WRAPPERS)
def test_a_wrapped_output_layer_is_the_head(
    wrap: Callable[[nn.Module], nn.Module], prefix: str
) -> None:
    rules = muon.param_groups(WRAPPERS[prefix](WrappedOutput(wrap))).rules
    assert list(rules.values()) == ["head", "matrix"]


# ------------------------------------------------------------------------- tied parameters


def tied() -> nn.Module:
    model = modules(first=linear(WIDTH), second=linear(WIDTH), third=linear())
    model.second.weight = model.first.weight
    return model


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_functions_see_every_name_of_a_tied_parameter(name: str) -> None:
    groups = muon.param_groups(tied(), no_decay=lambda given, _: given == name)
    assert [group.get("weight_decay") for group in groups] == [None, 0.0]
    assert [given for given, _ in groups[1]["params"]] == ["first.weight"]
    groups = muon.param_groups(tied(), is_muon=lambda given, _: given != name)
    assert names_of(groups, "adamw") == {"first.weight"}
    groups = muon.param_groups(tied(), is_muon=lambda given, _: True if given == name else None)
    assert groups.rules["first.weight"] == "is_muon"


def test_one_name_may_be_given_as_a_string() -> None:
    groups = muon.param_groups(tied(), adamw_names="second.weight")
    assert names_of(groups, "adamw") == {"first.weight"}
    with pytest.raises(ValueError, match="no parameter 'second', named in adamw_names"):
        muon.param_groups(tied(), adamw_names="second")
