"""Carry new checkpoints of torch_checkpointing bit for bit, and train on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.peers.torch_checkpointing_cases import CASES
from tests.support.continuation import differences
from tests.support.deepspeed_truth import assert_is_truth, truth_of
from tests.support.huggingface_files import converted
from tierstore.tools.convert.convert import convert


@pytest.mark.parametrize("to", ["tierstore", "dcp", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_is_carried(
    torch_checkpointing: dict[str, Path], name: str, to: str, tmp_path: Path
) -> None:
    _, tensors = converted(torch_checkpointing[name], tmp_path / "out", to, names=False)
    assert_is_truth(tensors, torch_checkpointing[name])


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_carried(
    torch_checkpointing: dict[str, Path], name: str, tmp_path: Path
) -> None:
    convert(torch_checkpointing[name] / "checkpoint", tmp_path / "out", to="safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in truth_of(torch_checkpointing[name]).items():
        if key.startswith("model."):
            assert torch.equal(found[key.removeprefix("model.")], value)


@pytest.mark.parametrize("name", CASES)
def test_the_next_update_is_the_same(
    torch_checkpointing: dict[str, Path], name: str, tmp_path: Path
) -> None:
    converted(torch_checkpointing[name], tmp_path / "out", "dcp", names=False)
    found = differences(tmp_path / "out", torch_checkpointing[name])
    assert max(found["adamw"].values()) < 1e-5
    without = differences(tmp_path / "out", torch_checkpointing[name], momentum=False)
    assert min(without["adamw"].values()) > 0.05
