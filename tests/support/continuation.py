"""The step that stock optimizers take with a converted checkpoint, and DeepSpeed's own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support.published import tensors_in

MUON_TOLERANCE = 0.05
"""Largest relative difference of an update of Muon: torch.optim.Muon iterates in bfloat16 and
DeepSpeed, on a CPU, in float32 or float16, with products of the Gram matrix. Five iterations of a
polynomial whose slope is at most 3.4 enlarge roundoff of 2**-8. Measured: 0.021; 0.52 without
momentum."""


def hyperparameters_of(checkpoint: Path, name: str) -> dict[str, Any]:
    """Return the hyperparameters that a DCP checkpoint has for a parameter."""
    prefix = f"optimizer.param_groups.{name}."
    keys = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    values = {key: None for key in keys if key.startswith(prefix)}
    dcp.load(values, checkpoint_id=checkpoint)
    return {key.removeprefix(prefix): value for key, value in values.items()}


def differences(
    checkpoint: Path, folder: Path, *, momentum: bool = True
) -> dict[str, dict[str, float]]:
    """Return by how much updates, beside weight decay, differ from those of DeepSpeed.

    Args:
        checkpoint: a DCP checkpoint that was converted.
        folder: of a case, with gradients and the masters after the step with them.
        momentum: whether to keep the momentum; else it is zeroed.

    Returns:
        "muon" or "adamw" -> name of a parameter -> relative difference of the update.
    """
    tensors = tensors_in(checkpoint)
    found: dict[str, dict[str, float]] = {"muon": {}, "adamw": {}}
    gradients, after = numpy.load(folder / "gradients.npz"), numpy.load(folder / "next.npz")
    for name in gradients.files:
        before = tensors[f"model.{name}"].float()
        parameter = nn.Parameter(before.clone())
        parameter.grad = torch.from_numpy(gradients[name])
        prefix = f"optimizer.state.{name}."
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        state = {key: value.float() for key, value in state.items()}
        if not momentum:
            state |= {k: v * 0 for k, v in state.items() if k in ("momentum_buffer", "exp_avg")}
        algorithm = "muon" if "momentum_buffer" in state else "adamw"
        kind: Any = torch.optim.Muon if algorithm == "muon" else torch.optim.AdamW
        known = inspect.signature(kind).parameters
        values = hyperparameters_of(checkpoint, name)
        optimizer = kind([parameter], **{k: v for k, v in values.items() if k in known})
        optimizer.state[parameter] = state
        optimizer.step()
        expected = torch.from_numpy(after[name])
        # Weight decay is the larger part of the change of a large matrix, and needs no state.
        update = expected - before * (1 - values["lr"] * values["weight_decay"])
        difference = (parameter.detach() - expected).norm() / update.norm()
        found[algorithm][name] = float(difference)
    return found
