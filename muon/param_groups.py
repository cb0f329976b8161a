"""The dicts of ``param_groups``: parameters that are there twice, and keys of schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
