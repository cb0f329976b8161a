"""Carry new checkpoints of Trainer and accelerate bit for bit, and train on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.peers.huggingface_cases import CASES
from tests.support.continuation import differences
from tests.support.deepspeed_truth import assert_is_truth, truth_of
from tests.support.huggingface_files import converted, sources_of
from tierstore.tools.convert.convert import convert


@pytest.mark.parametrize("to", ["tierstore", "dcp", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_carried(
    huggingface: dict[str, Path], name: str, to: str, tmp_path: Path
) -> None:
    _, tensors = converted(huggingface[name], tmp_path / "out", to)
    assert_is_truth(tensors, huggingface[name])


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_carried(huggingface: dict[str, Path], name: str, tmp_path: Path) -> None:
    sources = sources_of(huggingface[name])
    convert(sources, tmp_path / "out", to="safetensors", assume_model_order=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in truth_of(huggingface[name]).items():
        if key.startswith("model."):
            assert torch.equal(found[key.removeprefix("model.")], value)


@pytest.mark.parametrize("name", CASES)
def test_the_next_update_is_the_same(
    huggingface: dict[str, Path], name: str, tmp_path: Path
) -> None:
    converted(huggingface[name], tmp_path / "out", "dcp")
    found = differences(tmp_path / "out", huggingface[name])
    assert max({**found["adamw"], **found["muon"]}.values()) < 1e-5
    without = differences(tmp_path / "out", huggingface[name], momentum=False)
    assert min({**without["adamw"], **without["muon"]}.values()) > 0.05
