"""Files of safetensors, beside the library itself."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tests.support.published import Ours, Reference, assert_equal, save_with_dcp, tensors_in
from tierstore.tools.convert.convert import convert


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {
        "wide": torch.randn(7, 5),
        "half": torch.randn(3).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 4),
        "counts": torch.arange(5),
        "flags": torch.tensor([True, False, True]),
        "small": torch.tensor([-3, 0, 127], dtype=torch.int8),
    }
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].float(), tensor.float()), key


@pytest.mark.parametrize("shard_size", [None, 64])
def test_round_trip(shard_size: int | None, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "torch.pt", to="torch")
    out = tmp_path / "out"
    convert(tmp_path / "torch.pt", out, to="safetensors", shard_size=shard_size)
    files = sorted(out.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert_same(found, weights())
    if shard_size is None:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert len(files) > 2
        assert index["weight_map"].keys() == weights().keys()
        for name, file in index["weight_map"].items():
            assert name in load_file(out / file)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights().values())
    convert(out, tmp_path / "again.pt", to="torch")
    assert_same(torch.load(tmp_path / "again.pt")["model"], weights())


@pytest.mark.parametrize("shard_size", [None, "2KiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_begin_a_run(
    dtype: torch.dtype,
    shard_size: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Masters are the weights of the files, whatever the dtype of the model."""
    reference = Reference().train(1)
    torch.save(reference.model.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "in", to="safetensors", shard_size=shard_size)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) == (1 if shard_size is None else 5)
    convert(tmp_path / "in", tmp_path / "weights", to="dcp")
    ours = Ours(tmp_path / "run", seed=7, dtype=dtype)
    with caplog.at_level("WARNING", "tierstore"):
        assert ours.optimizer.restore(checkpoint=tmp_path / "weights") == 0
    assert "has no optimizer: the run begins at step 0 with its weights" in caplog.text
    expected = {n: p.detach().clone() for n, p in reference.model.named_parameters()}
    assert_equal(
        {n: p.detach() for n, p in ours.model.named_parameters()},
        {n: p.to(dtype) for n, p in expected.items()},
    )
    for name, states in ours.store.pages.read_states().items():
        master = states.pop("master", expected[name])
        assert torch.equal(master, expected[name])
        assert states
        assert not any(state.any() for state in states.values())
    assert ours.optimizer.param_groups[1]["betas"] == (0.8, 0.95)
    ours.store.close()
    resumed = Ours(tmp_path / "run", seed=8, dtype=dtype, resume=True)
    assert resumed.optimizer.restore() == 0
    if dtype == torch.float32:
        fresh = Reference(model=reference.model).train(2, 3)
        resumed.model.load_state_dict({"mean": reference.model.state_dict()["mean"]}, strict=False)
        assert_equal(dict(resumed.train(2, 3).model.state_dict()), fresh.model_state())
    resumed.store.close()


def test_weights_alone_are_not_a_run(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "in.safetensors")
    arguments = ("convert", tmp_path / "in.safetensors", tmp_path / "run", "--to", "tierstore")
    with no_trace(tmp_path):
        code, _, error = call(*arguments)
    assert (code, "convert it with --to dcp" in error) == (2, True)
    assert "restore(checkpoint=DST)" in error


def test_what_is_not_carried_is_named(tmp_path: Path) -> None:
    save_with_dcp(Reference().train(1), tmp_path / "dcp", flat=False, prefix=True)
    arguments = ("convert", tmp_path / "dcp", tmp_path / "out", "--to", "safetensors")
    with no_trace(tmp_path):
        code, _, error = call(*arguments, "--strict")
        assert (code, "not carried: the optimizer" in error) == (1, True)
    code, _, error = call(*arguments, "--only", "model", "--strict", "--dtype", "bfloat16")
    assert (code, error) == (0, "")
    expected = {
        key.removeprefix("model."): tensor.to(torch.float32 if "mean" in key else torch.bfloat16)
        for key, tensor in tensors_in(tmp_path / "dcp").items()
        if key.startswith("model.")
    }
    assert_equal(load_file(tmp_path / "out/model.safetensors"), expected)


def test_filters_and_files_of_a_trainer(tmp_path: Path) -> None:
    source = tmp_path / "trainer"
    source.mkdir()
    save_file(weights(), source / "model.safetensors")
    (source / "scheduler.pt").write_bytes(b"x")
    (source / "config.json").write_text("{}")
    code, _, error = call(
        *("convert", source, tmp_path / "out.pt", "--to", "torch"),
        *("--include", "[hw]*", "--exclude", "half"),
    )
    assert code == 0
    assert error == "tierstore: not carried: 'scheduler.pt' beside the weights\n"
    assert torch.load(tmp_path / "out.pt")["model"].keys() == {"wide"}


def rewrite(path: Path, header: Any, data: bytes = b"\0" * 12) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


F = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}


@pytest.mark.parametrize(
    "header",
    [
        {"w": {**F, "shape": [4]}},
        {"w": {**F, "shape": [-3]}},
        {"w": {**F, "shape": [2**62, 2**62]}},
        {"w": {**F, "dtype": "X9"}},
        {"w": {**F, "data_offsets": [4, 16]}},
        {"w": F, "v": F},
        {"w": {**F, "data_offsets": [0, 8], "shape": [2]}},
        {"w": 3},
        [1],
        b"{" * 10000,
        b"[" * 100000,
        b'{"w": 1, "w": 2}',
        b"\xff\xfe",
    ],
    ids=repr,
)
def test_hostile_headers(header: Any, tmp_path: Path) -> None:
    rewrite(tmp_path / "in.safetensors", header)
    with no_trace(tmp_path):
        code, _, error = call(
            *("convert", tmp_path / "in.safetensors", tmp_path / "o.pt", "--to", "torch")
        )
    assert code == 1
    assert error.startswith("tierstore: ")


@pytest.mark.parametrize("name", ["../in.safetensors", "/etc/x.safetensors", "none.safetensors"])
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rewrite(tmp_path / "in.safetensors", {"w": F})
    (source / "a.safetensors").symlink_to(tmp_path / "in.safetensors")
    for target in (name, "a.safetensors"):
        index = {"weight_map": {"w": target}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError):
            convert(source, tmp_path / "o.pt", to="torch")


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.long)])
def test_damaged_files(count: int, tmp_path: Path) -> None:
    """A flip in the data is not noticed; nothing else happens than an error or a result."""
    save_file(weights(), tmp_path / "original.safetensors")
    convert(tmp_path / "original.safetensors", tmp_path / "out", to="safetensors", shard_size=64)
    numbers = random.Random(count)
    for number in range(count):
        source = Path(shutil.copytree(tmp_path / "out", tmp_path / "source"))
        path = numbers.choice(sorted(source.iterdir()))
        data = bytearray(path.read_bytes())
        if numbers.random() < 0.3:
            del data[numbers.randrange(len(data)) :]
        else:
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        path.write_bytes(data)
        with no_trace(tmp_path):
            code, _, error = call("convert", source, tmp_path / "o.pt", "--to", "torch")
            (tmp_path / "o.pt").unlink(missing_ok=True)
        assert code in (0, 1, 2), number
        assert code == 0 or error.startswith("tierstore: "), (number, error)
        shutil.rmtree(source)
