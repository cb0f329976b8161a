"""DCP directories whose model and optimizer are not under "model" and "optimizer"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import tierstore
from tests.support.conversions import no_trace
from tests.support.published import assert_equal, tensors_in
from tierstore.inspection.slices import Slices
from tierstore.tools.convert.convert import convert


def trained(*, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Linear(5, 7), "optim": nn.Linear(7, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)


def save(value: dict[str, Any], path: Path) -> Path:
    dcp.save(value, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, torch.Tensor]:
    model, optimizer = trained()
    save({"model": model, "optimizer": optimizer}, tmp_path / "expected")
    convert(tmp_path / "expected", tmp_path / "of expected", to="dcp")
    found = tensors_in(tmp_path / "of expected")
    assert len(found) == 4 * 4  # Weights, two moments and step counts.
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        lambda model, optimizer: {"app": {"model": model, "optim": optimizer}},
        lambda model, optimizer: {"net": model, "optim": optimizer, "epoch": 3},
        lambda model, optimizer: {
            "a": {"b": {"model_state_dict": model, "optimizer_state_dict": optimizer}}
        },
    ],
)
def test_inner_paths(
    place: Any, flat: bool, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save(place(*trained(flat=flat)), tmp_path / "in")
    conversion = convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert_equal(tensors_in(tmp_path / "out"), expected)
    assert len(conversion.lost) == ("epoch" in place({}, {}))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["optimizer", "optim"])
def test_a_model_and_its_optimizer_in_two_directories(
    name: str, flat: bool, expected: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model, optimizer = trained(flat=flat)
    sources = [save(model, tmp_path / "one"), save({name: optimizer}, tmp_path / "other")]
    convert(sources, tmp_path / "out", to="dcp")
    assert_equal(tensors_in(tmp_path / "out"), expected)


def test_bare_models_of_such_names(tmp_path: Path) -> None:
    model, _ = trained()
    save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert tensors_in(tmp_path / "out").keys() == {f"model.{name}" for name in model}


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (lambda model: {"generator": model}, "tensors at inner paths, such as 'generator.net"),
        (lambda model: {"a": {"model": model}, "b": {"model": model}}, "several models"),
        (lambda model: {"epoch": 3}, "have no tensor"),
    ],
)
def test_models_that_are_not_found_are_refused(place: Any, match: str, tmp_path: Path) -> None:
    save(place(trained()[0]), tmp_path / "in")
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=match):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")


def test_whole_chunks_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP reads a chunk whose elements are in another form as a whole, whatever ``memory`` is."""
    monkeypatch.setattr(Slices, "elements", lambda *arguments: None)
    tensor = torch.arange(20.0 * 2**20 / 4).view(1024, -1).t()
    save({"model": {"w": tensor, "v": tensor + 1}}, tmp_path / "in")
    real, reading, most = dcp.FileSystemReader.read_data, [], []

    def read_data(*arguments: Any) -> Any:
        reading.append(1)
        most.append(len(reading))
        try:
            return real(*arguments)
        finally:
            reading.pop()

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", read_data)
    convert(tmp_path / "in", tmp_path / "out.pt", to="torch", memory="64MiB")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert torch.equal(found["w"], tensor)
    assert torch.equal(found["v"], tensor + 1)
    assert max(most) == 1


def test_transposed_tensors_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "matrix": torch.randn(300, 200).t(),
        "permuted": torch.randn(2, 1, 3, 4).permute(2, 0, 3, 1),
        "gaps": torch.randn(6, 8)[:, ::2].t(),
    }
    save({"model": tensors}, tmp_path / "in")
    monkeypatch.delattr(dcp.FileSystemReader, "read_data")
    convert(tmp_path / "in", tmp_path / "out.pt", to="torch")
    assert_equal(torch.load(tmp_path / "out.pt")["model"], tensors)
