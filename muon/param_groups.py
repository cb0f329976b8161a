"""Keys that schedulers write to the dicts of ``param_groups``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cycle_betas(groups: Sequence[dict[str, Any]]) -> None:
    """Make the momentum that a scheduler gave an AdamW group the first of its betas.

    A scheduler that cycles momentum gives it to all groups if there are Muon groups.
    """
    for group in groups:
        cycled = {"momentum", "max_momentum", "betas"} <= group.keys()
        if cycled and group.get("algorithm") == "adamw":
            group["betas"] = (group.pop("momentum"), *group["betas"][1:])
