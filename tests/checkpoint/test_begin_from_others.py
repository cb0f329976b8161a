"""restore(checkpoint=) of what other programs saved: the right values, or refused by name."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _version

import muon
import tierstore
from tests.support.adamw import AdamW
from tests.support.small_net import (
    assert_trains_alike,
    begun,
    one_group,
    save,
    small_net,
    states_of,
    stock_adamw,
    train,
)


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not."""
    return [
        {"params": [(n, p) for n, p in model.named_parameters() if p.ndim == ndim], **values}
        for ndim, values in (
            (2, {"weight_decay": 0.1, "lr": 0.01}),
            (1, {"weight_decay": 0.0, "lr": 0.001}),
        )
    ]


def ours_by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    return [{**group, "algorithm": "adamw"} for group in by_dimension(model)]


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[at : at + 2], "algorithm": "adamw"} for at in (0, 2)]


@pytest.mark.parametrize("cut", [one_group, by_layer])
@pytest.mark.parametrize("source", ["by group", "by parameter", "published", "rewound"])
def test_groups_that_are_cut_otherwise_are_refused(source: str, cut: Any, tmp_path: Path) -> None:
    """One group cannot have two weight decays."""
    model, path = small_net(), tmp_path / "checkpoint"
    if source in ("by group", "by parameter"):
        optimizer = AdamW(by_dimension(model))
        train(model, optimizer, range(2))
        state, states = states_of(model, optimizer, flat=source == "by parameter")
        save({"model": state, "optimizer": states}, path)
    else:
        with tierstore.TierStore(tmp_path / "origin") as store:
            ours = muon.Muon(ours_by_dimension(model), store=store)
            train(model, ours, range(2))
            store.checkpoint(path)
    text = r"weight_decay 0\.1 for '0\.weight' and 0\.0 for '0\.bias', which are in one param group"
    other = small_net()
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(cut(other), store=store)
        if source == "rewound":
            train(other, optimizer, range(1))
            store.commit()
        before = copy.deepcopy(other.state_dict())
        text = text.replace("weight_decay", "lr").replace("0.1", "0.01").replace(r"0\.1", r"0\.01")
        text = text.replace(r"and 0\.0 ", r"and 0\.001 ")
        with pytest.raises(tierstore.CheckpointError, match=text):
            optimizer.restore(checkpoint=path, rewind=source == "rewound")
        for name, value in other.state_dict().items():
            assert torch.equal(value, before[name]), name
    _, optimizer = begun(path, tmp_path / "same", make=ours_by_dimension)
    assert [(g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [
        *((0.1, 0.01), (0.0, 0.001))
    ]
    optimizer.store.close()


@pytest.mark.parametrize("what", ["weight", "moment"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_are_not_numbers(what: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_net()
    optimizer = stock_adamw(model)
    train(model, optimizer, range(2))
    state, states = states_of(model, optimizer)
    if what == "weight":
        state["0.weight"] = state["0.weight"].to(dtype)
        key = "model.0.weight"
    else:
        moments = states["state"]["0.weight"]
        moments["exp_avg"] = moments["exp_avg"].to(dtype)
        key = "optimizer.state.0.weight.exp_avg"
    save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
    with pytest.raises(tierstore.CheckpointError, match=f"{key}' is {str(dtype)[6:]}.*are codes"):
        begun(tmp_path / "checkpoint", tmp_path / "run")


def fused_adam(states: dict[str, Any], step: Any) -> dict[str, Any]:
    """The state dict of Apex's and TransformerEngine's FusedAdam."""
    fused = copy.deepcopy(states)
    for state in fused["state"].values():
        del state["step"]
    for group in fused["param_groups"]:
        for key in ("amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused"):
            group.pop(key, None)
        group.pop("decoupled_weight_decay", None)
        group |= {"bias_correction": True} | ({} if step is None else {"step": step})
    return fused


@pytest.mark.parametrize("step", [50, torch.tensor(50), None])
def test_a_step_count_of_the_group(step: Any, tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(50))
    state, states = states_of(model, stock)
    save({"model": state, "optimizer": fused_adam(states, step)}, tmp_path / "checkpoint")
    if step is None:
        with pytest.raises(tierstore.CheckpointError, match=r"no number .*0\.weight\.step"):
            begun(tmp_path / "checkpoint", tmp_path / "run")
        return
    other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run")
    assert optimizer.store.step == 50
    assert "step" not in optimizer.param_groups[0]
    assert_trains_alike(other, optimizer, model, stock, range(50, 53))
    optimizer.store.close()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        lambda model, optimizer: {"model": model, "optim": optimizer},
        lambda model, optimizer: {"model": model, "adam": {"inner": optimizer}, "epoch": 2},
        lambda model, optimizer: {"app": {"model": model, "opt": optimizer}},
        lambda model, optimizer: {"state_dict": model, "optimizers": [optimizer]},
        lambda model, optimizer: {**model, "my_optimizer": optimizer},
    ],
)
def test_an_optimizer_is_found_whatever_its_key(place: Any, flat: bool, tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(4))
    save(place(*states_of(model, stock, flat=flat)), tmp_path / "checkpoint")
    other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run")
    assert optimizer.store.step == 4
    assert_trains_alike(other, optimizer, model, stock, range(4, 6))
    optimizer.store.close()


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (lambda states: {"a": states, "b": states}, r"several optimizers, \['a', 'b'\]"),
        (
            lambda states: {"optim": states["state"]},
            r"'optim\.0\..*exp_avg.*outside of a state dict",
        ),
    ],
)
def test_an_optimizer_that_is_not_found_is_refused(place: Any, match: str, tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(1))
    state, states = states_of(model, stock)
    save({"model": state, **place(states)}, tmp_path / "checkpoint")
    with pytest.raises(tierstore.CheckpointError, match=match):
        begun(tmp_path / "checkpoint", tmp_path / "run")


@pytest.mark.parametrize("flat", [False, True])
def test_parameters_that_never_had_a_gradient(
    flat: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They begin with zeros, as with load_state_dict()."""
    model = small_net(3)
    stock = stock_adamw(model)
    for _ in range(3):
        stock.zero_grad()
        model[0](torch.ones(2, 8)).square().mean().backward()  # model[1] and model[2] are unused.
        stock.step()
    state, states = states_of(model, stock, flat=flat)
    states = {  # get_state_dict() would have made zeros of its own.
        key: value
        for key, value in states.items()
        if not (flat and key.startswith("state.") and not key.startswith("state.0."))
    }
    if not flat:
        states["state"] = {n: s for n, s in states["state"].items() if n.startswith("0.")}
    save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
    with caplog.at_level(logging.WARNING, logger="tierstore"):
        other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run", small_net(3))
    assert "4 parameters ('1.weight', '1.bias', '2.weight', ...) without states" in caplog.text
    saved = optimizer.state_dict()
    assert [float(saved["state"][number]["step"]) for number in range(6)] == [3, 3, 0, 0, 0, 0]
    assert_trains_alike(other, optimizer, model, stock, range(3, 6))
    optimizer.store.close()


def test_trained_parameters_that_the_model_lacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_net(4)
    stock = stock_adamw(model)
    train(model, stock, range(2))
    state, states = states_of(model, stock)
    save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
    with caplog.at_level(logging.WARNING, logger="tierstore"):
        _, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run")
    optimizer.store.close()
    assert "4 parameters ('2.bias', '2.weight', '3.bias', ...) that are in no param" in caplog.text


_LAMB = {"grad_averaging": True, "max_grad_norm": 1.0}
RULES = {
    "RAdam": (
        lambda p: torch.optim.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True),
        {},
        "is of RAdam or NAdam",
    ),
    "NAdam": (
        lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
        {},
        "momentum_decay=0.004 is of NAdam",
    ),
    "Adam": (
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        {},
        "decoupled_weight_decay(=False is not AdamW's| is not supported, got False)",
    ),
    "LAMB": (
        lambda p: torch.optim.AdamW(p),
        {**_LAMB, "decoupled_weight_decay": None, "amsgrad": None},
        "grad_averaging=True is of LAMB",
    ),
    "amsgrad": (
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        {},
        "amsgrad(=True is not AdamW's| is not supported)",
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["restore", "load_state_dict"])
def test_other_rules_with_the_states_of_adamw(rule: str, way: str, tmp_path: Path) -> None:
    make, keys, match = RULES[rule]
    model = small_net()
    stock = make(list(model.named_parameters()))
    train(model, stock, range(2))
    for group in stock.param_groups:
        group |= keys
    if way == "restore":
        state, states = states_of(model, stock)
        save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
        with pytest.raises(ValueError, match=match):
            begun(tmp_path / "checkpoint", tmp_path / "run")
        return
    ours = muon.Muon(one_group(small_net()))
    with pytest.raises(ValueError, match=match):
        ours.load_state_dict(stock.state_dict())


def muon_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.named_parameters())}]


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"dampening": 0, "nesterov": True, "maximize": False}, "dampening=0 is of SGD"),
        (
            {
                "wd": 0.1,
                "nesterov": True,
                "ns_steps": 5,
                "adamw_betas": (0.9, 0.9),
                "adamw_eps": 1e-8,
            },
            "running average|did you mean 'weight_decay'",
        ),
        ({"nesterov": True}, "running average"),
    ],
)
@pytest.mark.parametrize("way", ["restore", "load_state_dict"])
def test_momentum_that_is_summed_otherwise(
    keys: dict[str, Any], match: str, way: str, tmp_path: Path
) -> None:
    """SGD, Moonlight, and an optimizer that does not tell."""
    model = small_net(bias=False)
    stock = torch.optim.SGD(list(model.named_parameters()), lr=0.01, momentum=0.9)
    train(model, stock, range(2))
    for group in stock.param_groups:
        own = {key: group[key] for key in ("params", "param_names", "lr", "momentum")}
        group.clear()
        group.update({**own, **keys})
    if way == "restore":
        state, states = states_of(model, stock)
        save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
        with pytest.raises(ValueError, match=match):
            begun(tmp_path / "checkpoint", tmp_path / "run", small_net(bias=False), muon_group)
        return
    ours = muon.Muon(muon_group(small_net(bias=False)))
    with pytest.raises(ValueError, match=match):
        ours.load_state_dict(stock.state_dict())


def test_groups_in_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DCP of torch 2.3 and before saved them."""
    model = small_net()
    stock = stock_adamw(model, lr=0.03, weight_decay=0.3)
    train(model, stock, range(2))
    state, states = states_of(model, stock)
    with monkeypatch.context() as patched:
        patched.setattr(_version, "_derived_version", "2_3")
        save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
    metadata = dcp.FileSystemReader(tmp_path / "checkpoint").read_metadata()
    assert "optimizer.param_groups" in metadata.state_dict_metadata
    other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run")
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert_trains_alike(other, optimizer, model, stock, range(2, 4))
    optimizer.store.close()


def test_states_without_names_or_groups_are_refused(tmp_path: Path) -> None:
    """Names like numbers are not the positions that state_dict() of an optimizer has."""
    model = nn.ParameterList([torch.ones(3, 3) * n for n in range(3)])
    stock = AdamW(list(model.parameters())[::-1])
    for parameter in model:
        parameter.grad = parameter.detach().clone()
    stock.step()
    state, states = states_of(model, stock)
    del states["param_groups"]
    for number, held in enumerate((states, stock.state_dict())):
        save({"model": state, "optimizer": held}, tmp_path / str(number))
        other = nn.ParameterList([torch.zeros(3, 3) for _ in range(3)])
        with pytest.raises(tierstore.CheckpointError, match="no param group of them"):
            begun(tmp_path / str(number), tmp_path / f"run-{number}", other)


@pytest.mark.parametrize("further", [{"epoch": torch.tensor(3)}, {"rng": torch.arange(9)}])
def test_tensors_beside_a_model(further: dict[str, Any], tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(2))
    state, states = states_of(model, stock)
    save({"net": state, "optimizer": states, **further}, tmp_path / "checkpoint")
    other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run")
    assert_trains_alike(other, optimizer, model, stock, range(2, 4))
    optimizer.store.close()


def test_a_key_of_the_program_is_not_evidence(tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(2))
    stock.param_groups[0] |= {"final_lr": 0.1, "max_grad_norm": 1.0}
    state, states = states_of(model, stock)
    save({"model": state, "optimizer": states}, tmp_path / "checkpoint")
    other, optimizer = begun(tmp_path / "checkpoint", tmp_path / "run")
    assert_trains_alike(other, optimizer, model, stock, range(2, 4))
    optimizer.store.close()
