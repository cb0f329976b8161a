"""DeepSpeed's universal checkpoints, read and written with stock torch.load and torch.save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def folder_in(directory: Path) -> Path:
    """Return the folder that ``latest_universal`` names."""
    return directory / (directory / "latest_universal").read_text()


def states_in(directory: Path) -> dict[str, torch.Tensor]:
    """DCP key -> tensor of a parameter that has states."""
    found = {}
    for path in folder_in(directory).glob("zero/*/*.pt"):
        value = torch.load(path, weights_only=True)
        tensor = value["param"] if isinstance(value, dict) else value
        name = path.parent.name
        is_master = path.stem == "fp32"
        found[f"model.{name}" if is_master else f"optimizer.state.{name}.{path.stem}"] = tensor
    return found


def optimizer_in(directory: Path) -> dict[str, Any]:
    """Return what all parameters have in common."""
    path = folder_in(directory) / "zero/optimizer_state.pt"
    value: dict[str, Any] = torch.load(path, weights_only=True)
    return value


def model_states_in(directory: Path) -> dict[str, Any]:
    """Return the model states for stages 1 and 2."""
    path = folder_in(directory) / "mp_rank_00_model_states.pt"
    value: dict[str, Any] = torch.load(path, weights_only=True)
    return value


def write_universal(
    folder: Path,
    states: Mapping[str, Mapping[str, torch.Tensor]],
    groups: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
) -> None:
    """Write a universal checkpoint as DeepSpeed's tool does for stages 1 and 2.

    Args:
        folder: of the files.
        states: parameter -> name of the file -> tensor, such as "fp32" and "exp_avg".
        groups: hyperparameters and names of parameters.
    """
    for name, tensors in states.items():
        (folder / "zero" / name).mkdir(parents=True)
        for state, tensor in tensors.items():
            value = tensor if state == "step" else {"cat_dim": 0, "param": tensor}
            torch.save(value, folder / "zero" / name / f"{state}.pt")
    saved = [{**values, "params": [number]} for number, (values, _) in enumerate(groups)]
    optimizer = {"param_groups": saved, "ds_version": "0.19.8"}
    torch.save(optimizer, folder / "zero/optimizer_state.pt")
    shapes = [
        OrderedDict((name, states[name]["fp32"].shape) for name in names) for _, names in groups
    ]
    model = {"module": OrderedDict(), "param_shapes": shapes, "global_steps": 3}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
