"""Options of conversions: which tensors they mean, and calls that make no sense."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tierstore.errors import NotCarriedError
from tierstore.tools.convert.convert import convert


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with a tied weight, a buffer and an optimizer that cannot be given names."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "b": nn.Linear(4, 4)})
    model["twin"] = model["a"]
    state = {number: {"exp_avg": torch.ones(4)} for number in range(2)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    path = tmp_path / "in.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, path)
    return path


def weights_of(path: Path) -> Any:
    return torch.load(path, weights_only=True)["model"]


def test_weights_of_an_optimizer_that_cannot_be_read(source: Path, tmp_path: Path) -> None:
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="have no names"):
        convert(source, tmp_path / "out.pt", to="torch")
    convert(source, tmp_path / "out.pt", to="torch", only="model")
    assert weights_of(tmp_path / "out.pt").keys() == weights_of(source).keys()


@pytest.mark.parametrize("pattern", ["a.*", "twin.*"])
def test_tied_parameters_match_with_each_name(pattern: str, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "some.pt", to="torch", only="model", include=[pattern])
    names = {"a.weight", "a.bias", "twin.weight", "twin.bias"}
    assert weights_of(tmp_path / "some.pt").keys() == names
    convert(source, tmp_path / "out.pt", to="torch", only="model", exclude=[pattern])
    assert weights_of(tmp_path / "out.pt").keys() == weights_of(source).keys() - names
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="have no tensor"):
        convert(source, tmp_path / "x", to="dcp", only="model", include=["a.*"], exclude=[pattern])


def test_patterns_are_of_the_names_in_the_destination(tmp_path: Path) -> None:
    """Without the prefixes of wrappers; names of an optimizer with numbers are given before."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    weights = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    arguments = ("convert", tmp_path / "in.pt", tmp_path / "out.pt", "--to", "torch")
    with no_trace(tmp_path):
        code, _, error = call(*arguments, "--include", "_orig_mod.1.*")
    assert (code, "which --dry-run prints" in error) == (2, True), error
    assert call(*arguments, "--include", "1.*")[0] == 0
    found = torch.load(tmp_path / "out.pt")
    assert found["model"].keys() == {"1.weight", "1.bias"}
    (group,) = found["optimizer"]["param_groups"]
    assert group["param_names"] == ["1.weight", "1.bias"]
    expected = optimizer.state[model[1].weight]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], expected)


WRAPPERS = ("module.", "_orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module.")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_lose_the_prefixes_of_wrappers(wrapper: str, tmp_path: Path) -> None:
    model, state = {f"{wrapper}a.w": torch.ones(3), f"{wrapper}b": torch.ones(2)}, torch.randn(3)
    save_file(model, tmp_path / "in.safetensors")
    torch.save(model, tmp_path / "in.pt")
    optimizer = {
        "state": {name: {"exp_avg": state[: len(tensor)]} for name, tensor in model.items()},
        "param_groups": [{"lr": 0.1, "params": list(model)}],
    }
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("in.safetensors", "in.pt", "dcp"):
        conversion = convert(tmp_path / name, tmp_path / f"{name}.pt", to="torch")
        assert conversion.lost == []
        assert weights_of(tmp_path / f"{name}.pt").keys() == {"a.w", "b"}
    found = torch.load(tmp_path / "dcp.pt", weights_only=True)["optimizer"]
    assert found["param_groups"][0]["param_names"] == ["a.w", "b"]
    assert torch.equal(found["state"][0]["exp_avg"], state)
    twice = {"w": torch.ones(2), "_orig_mod.w": torch.ones(2)}
    save_file(twice, tmp_path / "twice.safetensors")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="have the same name"):
        convert(tmp_path / "twice.safetensors", tmp_path / "x.pt", to="torch")


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_a_module_of_the_name_module_keeps_it(to: str, tmp_path: Path) -> None:
    """A file in which all names begin with "module." is compared with what was to be written."""
    model = {"module.w": torch.ones(3), "head": torch.ones(2)}
    torch.save(model, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to=to, exclude=["head"])
    torch.save({f"module.module.{n}": t for n, t in model.items()}, tmp_path / "ddp.pt")
    conversion = convert(tmp_path / "ddp.pt", tmp_path / "of ddp", to=to)
    assert {e.parameter for e in conversion.entries} == {"module.module.w", "module.head"}


