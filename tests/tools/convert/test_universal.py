"""Universal checkpoints: those that DeepSpeed 0.19.8 wrote, and those that are written for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.continuation import differences, hyperparameters_of
from tests.support.conversions import no_trace
from tests.support.deepspeed_files import change
from tests.support.deepspeed_truth import assert_is_truth, truth_of
from tests.support.kept import commit_with, wanted
from tests.support.published import Ours, tensors_in
from tests.support.universal_files import (
    folder_in,
    model_states_in,
    optimizer_in,
    states_in,
    write_universal,
)
from tierstore.tools.convert.convert import Conversion, convert

FIXTURES = Path(__file__).parent / "fixtures"
ORIGINALS = FIXTURES / "deepspeed"
NAMES = sorted(path.name for path in (FIXTURES / "universal").iterdir())
ADAM = {"lr": 0.003, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def to_dcp(source: Any, out: Path) -> tuple[Conversion, dict[str, torch.Tensor]]:
    conversion = convert(source, out, to="dcp")
    return conversion, tensors_in(out)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a fixture, whose files a test then changes; return the folder of the files."""

    def copy(name: str) -> Path:
        shutil.copytree(FIXTURES / "universal" / name, tmp_path / "copy" / name)
        return folder_in(tmp_path / "copy" / name)

    return copy


def refused(source: Any, tmp_path: Path, match: str, to: str = "dcp") -> None:
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=match):
        convert(source, tmp_path / "out", to=to)


def damaged(source: Any, tmp_path: Path, match: str) -> None:
    with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match=match):
        convert(source, tmp_path / "out", to="dcp")


# ------------------------------------------------------------------- what DeepSpeed wrote


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_carried(name: str, tmp_path: Path) -> None:
    source = FIXTURES / "universal" / name
    conversion, tensors = to_dcp(source, tmp_path / "out")
    assert (conversion.source, conversion.step, conversion.lost) == ("universal", 3, [])
    assert_is_truth(tensors, ORIGINALS / name)
    assert torch.equal(tensors["model.positions"], torch.arange(9.0))
    of_steps, expected = to_dcp(ORIGINALS / name / "checkpoint", tmp_path / "of steps")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], value) for key, value in expected.items())
    assert conversion.digests == of_steps.digests
    facts = json.loads((ORIGINALS / name / "facts.json").read_text())
    for parameter in ("embedding.weight", "blocks.1.norm.bias"):
        found = hyperparameters_of(tmp_path / "out", parameter)
        assert parameter in found.pop("param_names")
        group = facts["groups"]["bias" in parameter]["hyperparameters"]
        assert {**found, "betas": list(found["betas"])} == group
    _, of_folder = to_dcp(folder_in(source), tmp_path / "of folder")
    assert of_folder.keys() == tensors.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_next_update_equals_deepspeed(name: str, tmp_path: Path) -> None:
    to_dcp(FIXTURES / "universal" / name, tmp_path / "out")
    assert max(differences(tmp_path / "out", ORIGINALS / name)["adamw"].values()) < 1e-5
    without = differences(tmp_path / "out", ORIGINALS / name, momentum=False)
    assert min(without["adamw"].values()) > 0.1


