"""Warnings of a step whose settings probably differ from the intent of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tierstore
from muon import newton_schulz
from muon.matrices import declared, matrices_of
from muon.pipeline import compute_device

# A CPU with bfloat16 instructions takes about as long in bfloat16 as in float32. A CPU without them
# takes from 3 times to several hundred times as long.
_SLOWNESS_MAX = 2.0

# Multiplications of a step that take about 0.3 s on the slowest CPUs.
_WORTH_A_WARNING = 10**8


def warn_of_slow_bfloat16(store: tierstore.TierStore, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn if Newton-Schulz takes long because this CPU is slow in bfloat16."""
    ranks = store.pages.ranks
    multiplications = sum(
        group["ns_steps"] * newton_schulz.cost(matrix.shape)
        for group in groups
        if group["algorithm"] == "muon" and group["ns_dtype"] == torch.bfloat16
        for parameter in group["params"]
        if compute_device(store, parameter).type == "cpu"
        for matrix in matrices_of(parameter.shape, declared(group))
    )
    if multiplications < _WORTH_A_WARNING or (ranks is not None and ranks.rank > 0):
        return
    slowness = newton_schulz.bfloat16_slowness()
    if slowness > _SLOWNESS_MAX:
        tierstore.pages.warn_user(
            f"this CPU multiplies matrices in bfloat16 {slowness:.0f} times slower than in "
            'float32: pass ns_dtype="auto" or ns_dtype=torch.float32 for faster steps, whose '
            "results then differ from torch.optim.Muon",
        )