def test_parts_by_pattern_become_the_whole_again(tmp_path: Path) -> None:
    """With the dtypes of the model where they differ from masters."""
    names = ["a.w", "b.w"]
    ours = {"step": 3, "extra": "null", "dtypes": dict.fromkeys(names, torch.bfloat16)}
    states = {name: {"exp_avg": torch.ones(2), "step": 3.0} for name in names}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": names}]}
    model = {name: torch.ones(2) for name in names}
    torch.save({"model": model, "optimizer": optimizer, "tierstore": ours}, tmp_path / "in.pt")
    for name in names:
        convert(tmp_path / "in.pt", tmp_path / name, to="dcp", include=[name])
    convert([tmp_path / name for name in names], tmp_path / "out.pt", to="torch")
    assert weights_of(tmp_path / "out.pt").keys() == model.keys()
    assert (
        torch.load(tmp_path / "out.pt", weights_only=True)["tierstore"]["dtypes"] == ours["dtypes"]
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e8m0fnu])
def test_dtypes_that_are_not_written(dtype: torch.dtype, tmp_path: Path) -> None:
    value = {"model": {"w": torch.ones(2)}, "tierstore": {"dtypes": {"w": dtype}}}
    torch.save(value, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="that 'w' is float8"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")


@pytest.mark.parametrize("prefix", ["", "module."])
def test_parts_of_a_model_lose_the_prefix_together(prefix: str, tmp_path: Path) -> None:
    """All names in one part may begin with "module.", which is of a module."""
    parts = {"one": "module.w", "two": "head.w"}
    for part, name in parts.items():
        save_file({f"{prefix}{name}": torch.ones(2)}, tmp_path / f"{part}.safetensors")
        torch.save({f"{prefix}{name}": torch.ones(2)}, tmp_path / f"{part}.pt")
    for suffix in ("safetensors", "pt"):
        sources = [tmp_path / f"{part}.{suffix}" for part in parts]
        conversion = convert(sources, tmp_path / f"{suffix}.out", to="torch")
        assert {entry.parameter for entry in conversion.entries} == set(parts.values())


def saved_model(prefix: str, form: str, path: Path) -> None:
    """Save a model with a module of the name "module", and a frozen head."""
    model = {f"{prefix}module.w": torch.ones(3), f"{prefix}head": torch.ones(2)}
    if form == "torch":
        torch.save({"model": model}, path)
    else:
        dcp.save({"model": model}, checkpoint_id=path, no_dist=True)


def saved_optimizer(prefix: str, form: str, path: Path) -> None:
    """Save the optimizer of the module."""
    name = f"{prefix}module.w"
    group = {"lr": 0.1, "params": [name], "param_names": [name]}
    optimizer = {"state": {name: {"exp_avg": torch.ones(3)}}, "param_groups": [group]}
    if form == "torch":
        torch.save(optimizer, path)
    else:
        dcp.save({"optimizer": optimizer}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("of_model", ["", "module."])
@pytest.mark.parametrize("of_optimizer", ["", "module."])
@pytest.mark.parametrize("forms", [("dcp", "dcp"), ("torch", "dcp"), ("torch", "torch")])
def test_a_model_and_its_optimizer_lose_the_prefix(
    forms: tuple[str, str], of_model: str, of_optimizer: str, tmp_path: Path
) -> None:
    """The program may have wrapped the model after it made the optimizer, or save what is in it."""
    saved_model(of_model, forms[0], tmp_path / "one.pt")
    saved_optimizer(of_optimizer, forms[1], tmp_path / "two.pt")
    sources = [tmp_path / "one.pt", tmp_path / "two.pt"]
    conversion = convert(sources, tmp_path / "out.pt", to="torch")
    found = {entry.key for entry in conversion.entries}
    assert found == {("module.w", "master"), ("module.w", "exp_avg"), ("head", "(buffer)")}


def test_dtype_where_nothing_tells_buffers(source: Path, tmp_path: Path) -> None:
    conversion = convert(
        source, tmp_path / "out.pt", to="torch", only="model", dtype=torch.bfloat16
    )
    assert "no param group tells parameters from buffers" in conversion.notes[0]
    found = weights_of(tmp_path / "out.pt")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.int64}


def test_dtype_with_an_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.named_parameters())
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(value, tmp_path / "in.pt")
    for only in (None, "model"):
        out = tmp_path / f"{only}.pt"
        conversion = convert(tmp_path / "in.pt", out, to="torch", only=only, dtype=torch.bfloat16)
        assert conversion.notes == []
        assert weights_of(out)["1.running_mean"].dtype == torch.float32
        assert weights_of(out)["1.weight"].dtype == torch.bfloat16