def test_momentum_of_muon_is_read(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 writes none; deepspeed#8609 adds momentum_buffer.pt."""
    truth = truth_of(ORIGINALS / "zero1-muon")
    names = [key.removeprefix("model.") for key in truth if key.startswith("model.")]
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for name in names:
        states[name]["fp32"] = truth[f"model.{name}"]
        for state in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            tensor = truth.get(f"optimizer.state.{name}.{state}")
            states[name] |= {} if tensor is None else {state: tensor}
        if "exp_avg" in states[name]:
            states[name]["step"] = torch.tensor(3.0)
    is_muon = {name: "momentum_buffer" in tensors for name, tensors in states.items()}
    groups = [
        (
            {"use_muon": flag, "lr": 0.02, "weight_decay": 0.1},
            [n for n in names if is_muon[n] == flag],
        )
        for flag in (True, False)
    ]
    write_universal(tmp_path / "in", states, groups)
    _, tensors = to_dcp(tmp_path / "in", tmp_path / "out")
    assert_is_truth(tensors, ORIGINALS / "zero1-muon")
    matrix = next(name for name in names if is_muon[name])
    assert hyperparameters_of(tmp_path / "out", matrix)["algorithm"] == "muon"


def damage_model(folder: Path, edit: Callable[[Any], None]) -> None:
    for path in folder.glob("*model_states.pt"):
        change(path, edit)


def test_tensor_parallelism_and_experts_are_refused(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("zero1-adamw")
    part = folder / "zero/embedding.weight/exp_avg.pt"
    whole = torch.load(part)
    torch.save({**whole, "is_expert_param": True}, part)
    refused(folder, tmp_path, "experts of DeepSpeed's MoE are not read")
    torch.save({"param": torch.cat([whole["param"]] * 2), "cat_dim": 0}, part)
    refused(folder, tmp_path, r"exp_avg.pt: is \[22, 6\].* tensor parallelism are not read")
    torch.save(whole, part)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    refused(folder, tmp_path, "mp_rank_01_model_states.pt: checkpoints with tensor parallelism")


def test_parameters_that_deepspeeds_tool_mixes_up_are_refused(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("zero1-adamw")

    def edit(value: Any) -> None:
        value["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    damage_model(folder, edit)
    refused(
        folder, tmp_path, "round_robin_gradients: .* convert the checkpoint that it was made of"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["fp32", "exp_avg", "exp_avg_sq"])
def test_missing_files(file: str, name: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied(name)
    (folder / f"zero/lm_head.weight/{file}.pt").unlink()
    damaged(folder, tmp_path, "missing")
    shutil.rmtree(folder / "zero/lm_head.weight")
    damaged(folder, tmp_path, "lm_head.weight")


def test_missing_model_states(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("zero3-adamw")
    last = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    last.rename(tmp_path / "kept")
    damaged(folder, tmp_path, "ends before its parameters do")  # The frozen one.
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").rename(last)
    refused(folder, tmp_path, r"lacks files of model states: it has files of ranks \[1\]")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        *((name, "the parameter .* (is|leads)") for name in ("../../secret", "/etc", "a\0b", "")),
        ("\ud800", "is damaged.*UnicodeDecodeError"),  # Half of a character.
        ("x" * 300, "cannot be listed"),
    ],
)
def test_names_that_lead_elsewhere(
    name: str, match: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("zero1-adamw")
    (tmp_path / "copy/zero1-adamw/secret").mkdir()

    def edit(value: Any) -> None:
        value["param_shapes"][0][name] = torch.Size([2])

    damage_model(folder, edit)
    damaged(folder, tmp_path, match)


def test_a_folder_that_is_a_link(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("zero1-adamw")
    (folder / "zero/lm_head.weight").rename(tmp_path / "elsewhere")
    (folder / "zero/lm_head.weight").symlink_to(tmp_path / "elsewhere")
    damaged(folder, tmp_path, "no link is followed")


def test_nothing_is_executed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    class Command:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    folder = copied("zero1-adamw")
    for name in ("zero/lm_head.weight/fp32.pt", "zero/optimizer_state.pt"):
        kept = (folder / name).read_bytes()
        torch.save(Command(), folder / name)
        damaged(folder, tmp_path, Path(name).name)
        (folder / name).write_bytes(kept)


# ------------------------------------------------------------------ what DeepSpeed gets


def expected_groups(name: str) -> list[dict[str, Any]]:
    facts = json.loads((ORIGINALS / name / "facts.json").read_text())
    return [group["hyperparameters"] for group in facts["groups"]]


def assert_is_universal(out: Path, name: str) -> None:
    """Compare files that were written with what DeepSpeed's engine had."""
    states = states_in(out)
    assert_is_truth(states, ORIGINALS / name)
    assert {tensor.dtype for tensor in states.values()} == {torch.float32}
    assert {value.item() for key, value in states.items() if key.endswith(".step")} == {3.0}
    optimizer, model = optimizer_in(out), model_states_in(out)
    groups = [dict(group) for group in optimizer["param_groups"]]
    assert [group.pop("params") for group in groups] == [[0], [1]]
    expected = expected_groups(name)
    assert [{**group, "betas": list(group["betas"])} for group in groups] == expected
    (common,) = optimizer["optimizer_state_dict"]["param_groups"]
    assert "weight_decay" not in common  # The groups differ.
    assert common["lr"] == expected[0]["lr"]
    assert optimizer["optimizer_state_dict"]["state"][0]["step"] == 3
    assert [list(group) for group in model["param_shapes"]] == [
        [
            n
            for n in (k.removeprefix("model.") for k in truth_of(ORIGINALS / name) if "model." in k)
            if (states[f"model.{n}"].ndim > 1) == is_first
        ]
        for is_first in (True, False)
    ]
    assert model["global_steps"] == 3


@pytest.mark.quick(3)
@pytest.mark.parametrize("via", [None, "universal", "tierstore", "torch", "dcp"])
@pytest.mark.parametrize("name", NAMES)
def test_round_trips(via: str | None, name: str, tmp_path: Path) -> None:
    source = FIXTURES / "universal" / name
    if via is not None:
        convert(source, tmp_path / "via.pt", to=via)
        source = tmp_path / "via.pt"
    conversion = convert(source, tmp_path / "out", to="universal")
    assert (conversion.step, conversion.lost) == (3, [])
    assert_is_universal(tmp_path / "out", name)
    model = model_states_in(tmp_path / "out")
    assert (model["seen"], model["skipped_steps"]) == (7, 0)
    if via != "tierstore":  # A run has neither buffers nor frozen parameters.
        assert model["module"].keys() == {"positions", "frozen.weight"}
        assert torch.equal(model["module"]["positions"], torch.arange(9.0))
        assert model["module"]["frozen.weight"].dtype == torch.bfloat16
    if via != "dcp" and via != "torch":  # Which do not say the dtype of the model.
        assert set(model["tierstore"]["dtypes"].values()) == {torch.bfloat16}


def test_the_scheduler_of_the_engine(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("zero1-adamw")
    scheduler = {"last_batch_iteration": 2, "base_lrs": [0.003, 0.003]}
    damage_model(folder, lambda value: value.update(lr_scheduler=scheduler))
    convert(folder, tmp_path / "run", to="tierstore")
    convert(tmp_path / "run", tmp_path / "out", to="universal")
    assert model_states_in(tmp_path / "out")["lr_scheduler"] == scheduler


@pytest.mark.parametrize(
    "name",
    ["zero1-adamw", "zero1-bf16-optimizer", "zero2-round-robin", "zero2-fp32-1", "zero3-adamw"],
)
def test_checkpoints_of_stages(name: str, tmp_path: Path) -> None:
    convert(ORIGINALS / name / "checkpoint", tmp_path / "out", to="universal")
    assert_is_universal(tmp_path / "out", name)


def test_runs(tmp_path: Path) -> None:
    """Registered states, and a step count that is a number for stage 3."""
    weights = {"a.weight": nn.Parameter(torch.randn(5, 4)), "a.bias": nn.Parameter(torch.randn(4))}
    groups = [{"params": list(weights.items()), "algorithm": "adamw", **ADAM}]
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups, store=store)
        for _ in range(2):
            for parameter in weights.values():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        commit_with(store, (1, 2))
        expected = store.pages.read_states()
    convert(tmp_path / "run", tmp_path / "out", to="universal")
    states = states_in(tmp_path / "out")
    for name, tensors in expected.items():
        assert torch.equal(states[f"model.{name}"], weights[name])
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[f"optimizer.state.{name}.{state}"], tensors[state])
    value = optimizer_in(tmp_path / "out")
    assert {key: value["param_groups"][0][key] for key in ADAM} == ADAM
    assert type(value["optimizer_state_dict"]["state"][0]["step"]) is int
    assert model_states_in(tmp_path / "out")["kept"] == {"state": (1, 2)}
    convert(tmp_path / "out", tmp_path / "again", to="tierstore")
    parameters = [(name, nn.Parameter(torch.zeros_like(p))) for name, p in weights.items()]
    with tierstore.TierStore(tmp_path / "again", resume=True) as store:
        groups = [{"params": parameters, "algorithm": "adamw", **ADAM}]
        with wanted(store) as kept:
            assert muon.Muon(groups, store=store).restore() == 2
        assert kept == {"state": (1, 2)}
        found = store.pages.read_states()
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        assert all(torch.equal(found[name][state], value) for state, value in tensors.items())


def save_stock(path: Path, optimizer: Any = torch.optim.AdamW, **shapes: tuple[int, ...]) -> Any:
    """Save a model and the optimizer that has stepped it, and return the file's value."""
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    stock = optimizer(model.named_parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    stock.step()
    value = {"model": model.state_dict(), "optimizer": stock.state_dict()}
    torch.save(value, path)
    return value


def test_shapes_extra_state_and_tied_parameters(tmp_path: Path) -> None:
    value = save_stock(tmp_path / "in.pt", w=(3, 2), scalar=(), nothing=(0, 3))
    model = value["model"]
    value["model"] = {**model, "tied": model["w"], "buffer": torch.ones(0, 2), "extra": {"a": 1}}
    torch.save(value, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="universal", dtype=torch.bfloat16)
    states = states_in(tmp_path / "out")
    assert states["model.nothing"].shape == (0, 3)
    assert torch.equal(states["model.scalar"], model["scalar"])
    saved = model_states_in(tmp_path / "out")
    assert saved["shared_params"] == {"tied": "w"}
    assert saved["module"]["extra"] == {"a": 1}
    assert saved["module"]["buffer"].shape == (0, 2)
    assert saved["tierstore"]["dtypes"] == dict.fromkeys(model, torch.bfloat16)
    convert(tmp_path / "out", tmp_path / "again.pt", to="torch")
    again = torch.load(tmp_path / "again.pt")["model"]
    assert again.keys() == value["model"].keys()
    assert torch.equal(again["tied"], model["w"])


def test_16_bit_states_become_float32(tmp_path: Path) -> None:
    value = save_stock(tmp_path / "in.pt", w=(3, 2))
    value["model"]["w"] = value["model"]["w"].bfloat16()
    for state in ("exp_avg", "exp_avg_sq"):
        value["optimizer"]["state"][0][state] = value["optimizer"]["state"][0][state].bfloat16()
    torch.save(value, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="universal")
    states = states_in(tmp_path / "out")
    assert {tensor.dtype for tensor in states.values()} == {torch.float32}
    assert torch.equal(states["model.w"], value["model"]["w"].float())
    assert model_states_in(tmp_path / "out")["tierstore"]["dtypes"] == {"w": torch.bfloat16}


def test_muon_is_refused(tmp_path: Path) -> None:
    refused(
        ORIGINALS / "zero2-muon" / "checkpoint",
        tmp_path,
        "has momentum_buffer, and DeepSpeed 0.19.8 loads universal checkpoints of Adam",
        to="universal",
    )
    Ours(tmp_path / "run").train(1).store.close()
    refused(tmp_path / "run", tmp_path, "not of Muon", to="universal")


def test_what_deepspeed_would_not_load_is_refused(tmp_path: Path) -> None:
    def check(match: str, edit: Callable[[Any], None] = lambda value: None, **options: Any) -> None:
        value = save_stock(tmp_path / "in.pt", **{"v": (3,), "w": (3, 2), **options})
        edit(value)
        torch.save(value, tmp_path / "in.pt")
        refused(tmp_path / "in.pt", tmp_path, match, to="universal")

    def state_of(value: Any, number: int) -> Any:
        return value["optimizer"]["state"][number]

    def weights_are_double(value: Any) -> None:
        value["model"]["w"] = value["model"]["w"].double()

    check("has no optimizer", lambda value: value.pop("optimizer"))
    check("the model has no tensor", lambda value: value["model"].pop("w"))
    check("no weight of parameter 'v'", lambda value: value.pop("model"))
    check("no step count of 'w'", lambda value: state_of(value, 1).clear())
    check("has the states", lambda value: state_of(value, 1).pop("exp_avg_sq"))
    check("'v' had 1 steps and 'w' 2", lambda value: state_of(value, 1)["step"].add_(1))
    check("is float64", weights_are_double)
    check("has the states", optimizer=torch.optim.Adamax)
    check("has momentum_buffer", optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
