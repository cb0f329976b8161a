"""Sources that would make a wrong checkpoint without a word: right values, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import muon
import tierstore
from tests.checkpoint.test_begin_from_others import RULES, fused_adam
from tests.support.conversions import no_trace
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
from tierstore.tools.convert.convert import convert


def resumed(run: Path) -> tuple[nn.Module, muon.Muon]:
    model = small_net()
    store = tierstore.TierStore(run, resume=True)
    optimizer = muon.Muon(one_group(model), store=store)
    optimizer.restore()
    return model, optimizer


def save_torch(model: nn.Module, states: dict[str, Any], path: Path) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": states}, path)
    return path


@pytest.mark.quick(6)
@pytest.mark.parametrize("step", [50, torch.tensor(50), None])
@pytest.mark.parametrize("source", ["torch", "dcp"])
@pytest.mark.parametrize("to", ["tierstore", "dcp", "torch"])
def test_a_step_count_of_the_group(source: str, to: str, step: Any, tmp_path: Path) -> None:
    """Apex's and TransformerEngine's FusedAdam: the next step is the one of torch.optim."""
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(50))
    state, states = states_of(model, stock)
    if source == "torch":
        path = save_torch(model, fused_adam(stock.state_dict(), step), tmp_path / "in.pt")
    else:
        path = save({"model": state, "optimizer": fused_adam(states, step)}, tmp_path / "in")
    if step is None:
        with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="number of steps"):
            convert(path, tmp_path / "out", to=to)
        return
    convert(path, tmp_path / "out", to=to)
    if to == "torch":
        other = small_net()
        optimizer: torch.optim.Optimizer = stock_adamw(other)
        loaded = torch.load(tmp_path / "out", weights_only=True)
        assert loaded["optimizer"]["param_groups"][0]["step"] == 50  # As FusedAdam needs it.
        other.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    elif to == "dcp":
        other, optimizer = begun(tmp_path / "out", tmp_path / "run")
    else:
        other, optimizer = resumed(tmp_path / "out")
    assert_trains_alike(other, optimizer, model, stock, range(50, 52))
    if isinstance(optimizer, muon.Muon):
        optimizer.store.close()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_codes_of_weights(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Weights in float8 with their scales beside them, as DeepSeek-V3 has them."""
    weight = torch.randn(8, 8)
    scale = weight.abs().max() / 448
    tensors = {"w": (weight / scale).to(torch.float8_e4m3fn), "w_scale_inv": scale.reshape(1, 1)}
    save_file(tensors, tmp_path / "in.safetensors")
    with (
        no_trace(tmp_path),
        pytest.raises(tierstore.CheckpointError, match=r"'w' is float8_e4m3fn.*are codes"),
    ):
        convert(tmp_path / "in.safetensors", tmp_path / "out", to="dcp", dtype=dtype)


@pytest.mark.parametrize("state", ["weight", "exp_avg"])
def test_codes_that_a_param_group_has(state: str, tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(1))
    weights, states = dict(model.state_dict()), stock.state_dict()
    held = weights if state == "weight" else states["state"][0]
    key = "0.weight" if state == "weight" else state
    held[key] = held[key].to(torch.int8)
    torch.save({"model": weights, "optimizer": states}, tmp_path / "in.pt")
    with (
        no_trace(tmp_path),
        pytest.raises(tierstore.CheckpointError, match=f"{state} of '0.weight' is int8.*are codes"),
    ):
        convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")


def test_buffers_of_whole_numbers_are_none(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 3), "steps": torch.tensor(7), "mask": torch.ones(3, dtype=bool)}
    save_file(tensors, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "out", to="safetensors", dtype=torch.bfloat16)
    found = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        **{"w": torch.bfloat16, "steps": torch.int64, "mask": torch.bool}
    }


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_with_the_states_of_adamw(rule: str, tmp_path: Path) -> None:
    make, keys, match = RULES[rule]
    model = small_net()
    stock = make(list(model.named_parameters()))
    train(model, stock, range(2))
    for group in stock.param_groups:
        group |= keys
    path = save_torch(model, stock.state_dict(), tmp_path / "in.pt")
    if rule == "LAMB":
        with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=match):
            convert(path, tmp_path / "out", to="tierstore")
    else:  # Of torch.optim, which Paged has: the run tells it.
        convert(path, tmp_path / "out", to="tierstore")
        with pytest.raises(
            (ValueError, tierstore.RunMismatchError), match=f"{match}|max_exp_avg_sq"
        ):
            resumed(tmp_path / "out")
    convert(path, tmp_path / "same.pt", to="torch")  # Which says no other rule of it.


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_of_older_torch_cannot_be_told_from_adamw(decay: float, tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model, weight_decay=decay)
    train(model, stock, range(2))
    states = stock.state_dict()
    for group in states["param_groups"]:
        del group["decoupled_weight_decay"]
    done = convert(save_torch(model, states, tmp_path / "in.pt"), tmp_path / "out", to="tierstore")
    assert [note for note in done.notes if "may be Adam" in note] == [
        "the param group of '0.weight' (1 such groups) is read as AdamW, but may be Adam: Adam's "
        "weight decay is not decoupled. If it was Adam, convert with --only model"
    ][: decay > 0]