def test_every_tensor_has_a_checksum(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.named_parameters())
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(value, tmp_path / "in.pt")
    code, out, _ = call("convert", tmp_path / "in.pt", tmp_path / "out", "--to", "dcp", "--json")
    assert code == 0
    entries = json.loads(out)["entries"]
    assert {entry["state"] for entry in entries} == {"master", "(buffer)"}
    assert all(len(entry["xxh3_128"]) == 32 for entry in entries)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tensor_of_two_sources_is_refused(tied: bool, source: Path, tmp_path: Path) -> None:
    """As a buffer beside a parameter, or under another name of a tied one."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.named_parameters())
    value = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(value, tmp_path / "other.pt")
    name = "twin.weight" if tied else "1.running_mean"
    save_file({name: torch.ones(3)}, tmp_path / "more.safetensors")
    sources = [source if tied else tmp_path / "other.pt", tmp_path / "more.safetensors"]
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=f"{name}' twice"):
        convert(sources, tmp_path / "out", to="dcp", only="model")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--to", "dcp", "--shard-size", "1GB"), "for safetensors"),
        (("--to", "safetensors", "--shard-size", "0"), "at least 1"),
        (("--to", "torch", "--bare-keys"), "is for dcp"),
        (("--to", "torch", "--momentum-convention", "average"), "does not apply"),
    ],
)
def test_options_without_a_meaning(
    options: tuple[str, ...], expected: str, source: Path, tmp_path: Path
) -> None:
    with no_trace(tmp_path):
        code, _, error = call("convert", source, tmp_path / "out", "--only", "model", *options)
    assert code == 2
    assert expected in error


def test_bare_keys_of_a_trainer(tmp_path: Path) -> None:
    torch.save({"train_state.weight": torch.ones(3), "other": torch.ones(2)}, tmp_path / "in.pt")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="without --bare-keys"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", bare_keys=True)
    convert(tmp_path / "in.pt", tmp_path / "out", to="dcp")


def test_files_of_weights_that_the_index_does_not_name(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    save_file({"a": torch.ones(3)}, source / "model-00001-of-00001.safetensors")
    save_file({"b": torch.ones(3)}, source / "adapter.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NotCarriedError, match=r"adapter\.safetensors.*[^)]$"):
        convert(source, tmp_path / "out", to="safetensors", strict=True)
    convert(source, tmp_path / "out", to="safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a"}


def test_dtypes_of_safetensors_that_are_not_read(tmp_path: Path) -> None:
    tensors = {"scale": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}
    header = json.dumps(tensors).encode()
    path = tmp_path / "in.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="dtype F8_E8M0"):
        convert(path, tmp_path / "out", to="dcp")


@pytest.mark.parametrize("kind", ["deepspeed", "megatron", "universal", "dcp", "tierstore"])
def test_files_where_directories_are_expected(kind: str, source: Path, tmp_path: Path) -> None:
    with no_trace(tmp_path):
        code, _, error = call("convert", source, tmp_path / "o", "--to", "dcp", "--from", kind)
    assert (code, "is not a directory" in error) == (2, True), error


def test_a_directory_where_a_file_is_expected(source: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    arguments = ("convert", tmp_path / "in", tmp_path / "o", "--to", "dcp", "--from", "torch")
    with no_trace(tmp_path):
        code, _, error = call(*arguments)
    assert (code, "is a file: name it" in error) == (2, True), error
