"""Keys that schedulers write to the dicts of ``param_groups``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cycle_betas(groups: Sequence[dict[str, Any]]) -> None:
    """Copy the momentum that a scheduler has set in an AdamW group to its first beta.

    If Muon groups exist, a scheduler that cycles momentum sets it in all groups.
    """
    for group in groups:
        cycled = {"momentum", "max_momentum", "betas"} <= group.keys()
        if cycled and group.get("algorithm") == "adamw":
            group["betas"] = (group.pop("momentum"), *group["betas"][1:])
