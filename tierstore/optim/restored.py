"""Warnings after a restore that probably differs from the intent of the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from tierstore.user_warnings import warn_user


def warn_of_other_rates(groups: Sequence[Mapping[str, Any]], restored: Sequence[float]) -> None:
    """Warn if the lr of a group is not the restored lr.

    Args:
        groups: the param groups.
        restored: the lr of each restored group. Groups that were added since come last.
    """
    for number, (group, lr) in enumerate(zip(groups, restored, strict=False)):
        if float(group.get("lr", lr)) != lr:
            warn_user(
                f"the lr of group {number} is {float(group['lr'])}, but restore() set the "
                f"committed lr, {lr}. A scheduler that is made after restore() sets lr to its "
                "start value: make it before, and call store.register(scheduler=scheduler)",
            )
            return


def scheduled_keys(group: Mapping[str, Any], *, is_scheduled: bool) -> set[str]:
    """Return the keys of a group that a scheduler sets, but does not set again when loaded.

    Args:
        group: the restored group.
        is_scheduled: the commit has the state of a scheduler.
    """
    found = set()
    if is_scheduled or "initial_lr" in group:
        found |= {"lr", "initial_lr"}
    if "max_momentum" in group:
        found |= {"momentum", "betas"}
    return found


def warn_of_other_values(
    groups: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
    keys: Collection[str],
    *,
    is_scheduled: bool,
) -> None:
    """Warn if values of restored param groups differ from the values of the program.

    Args:
        groups: the restored groups.
        given: the groups of the program.
        keys: the keys that the rule knows.
        is_scheduled: the commit has the state of a scheduler.
    """
    found = []
    for index, (group, before) in enumerate(zip(groups, given, strict=False)):
        names = {*keys} & before.keys() & group.keys()
        names -= scheduled_keys(group, is_scheduled=is_scheduled)
        found += [
            f"{name} of group {index} is {group[name]!r}, given {before[name]!r}"
            for name in sorted(names)
            if _plain(before[name]) != _plain(group[name])
        ]
    if found:
        warn_user(
            f"restore() took the saved values of param groups: {'; '.join(found)}. "
            "restore(keep_hyperparameters=True) keeps the values that the program gave"
        )


def _plain(value: Any) -> Any:
    """Return a comparable value: lists as tuples, tensors and numpy scalars as floats."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    # A float32 tensor holds a rounded value of the program's 0.01.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float(f"{float(value):.6g}") if is_number else value