def test_an_optimizer_further_in(tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(3))
    held = {"trainer": {"model": model.state_dict(), "optim": {"adamw": stock.state_dict()}}}
    torch.save(held, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="tierstore")
    other, optimizer = resumed(tmp_path / "out")
    assert_trains_alike(other, optimizer, model, stock, range(3, 5))
    optimizer.store.close()


def test_parameters_that_never_had_a_gradient(tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    for _ in range(3):
        stock.zero_grad()
        model[0](torch.ones(2, 8)).square().mean().backward()  # model[1] is not used.
        stock.step()
    path = save_torch(model, stock.state_dict(), tmp_path / "in.pt")
    convert(path, tmp_path / "out", to="tierstore")
    other, optimizer = resumed(tmp_path / "out")
    assert [float(s["step"]) for s in optimizer.state_dict()["state"].values()] == [3, 3, 0, 0]
    assert_trains_alike(other, optimizer, model, stock, range(3, 6))
    optimizer.store.close()


@pytest.mark.parametrize(
    ("given", "beside", "missing"),
    [
        (("model-00001-of-00003.safetensors",), ("model-00003-of-00003.safetensors",), "2"),
        (("pytorch_model-00002-of-00002.bin",), (), "1"),
        (("weights_rank0.pt",), ("weights_rank1.pt", "weights_rank2.pt"), "2"),
        (("consolidated.00.pth",), ("consolidated.01.pth",), "1"),
    ],
)
def test_files_that_are_parts_by_name(
    given: tuple[str, ...], beside: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for number, name in enumerate((*given, *beside)):
        held = {f"w{number}": torch.randn(3, 3)}
        write = save_file if name.endswith(".safetensors") else torch.save
        write(held, tmp_path / "in" / name)
    with (
        no_trace(tmp_path),
        pytest.raises(
            tierstore.CheckpointError, match=rf"in parts, and {missing} of them are not named"
        ),
    ):
        convert([tmp_path / "in" / name for name in given], tmp_path / "out", to="dcp")


@pytest.mark.parametrize(
    "names",
    [
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("consolidated.00.pth",),
        ("weights_rank0.pt", "weights_rank1.pt"),
        ("lora_rank8.safetensors",),
        ("adapter-rank-16.safetensors",),
        ("epoch-3-of-10.pt",),
    ],
)
def test_all_parts_together(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("lora_rank16.safetensors", "adapter-rank-32.safetensors"):
        save_file({"other": torch.randn(3)}, tmp_path / name)
    for number, name in enumerate(names):
        write = save_file if name.endswith(".safetensors") else torch.save
        write({f"w{number}": torch.randn(3, 3)}, tmp_path / name)
    convert([tmp_path / name for name in names], tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert len(found) == len(names)


def test_a_directory_with_one_part_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.randn(3, 3)}, tmp_path / "in/model-00001-of-00002.safetensors")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="in parts, and 1"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")


def test_shards_of_dcp_in_safetensors(tmp_path: Path) -> None:
    whole = {"w": torch.arange(32.0).view(8, 4)}
    writer = HuggingFaceStorageWriter(path=str(tmp_path / "in"), fqn_to_index_mapping={"w": 1})
    dcp.save(whole, storage_writer=writer, no_dist=True)
    path = next((tmp_path / "in").glob("*.safetensors"))
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert "DCP_SHARDING_INFO" in header["__metadata__"]
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="shards of tensors"):
        convert(path, tmp_path / "out", to="dcp")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("zero_pp_rank_0_mp_rank_00optim_states.pt", "names of DeepSpeed before 0.6"),
        ("mp_rank_00_model_states.pt", r"ZeRO stage 0.*Name the file mp_rank_00_model_states\.pt"),
    ],
)
def test_files_of_deepspeed_that_are_not_read(name: str, match: str, tmp_path: Path) -> None:
    model = small_net()
    stock = stock_adamw(model)
    train(model, stock, range(2))
    (tmp_path / "in").mkdir()
    held = {"module": model.state_dict(), "optimizer": stock.state_dict()}
    torch.save(held, tmp_path / "in" / name)
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=match):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")
    if "stage 0" in match:
        convert(tmp_path / "in" / name, tmp_path / "out", to="tierstore", from_="torch")
        other, optimizer = resumed(tmp_path / "out")
        assert_trains_alike(other, optimizer, model, stock, range(2, 4))
        optimizer.store.close()
