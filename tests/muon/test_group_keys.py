"""Keys of param groups: keys of other libraries, misspelled keys, and keys of the user."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler

import muon
import tierstore
from tests.support.adamw import AdamW
from tests.support.twins import Twins, parameter

# ------------------------------------------------------------------------- other libraries


def test_a_group_that_is_not_to_use_muon_gets_adamw() -> None:
    ours, theirs = parameter(), parameter()
    options = {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    optimizer = muon.Muon([{"params": [ours], "use_muon": False, **options}])
    stock = AdamW([theirs], **options)
    ours.grad = theirs.grad = parameter(1).detach()
    optimizer.step()
    stock.step()
    assert torch.equal(ours, theirs)


MUON: dict[str, dict[str, Any]] = {
    "KellerJordan": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0},
    "Motif": {"names": ["weight"]},
    "DeepSpeed": {"lr": 0.02},
}
ADAMW: dict[str, dict[str, Any]] = {
    "KellerJordan": {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    "Motif": {},
    "DeepSpeed": {"lr": 3e-4},
}


@pytest.mark.parametrize("muon_first", [True, False])
@pytest.mark.parametrize("library", MUON)
def test_groups_made_for_other_libraries_are_understood(library: str, muon_first: bool) -> None:
    weight, bias = parameter(), parameter(shape=[4])
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    groups = [
        {"params": [weight], "use_muon": True, **MUON[library]},
        {"params": [bias], "use_muon": False, **ADAMW[library]},
    ]
    optimizer = muon.Muon(groups if muon_first else groups[::-1])
    by_algorithm = {group["algorithm"]: group for group in optimizer.param_groups}
    assert by_algorithm["muon"]["params"][0] is weight
    assert by_algorithm["adamw"]["params"][0] is bias
    for algorithm, options in (("muon", MUON[library]), ("adamw", ADAMW[library])):
        for key in options.keys() - {"names"}:
            assert by_algorithm[algorithm][key] == options[key]
    optimizer.step()


def test_positions_name_the_parameters_of_other_libraries(tmp_path: Path) -> None:
    """Also Motif's groups, which keep names under a key of their own."""
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon(motif_groups(True), store=store)
        assert stored_names(optimizer) == {"0.0", "1.0"}
        assert optimizer.param_groups[0]["names"] == ["weight"]


def motif_groups(muon_first: bool) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [parameter()], "names": ["weight"], "use_muon": True},
        {"params": [parameter(shape=[4])], "use_muon": False},
    ]
    return groups if muon_first else groups[::-1]


def stored_names(optimizer: muon.Muon) -> set[str]:
    optimizer.state_dict()
    return set(optimizer.store.pages.read_states())


@pytest.mark.parametrize("keys", [{"momentun": 1}, {"lr": -1.0}, {"algorithm": "adamw"}])
@pytest.mark.parametrize("params", [list, iter])
def test_a_refused_group_is_left_as_it_was(
    keys: dict[str, Any], params: Callable[[list[Any]], Any]
) -> None:
    bias, group = motif_groups(False)
    weights = group["params"]
    group |= {"params": params(weights), **keys}
    optimizer = muon.Muon([bias])
    before = [dict(optimizer.param_groups[0]), {**group, "params": weights}]
    with pytest.raises(ValueError):
        optimizer.add_param_group(group)
    assert [dict(optimizer.param_groups[0]), {**group, "params": list(group["params"])}] == before


def test_the_dict_of_a_refused_group_is_left_as_it_was() -> None:
    optimizer = muon.Muon([parameter()])
    group = {"params": [parameter(1)], "algorithm": "adamw", "eps": -1.0}
    given = dict(group)
    with pytest.raises(ValueError, match="eps must not be negative"):
        optimizer.add_param_group(group)
    assert group == given


