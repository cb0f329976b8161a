"""The dicts of ``param_groups``: removal of duplicate parameters."""

from __future__ import annotations

from typing import Any


def drop_duplicates(group: dict[str, Any]) -> None:
    """Keep each parameter of a group once, under its first name."""
    positions = {tensor: index for index, tensor in reversed([*enumerate(group["params"])])}
    if len(positions) < len(group["params"]):
        kept = sorted(positions.values())
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]
