"""The dicts of ``param_groups``: default values, and keys that frameworks add or need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "maximize": False,
    # torch.optim.AdamW expects these keys in a checkpoint. Values that would change the result
    # are refused; "foreach" is ignored.
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

# Keys that choose the algorithm of a group.
CHOICE = ("algorithm", "use_muon")

# Keys that a state dict does not change in a group: the layout of pages depends on the first ones,
# and the last ones chose the implementation of the optimizer that was saved.
FIXED = (
    *("params", "param_names", *CHOICE, "matrices", "momentum_dtype", "moments_dtype", "master"),
    *("foreach", "fused"),
)


def fixed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group that loading does not change."""
    return {key: group[key] for key in FIXED if key in group}


def form(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the pages of a group depend on. "normuon_beta" stands for whether it is used."""
    keys = ("algorithm", "matrices", "momentum_dtype", "moments_dtype", "master")
    names = list(group.get("param_names", ()))
    found = {"param_names": names, "normuon_beta": group.get("normuon_beta") is not None}
    return found | {key: group.get(key) for key in keys}


def drop_duplicates(group: dict[str, Any]) -> None:
    """Leave every parameter of a group there once, under its first name."""
    positions = {tensor: index for index, tensor in reversed([*enumerate(group["params"])])}
    if len(positions) < len(group["params"]):
        kept = sorted(positions.values())
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]


def cycle_betas(groups: Sequence[dict[str, Any]]) -> None:
    """Make the momentum that a scheduler gave an AdamW group the first of its betas.

    A scheduler that cycles momentum gives it to all groups if there are Muon groups.
    """
    for group in groups:
        cycled = {"momentum", "max_momentum", "betas"} <= group.keys()
        if cycled and group.get("algorithm") == "adamw":
            group["betas"] = (group.pop("momentum"), *group["betas"][1:])
