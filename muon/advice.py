"""Warnings of a step that does what it was told, but probably not what was wanted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tierstore
from muon import keys, newton_schulz
from muon.matrices import declared, matrices_of
from muon.pipeline import compute_device

# A CPU with instructions for bfloat16 takes about as long for it as for float32. Without, it takes
# from 3 times as long to several hundred times.
_SLOWNESS_MAX = 2.0

# Multiplications of a step that take about 0.3 s on the slowest CPUs.
_WORTH_A_WARNING = 10**8


def warn_of_other_rates(groups: Sequence[Mapping[str, Any]], restored: Sequence[float]) -> None:
    """Warn if the lr of a group is not the restored lr.

    Args:
        groups: the param groups.
        restored: the lr of each group that was restored; groups that were added since come last.
    """
    for number, (group, lr) in enumerate(zip(groups, restored, strict=False)):
        if float(group["lr"]) != lr:
            warnings.warn(
                f"the lr of group {number} is {float(group['lr'])}, but restore() set the "
                f"committed lr, {lr}. A scheduler that is made after restore() sets lr to its "
                "start: make it before, and call store.register(scheduler=scheduler)",
                stacklevel=3,
            )
            return


def scheduled_keys(group: Mapping[str, Any], *, is_scheduled: bool) -> set[str]:
    """Return the keys of a group that a scheduler sets, and does not set again when it is loaded.

    Args:
        group: as restored.
        is_scheduled: the commit has the state of a scheduler.
    """
    found = set()
    if is_scheduled or "initial_lr" in group:
        found |= {"lr", "initial_lr"}
    if "max_momentum" in group:
        found |= {"momentum", "betas"}
    return found


def warn_of_other_values(
    groups: Sequence[Mapping[str, Any]], given: Sequence[Mapping[str, Any]], *, is_scheduled: bool
) -> None:
    """Warn if restored param groups have other values than the program gave them.

    Args:
        groups: the groups as restored.
        given: the groups as the program had them.
        is_scheduled: the commit has the state of a scheduler.
    """
    found = []
    for index, (group, before) in enumerate(zip(groups, given, strict=False)):
        names = keys.KEYS.keys() - {"params", "param_names"}
        names &= before.keys() & group.keys()
        names -= scheduled_keys(group, is_scheduled=is_scheduled)
        found += [
            f"{name} of group {index} is {group[name]!r}, given {before[name]!r}"
            for name in sorted(names)
            if _plain(before[name]) != _plain(group[name])
        ]
    if found:
        warnings.warn(
            f"restore() took the saved values of param groups: {'; '.join(found)}. "
            "restore(keep_hyperparameters=True) keeps the values that the program gave",
            stacklevel=4,
        )


def _plain(value: Any) -> Any:
    """Return a value that compares: lists as tuples, tensors and scalars of numpy as floats."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    found = keys.number(value)
    # A tensor of float32 has the 0.01 of a program rounded.
    return value if found is None else float(f"{found:.6g}")


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
        warnings.warn(
            f"this CPU multiplies matrices in bfloat16 {slowness:.0f} times slower than in "
            'float32: pass ns_dtype="auto" or ns_dtype=torch.float32 for faster steps, whose '
            "results then differ from those of torch.optim.Muon",
            stacklevel=3,
        )
