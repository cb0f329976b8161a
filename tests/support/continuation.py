"""The step that stock optimizers take with a converted checkpoint, and DeepSpeed's own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import muon
import tierstore
from tests.support.published import tensors_in
from tierstore.tools.convert.convert import convert

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
    """Return by how much updates, beside weight decay, differ from updates of DeepSpeed.

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
        found[algorithm][name] = _difference(parameter.detach(), before, expected, values)
    return found


def _difference(
    found: torch.Tensor, before: torch.Tensor, expected: torch.Tensor, values: dict[str, Any]
) -> float:
    # Weight decay is the larger part of the change of a large matrix, and needs no state.
    update = expected - before * (1 - values["lr"] * values["weight_decay"])
    # Both are rounded to float32. Near a weight of 1 that alone is 1e-5 of an update of 0.003, and
    # which way it goes depends on the processor: MKL's square root is not rounded to nearest.
    roundoff = 2.0**-23 * expected.norm()
    return max(0.0, float(((found - expected).norm() - roundoff) / update.norm()))


def run_differences(
    source: Path, run: Path, folder: Path, *, momentum: bool = True
) -> dict[str, dict[str, float]]:
    """Return the same for the first step of ``muon.Muon`` after ``restore()`` in a run.

    Args:
        source: the checkpoint that is converted to a run, and to a file that names its groups.
        run: where the run is made.
        folder: of a case, as for differences().
        momentum: likewise.
    """
    convert(source, run, to="tierstore")
    convert(source, run.with_suffix(".pt"), to="torch")
    optimizer_state = torch.load(run.with_suffix(".pt"))["optimizer"]
    saved = optimizer_state["param_groups"]
    momenta = [state.get("momentum_buffer") for state in optimizer_state["state"].values()]
    is_wide = any(tensor is not None and tensor.dtype == torch.float32 for tensor in momenta)
    gradients, after = numpy.load(folder / "gradients.npz"), numpy.load(folder / "next.npz")
    dtype = torch.float32 if "fp32" in folder.name else torch.bfloat16
    zeros = {name: torch.zeros(gradients[name].shape, dtype=dtype) for name in after.files}
    parameters = {name: nn.Parameter(tensor) for name, tensor in zeros.items()}
    groups = [
        {
            "params": [(name, parameters[name]) for name in group["param_names"]],
            "algorithm": group.get("algorithm", "adamw"),
        }
        for group in saved
    ]
    found: dict[str, dict[str, float]] = {"muon": {}, "adamw": {}}
    with tierstore.TierStore(run, resume=True) as store:
        momentum_dtype = torch.float32 if is_wide else None
        optimizer = muon.Muon(groups, store=store, momentum_dtype=momentum_dtype)
        store.register(**dict.fromkeys(store.committed.states))  # DeepSpeed's, such as `seen`.
        assert optimizer.restore() == 3

        def masters() -> dict[str, torch.Tensor]:
            states = store.pages.read_states()
            whole = {name: states[name].get("master", p) for name, p in parameters.items()}
            return {name: tensor.detach().clone() for name, tensor in whole.items()}

        if not momentum:
            states = {name: dict(values) for name, values in store.pages.read_states().items()}
            for values in states.values():
                for key in {"momentum_buffer", "exp_avg"} & values.keys():
                    values[key] = torch.zeros_like(values[key])
            store.pages.write_states(states)
        before = masters()
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradients[name]).to(dtype)
        optimizer.step()
        changed = masters()
        for group in optimizer.param_groups:
            for name in group["param_names"]:
                expected = torch.from_numpy(after[name])
                difference = _difference(changed[name], before[name], expected, group)
                found[group["algorithm"]][name] = difference
    return found
