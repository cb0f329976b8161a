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
        _require(group, name, group[name] >= 0, "not be negative")
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
        betas = group["betas"]
        holds = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        _require(group, "betas", holds, "be two numbers in [0, 1)")


def _check_muon(group: Mapping[str, Any]) -> None:
    steps = group["ns_steps"]
    one_of_dtypes = f"be one of {', '.join(map(str, _DTYPES))}"
    checks: dict[str, tuple[bool, str]] = {
        "momentum": (0 <= group["momentum"] <= 1, "lie in [0, 1]"),
        "adjust_lr_fn": (group["adjust_lr_fn"] in ADJUST_LR_FNS, f"be one of {ADJUST_LR_FNS}"),
        "ns_coefficients": (len(group["ns_coefficients"]) == 3, "be three numbers"),
        "ns_steps": (isinstance(steps, int) and 0 <= steps < 100, "be a whole number in [0, 100)"),
        "ns_dtype": (group["ns_dtype"] in _DTYPES, one_of_dtypes),
        "ns_batched": (isinstance(group["ns_batched"], bool), "be True or False"),
        "momentum_dtype": (group["momentum_dtype"] in (None, *_DTYPES), one_of_dtypes),
    }
    for name, (holds, expected) in checks.items():
        _require(group, name, holds, expected)


def _require(group: Mapping[str, Any], name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} must {expected}, got {group[name]!r}")


def check_has_scheduler(step: int, extra: Any) -> None:
    """Check that the extra of a commit has the state of a scheduler.

    Raises:
        ValueError: it has not.
    """
    if not isinstance(extra, Mapping) or "scheduler" not in extra:
        raise ValueError(
            f"step {step} has no extra['scheduler'] to restore a scheduler from: restore without "
            "scheduler=, and commit with extra={'scheduler': scheduler.state_dict()}"
        )


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
