"""MuonBP: between steps of whole matrices, blocks are stepped instead of matrices.

The blocks come from a grid in the param group, not from the shards of ranks. Results therefore do
not depend on the partition, and a block that no rank cuts is not exchanged (arXiv 2510.16981).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muon.matrices import Declaration, declared

KEYS = frozenset({"block_grid", "block_period", "block_lr_ratio"})
"""Keys of a Muon group. A group has all of them or none."""


def blocks_of(group: Mapping[str, Any]) -> Declaration:
    """Return the declaration of the blocks, or of the matrices in a group without blocks."""
    grid = group.get("block_grid")
    return declared(group) if grid is None else (*declared(group), ("grid", *grid))


def at_step(group: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the hyperparameters of one step.

    With ``block_grid=(r, c)`` each matrix is stepped as r x c blocks, at ``block_lr_ratio`` times
    the learning rate, except at steps that are multiples of ``block_period``.

    Args:
        group: the param group.
        step: number of the step, from 1.
    """
    if group.get("block_grid") is None or step % group["block_period"] == 0:
        return group
    return {**group, "matrices": blocks_of(group), "lr": group["lr"] * group["block_lr_ratio"]}
