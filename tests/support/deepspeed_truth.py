"""The states that DeepSpeed's engine had when it wrote a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch


def key_of(name: str) -> str:
    """Return the DCP key of ``<parameter>|<state>``."""
    parameter, state = name.split("|")
    return f"model.{parameter}" if state == "master" else f"optimizer.state.{parameter}.{state}"


def truth_of(folder: Path) -> dict[str, torch.Tensor]:
    """DCP key -> the tensor as DeepSpeed's engine had it, in fp32."""
    with numpy.load(folder / "truth.npz") as truth:
        return {key_of(name): torch.from_numpy(truth[name]) for name in truth.files}


def assert_is_truth(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare all masters and states, bit for bit; no other state is there."""
    truth = truth_of(folder)
    for key, expected in truth.items():
        assert torch.equal(tensors[key].float(), expected), key
    states = {key for key in tensors if key.startswith("optimizer.state.")}
    assert {key for key in states if not key.endswith(".step")} <= truth.keys()
