"""The param groups that have pages in a store, and the check that they were not edited."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from tierstore.layout.parameters import PagedGroup, PagedParameter

_Group = dict[str, Any]


class AttachedGroups:
    """The groups that were attached to a store, in the order of ``param_groups``.

    Args:
        layout_of: returns the values that determine the pages of a param group, by key.

    ``param_groups`` belongs to the user. The user may change values of hyperparameters at any time,
    and anything before pages are laid out.
    """

    def __init__(self, layout_of: Callable[[_Group], _Group]) -> None:
        self.groups: list[PagedGroup] = []
        self._layout_of = layout_of
        # id() of a tensor -> its parameter. The parameter keeps the tensor alive.
        self._members: dict[int, PagedParameter] = {}
        # For each param group: its dict, its parameters, and the values that determine its pages.
        self._expected: list[tuple[_Group, list[torch.Tensor], _Group]] = []

    def extend(self, groups: Sequence[PagedGroup], param_groups: Sequence[_Group]) -> None:
        """Note attached groups, and the current content of all param groups."""
        self.groups += groups
        self._members |= {id(p.tensor): p for group in groups for p in group.parameters}
        self._expected.clear()
        for group in param_groups:
            self.expect(group)

    def expect(self, group: _Group) -> None:
        """Note a group that add_param_group() has added."""
        self._expected.append((group, list(group["params"]), self._layout_of(group)))

    def find(self, tensor: torch.Tensor) -> PagedParameter | None:
        """Return the attached parameter of a tensor, or None."""
        return self._members.get(id(tensor))

    def require_same(self, param_groups: Sequence[_Group]) -> None:
        """Refuse edits of ``param_groups`` after groups were attached, except edits of values.

        Takes about 20 ns for each parameter.

        Raises:
            ValueError: names the first group that was edited.
        """
        pairs = zip_longest(param_groups, self._expected) if self.groups else ()
        for number, (group, expected) in enumerate(pairs):
            if change := self._change(group, expected):
                raise ValueError(
                    f"param group {number} {change}. Undo the edit: since the first step or "
                    "restore(), pages are laid out, and only values of hyperparameters may change. "
                    "optimizer.add_param_group() adds a group; requires_grad_(False) freezes a "
                    "parameter"
                )

    def _change(
        self, group: _Group | None, expected: tuple[_Group, list[torch.Tensor], _Group] | None
    ) -> str | None:
        """Return text that says how a param group was edited; None if it was not."""
        if expected is None:
            return "was not added by add_param_group()"
        attached, tensors, before = expected
        if group is not attached:
            return "is missing, or another dict is in its place"
        params = group.get("params", ())
        if len(params) != len(tensors) or not all(map(operator.is_, params, tensors)):
            return "has other parameters, or has them in another order"
        now = self._layout_of(group)
        for key in before:
            if now[key] != before[key]:
                value = group.get(key, now[key])
                return f"has {key}={value!r}, but had another value when the group was added"
        return None