def test_the_parameters_of_a_refused_group_can_be_given_again() -> None:
    """As in torch.optim: an iterator becomes a list in the dict."""
    group = {"params": nn.Linear(4, 3, bias=False).named_parameters(), "lr": -1.0}
    with pytest.raises(ValueError, match="lr must not be negative"):
        muon.Muon([group])
    optimizer = muon.Muon([{**group, "lr": 0.1}])
    assert stored_names(optimizer) == {"weight"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_muon": True, "algorithm": "adamw"}, "contra|leave one of them out"),
        ({"use_muon": "no"}, "use_muon of param group 0 must be True or False"),
        ({"algorithm": "sgd"}, "algorithm must be"),
    ],
)
def test_the_algorithm_must_be_clear(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon.Muon([{"params": [parameter()], **keys}])


# ------------------------------------------------------------------------ refused by name


@pytest.mark.parametrize(
    ("algorithm", "key", "value"),
    [
        ("adamw", "bias_correction", False),
        ("muon", "fused", True),
        ("adamw", "fused", True),
        ("adamw", "adam_w_mode", False),
        ("adamw", "amsgrad", True),
        ("adamw", "capturable", True),
        ("muon", "differentiable", True),
        ("muon", "momentun", 0.9),
        ("adamw", "weight_dacay", 0.0),
        ("muon", "nestrov", False),
        ("muon", "Momentum", 0.9),
        ("muon", "ns_step", 3),
        ("muon", "Weight-Decay", 0.0),
        ("adamw", "weight_deca", 0.0),
        ("muon", "momentum_", 0.9),
        ("adamw", "lr_", 0.1),
        ("adamw", "foreach_", True),
        ("muon", "param", []),
        ("adamw", "paramss", []),
        ("muon", "params_", []),
        ("muon", "params_names", []),
        ("adamw", "beta", (0.9, 0.95)),
        ("adamw", "learning_rate", 0.1),
        ("adamw", "wd", 0.1),
        ("adamw", "epsilon", 1e-6),
        ("muon", "betas", (0.9, 0.95)),
        ("adamw", "momentum", 0.9),
        ("adamw", "ns_steps", 5),
    ],
)
def test_a_key_that_would_change_the_result_is_refused_by_name(
    algorithm: str, key: str, value: object
) -> None:
    group = {"params": [parameter()], "algorithm": algorithm, key: value}
    with pytest.raises(ValueError, match=f"{key}.* param group 0"):
        muon.Muon([group])


def test_a_misspelled_key_is_answered_with_the_right_one() -> None:
    optimizer = muon.Muon([parameter()])
    with pytest.raises(
        ValueError,
        match=r"unknown key 'momentun' in param group 1: did you mean 'momentum'\?",
    ):
        optimizer.add_param_group({"params": [parameter()], "momentun": 0.9})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("edit", [{"momentun": 0.5}, {"use_muon": False}, {"betas": (0.1, 0.2)}])
def test_an_edited_group_is_checked_before_the_next_step(edit: dict[str, Any]) -> None:
    twins = Twins()
    twins.step()
    twins.optimizer.param_groups[0].update(edit)
    twins.set_gradients()
    with twins.unchanged(), pytest.raises(ValueError, match=next(iter(edit))):
        twins.optimizer.step()
    for key in edit:
        del twins.optimizer.param_groups[0][key]
    twins.step()


BAD_VALUES = [
    ("muon", "lr", "0.1"),
    ("adamw", "lr", None),
    ("muon", "weight_decay", "0"),
    ("adamw", "eps", (1e-8,)),
    ("muon", "momentum", "0.9"),
    ("muon", "ns_coefficients", 3.0),
    ("muon", "ns_coefficients", ("a", "b", "c")),
    ("adamw", "betas", 0.9),
    ("adamw", "betas", ("0.9", "0.95")),
    ("adamw", "betas", "ab"),
    ("adamw", "eps", np.array(1e-8)),
    ("muon", "momentum", np.array(0.9)),
    ("muon", "ns_coefficients", torch.tensor([3.4, -4.7, 2.0])),
]


@pytest.mark.parametrize(("algorithm", "key", "value"), BAD_VALUES)
def test_a_value_of_another_type_is_refused_by_name(
    algorithm: str, key: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"^{key} must .*, got {re.escape(repr(value))}"):
        muon.Muon([{"params": [parameter()], "algorithm": algorithm, key: value}])


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps"])
def test_a_tensor_of_several_elements_is_refused_by_name(algorithm: str, key: str) -> None:
    group = {"params": [parameter()], "algorithm": algorithm, key: torch.tensor([0.1, 0.2])}
    with pytest.raises(ValueError, match=f"^{key} must have one element, got"):
        muon.Muon([group])


COMMON_KEYS = ["algorithm", "lr", "weight_decay", "eps"]


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("adamw", [*COMMON_KEYS, "betas"]),
        (
            "muon",
            [
                *COMMON_KEYS,
                *("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
                *("ns_dtype", "ns_batched", "ns_norm", "ns_method", "momentum_dtype"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_removed_key_is_named_before_the_next_step(
    algorithm: str, keys: list[str], steps: int
) -> None:
    twins = Twins(algorithm=algorithm)
    for _ in range(steps):
        twins.step()
    (group,) = twins.optimizer.param_groups
    for key in keys:
        value = group.pop(key)
        twins.set_gradients()
        with pytest.raises(ValueError, match=f"param group 0 .*{key}"):
            twins.optimizer.step()
        group[key] = value
    twins.step()
    twins.assert_identical()


def test_a_saved_use_muon_must_agree() -> None:
    groups = [{"params": [parameter()], "use_muon": True}, {"params": [parameter(1)]}]
    optimizer = muon.Muon(groups)
    saved = optimizer.state_dict()
    for group, use_muon in zip(saved["param_groups"], (True, True), strict=True):
        del group["algorithm"]
        group["use_muon"] = use_muon
    optimizer.load_state_dict(saved)
    saved["param_groups"][1] |= {"use_muon": False, "lr": 0.5}
    with pytest.raises(ValueError, match="group 1 of the state dict is for 'adamw'"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"use_muon": False},
            "group 0 of the state dict has algorithm='muon' and use_muon=False: leave one of them "
            "out",
        ),
        (
            {"algorithm": "x"},
            "algorithm must be 'muon' or 'adamw', got 'x' in group 0 of the state dict",
        ),
        ({"use_muon": 2}, "use_muon of group 0 of the state dict must be True or False: 2"),
    ],
)
def test_a_bad_algorithm_of_a_state_dict_is_named(keys: dict[str, Any], message: str) -> None:
    optimizer = muon.Muon([parameter()])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(keys, lr=0.5)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_misspelled_key_of_a_state_dict_changes_nothing() -> None:
    optimizer = muon.Muon([parameter()])
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(lr=0.5, momentun=0.5)
    with pytest.raises(ValueError, match="momentun"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3


# ---------------------------------------------------------------------------------- kept


KEPT = {
    "name": "decoder",
    "initial_lr": 0.5,
    "lr_scale": 0.25,
    "min_lr": 1e-5,
    "max_lr": 1.0,
    "base_momentum": 0.85,
    "max_momentum": 0.95,
    "weight_decay_scale": 2.0,
    "is_last_layer": True,
    "no_weight_decay": True,
    "is_weight_decay": True,
    "weight_decay_1": 0.5,
    "param_name": "decoder.weight",
    "hparams": {"depth": 2},
    "swa_lr": 0.1,
    "step": 3,
}


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_other_plain_values_are_kept_and_committed(algorithm: str, tmp_path: Path) -> None:
    for resume in (False, True):
        with tierstore.TierStore(tmp_path, resume=resume) as store:
            weight = parameter()
            kept = {} if resume else KEPT
            group = {"params": [("weight", weight)], "algorithm": algorithm, **kept}
            optimizer = muon.Muon([group], store=store)
            if resume:
                assert optimizer.restore() == 1
                assert optimizer.param_groups[0].items() >= KEPT.items()
            weight.grad = torch.ones_like(weight)
            optimizer.step()


@pytest.mark.parametrize(
    "keys",
    [
        {"fused": None, "foreach": True, "capturable": False, "amsgrad": False},
        {"bias_correction": True, "adam_w_mode": True, "decoupled_weight_decay": True},
    ],
)
def test_keys_of_other_optimizers_that_change_nothing_are_accepted(keys: dict[str, Any]) -> None:
    muon.Muon([{"params": [parameter()], "algorithm": "adamw", **keys}])


def test_a_group_of_an_optimizer_in_memory_keeps_any_value() -> None:
    weight, mine = parameter(), object()
    optimizer = muon.Muon([{"params": [weight], "mine": mine}])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.param_groups[0]["mine"] is mine


def test_a_value_that_no_commit_can_carry_is_refused_before_the_first_step(tmp_path: Path) -> None:
    weight = parameter()
    weight.grad = torch.ones_like(weight)
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([{"params": [weight], "mine": object()}], store=store)
        with pytest.raises(TypeError, match="mine"):
            optimizer.step()
        assert torch.equal(weight, parameter())
        del optimizer.param_groups[0]["mine"]
        optimizer.step()


def test_a_state_dict_of_a_fused_adamw_is_loaded() -> None:
    """It says how that optimizer computed; this one goes on in its own way."""
    ours, theirs = parameter(), parameter()
    fused = torch.optim.AdamW([theirs], lr=0.5, fused=True)
    theirs.grad = parameter(1).detach()
    fused.step()
    ours.data.copy_(theirs)
    optimizer = muon.Muon([{"params": [ours], "algorithm": "adamw"}])
    optimizer.load_state_dict(fused.state_dict())
    stock = AdamW([theirs])
    stock.load_state_dict(
        {**fused.state_dict(), "param_groups": stock.state_dict()["param_groups"]}
    )
    stock.param_groups[0]["lr"] = 0.5
    for optimizer_of_either in (optimizer, stock):
        ours.grad = theirs.grad = parameter(2).detach()
        optimizer_of_either.step()
    assert torch.equal(ours, theirs)
    assert optimizer.param_groups[0]["fused"] is None


def test_keys_of_a_scheduler_are_loaded() -> None:
    model = nn.Linear(4, 3, bias=False)
    first = muon.Muon(model.named_parameters())
    lr_scheduler.OneCycleLR(first, max_lr=0.1, total_steps=10)
    second = muon.Muon(model.named_parameters())
    second.load_state_dict(first.state_dict())
    for key in ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"):
        assert second.param_groups[0][key] == first.param_groups[0][key]


def test_a_checkpoint_of_a_fused_adamw_begins_a_run(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    fused = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(torch.ones(4)).sum().backward()
    fused.step()
    model_state, state = get_state_dict(model, fused)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / "stock")
    with tierstore.TierStore(tmp_path / "run") as store:
        group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
        optimizer = muon.Muon([group], store=store)
        assert optimizer.restore(tmp_path / "stock") == 1
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.step()


@pytest.mark.parametrize("kind", [np.float64, torch.tensor])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_scalars_of_numpy_and_tensors_are_numbers(algorithm: str, kind: Any) -> None:
    """The step is the one of the Python number that they are."""
    values: dict[str, Any] = {"weight_decay": 0.125, "eps": 0.0078125}
    values |= {"momentum": 0.875} if algorithm == "muon" else {"betas": (0.875, 0.9375)}

    def scalar(value: Any) -> Any:
        return tuple(map(kind, value)) if isinstance(value, tuple) else kind(value)

    found = []
    for given in (values, {name: scalar(value) for name, value in values.items()}):
        weight = parameter()
        weight.grad = torch.ones_like(weight)
        optimizer = muon.Muon([{"params": [weight], "algorithm": algorithm, **given}])
        optimizer.step()
        optimizer.step()
        found.append(weight)
    assert torch.equal(*found)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, "1e-4", None, [0.1]])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps", "momentum"])
def test_what_is_not_a_number_is_refused(key: str, value: Any) -> None:
    """Text of a YAML file, and a flag, among it."""
    with pytest.raises(ValueError, match=f"^{key} must"):
        muon.Muon([{"params": [parameter()], key: value}])
