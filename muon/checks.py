"""Checks of hyperparameters and of saved states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import tierstore
from muon.update import ADJUST_LR_FNS

# Options of torch.optim that would change the result and are not implemented.
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")

# Dtypes of the momentum and of Newton-Schulz.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_dtype(name: str, dtype: Any) -> None:
    """Raise ValueError, naming the argument, unless the dtype is supported."""
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise ValueError(f"{name} must be one of {names}, got {dtype!r}")


def with_dtypes(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with the names of dtypes, as in state dicts, replaced by dtypes."""
    dtypes = {str(dtype): dtype for dtype in _DTYPES}
    return {
        key: dtypes.get(str(value), value) if key in ("ns_dtype", "momentum_dtype") else value
        for key, value in group.items()
    }


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Check that every hyperparameter of a group is in its range.

    Raises:
        ValueError: names the first hyperparameter that is out of range.
    """
    if isinstance(group["lr"], torch.Tensor) and group["lr"].numel() != 1:
        raise ValueError("a tensor lr must have one element")
    for name in ("lr", "weight_decay", "eps"):
        if not group[name] >= 0:
            raise ValueError(f"{name} must not be negative, got {group[name]}")
    for name in _UNSUPPORTED:
        if group.get(name):
            raise ValueError(f"{name} is not supported; leave it out or False")
    if group.get("decoupled_weight_decay") is False:
        raise ValueError(
            "decoupled_weight_decay must be True, as in AdamW; False is the weight decay of Adam"
        )
    if group["algorithm"] == "muon":
        _check_muon(group)
    else:
        _check_adamw(group)


def _check_muon(group: Mapping[str, Any]) -> None:
    if not 0 <= group["momentum"] <= 1:
        raise ValueError(f"momentum must lie in [0, 1], got {group['momentum']}")
    if group["adjust_lr_fn"] not in ADJUST_LR_FNS:
        raise ValueError(
            f"adjust_lr_fn must be one of {ADJUST_LR_FNS}, got {group['adjust_lr_fn']!r}"
        )
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients must be three numbers, got {group['ns_coefficients']}")
    if not isinstance(group["ns_steps"], int) or not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"ns_steps must be a whole number in [0, 100), got {group['ns_steps']}")
    check_dtype("ns_dtype", group["ns_dtype"])
    if not isinstance(group["ns_batched"], bool):
        raise ValueError(f"ns_batched must be True or False, got {group['ns_batched']!r}")
    if group["momentum_dtype"] is not None:
        check_dtype("momentum_dtype", group["momentum_dtype"])


def _check_adamw(group: Mapping[str, Any]) -> None:
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), got {group['betas']}")


def check_saved(
    saved: Mapping[str, Any], parameter: tierstore.PagedParameter, *, has_step: bool
) -> None:
    """Check that a state dict has either all states of a parameter or none, and no unknown state.

    The master may be missing, because state dicts of torch.optim have none.

    Raises:
        ValueError: names the parameter.
    """
    expected = {*parameter.states, *(("step",) if has_step else ())}
    if saved and saved.keys() - {"master"} != expected:
        raise ValueError(
            f"the state dict has {sorted(saved)} for parameter {parameter.name!r}, expected "
            f"{sorted(expected)}"
        )
    for state, value in saved.items():
        if isinstance(value, torch.Tensor):
            fits = state != "step" or value.numel() == 1
        else:
            fits = state == "step" and isinstance(value, int | float)
        if not fits:
            raise ValueError(
                f"{state!r} of parameter {parameter.name!r} must be a tensor of the parameter's "
                f"shape, or one number for a step; got a {type(value).__name__}"
            )
