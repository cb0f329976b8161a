"""The param groups that a store has, found again in ``param_groups`` after edits of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import tierstore
from muon import normuon
from muon.matrices import Declaration, declared

_Group = dict[str, Any]

_FORM_KEYS = ("momentum_dtype", "moments_dtype", "master")
_FORM_NAMES = ("normuon_beta", *_FORM_KEYS)


class AttachedGroups:
    """The groups that were attached to a store, in the order of the store.

    ``param_groups`` belongs to the user, who may edit it at any time. Parameters are found by
    identity: groups may change their order, a group its dict, and parameters their order within a
    group. A group of new parameters is one to attach. Any other edit is refused.
    """

    def __init__(self) -> None:
        self.groups: list[tierstore.PagedGroup] = []
        # id() of a tensor -> number of its group, and the parameter, which keeps the tensor alive.
        self._members: dict[int, tuple[int, tierstore.PagedParameter]] = {}
        self._algorithms: list[str] = []
        self._declarations: list[Declaration] = []
        self._forms: list[tuple[Any, ...]] = []
        # Number, dict and parameters of each param group when all were last followed.
        self._followed: list[tuple[int, _Group, list[torch.Tensor]]] = []

    @property
    def hyperparameters(self) -> list[_Group]:
        """The hyperparameters of each group."""
        return [group.hyperparameters for group in self.groups]

    def extend(
        self, groups: Sequence[tierstore.PagedGroup], param_groups: Sequence[_Group]
    ) -> None:
        """Note that the new groups of ``param_groups`` were attached."""
        for number, group in enumerate(groups, start=len(self.groups)):
            self._members |= {id(member.tensor): (number, member) for member in group.parameters}
        self.groups += groups
        self._algorithms += [group.hyperparameters["algorithm"] for group in groups]
        self._declarations += [declared(group.hyperparameters) for group in groups]
        self._forms += [_form(group.hyperparameters) for group in groups]
        self._note(param_groups, self._numbers(param_groups))

    def find(self, tensor: torch.Tensor) -> tierstore.PagedParameter | None:
        """Return the attached parameter of a tensor, if there is one."""
        return self._members[id(tensor)][1] if id(tensor) in self._members else None

    def find_group(self, param_groups: Sequence[_Group], index: int) -> tierstore.PagedGroup | None:
        """Return an attached group, its parameters in the order of the param group.

        None if the param group is to be attached.

        Raises:
            ValueError: an edit of ``param_groups`` cannot be followed.
        """
        if not self.groups:
            return None
        if self._is_followed(param_groups[index : index + 1], start=index):
            number: int | None = self._followed[index][0]
        else:
            number = self._numbers(param_groups)[index]
        if number is None:
            return None
        group, tensors = self.groups[number], param_groups[index]["params"]
        if all(map(operator.is_, tensors, [member.tensor for member in group.parameters])):
            return group
        return replace(group, parameters=[self._members[id(tensor)][1] for tensor in tensors])

    def number_of_new(self, param_groups: Sequence[_Group], index: int) -> int:
        """Return the number that a group to be attached will have in the store.

        This number and a position name a parameter without a name: the index of a group may have
        been that of another group when names were given.
        """
        if not self.groups:
            return index
        return len(self.groups) + sum(not self.has(group) for group in param_groups[:index])

    def follow(self, param_groups: Sequence[_Group]) -> list[int]:
        """Take over the edits of ``param_groups``, if all of them can be followed.

        Takes about 20 ns for each parameter if there were none.

        Returns:
            The indices of the groups to be attached.

        Raises:
            ValueError: an edit cannot be followed; the message names the parameter and the call
                to use. Nothing was changed.
        """
        if len(param_groups) == len(self._followed) and self._is_followed(param_groups):
            return []
        numbers = self._numbers(param_groups)
        for group, number in zip(param_groups, numbers, strict=True):
            if number is not None:
                self.groups[number].hyperparameters = group
        new = [index for index, number in enumerate(numbers) if number is None]
        if not new:
            self._note(param_groups, numbers)
        return new

    def has(self, group: _Group) -> bool:
        """Return whether a param group is attached."""
        if group["params"]:
            return id(group["params"][0]) in self._members
        return any(group is known for known in self.hyperparameters)

    def _note(self, param_groups: Sequence[_Group], numbers: Sequence[int | None]) -> None:
        self._followed = [
            (number, group, list(group["params"]))
            for group, number in zip(param_groups, numbers, strict=True)
            if number is not None
        ]

    def _is_followed(self, param_groups: Sequence[_Group], start: int = 0) -> bool:
        """Return whether consecutive param groups are as they were when all were followed."""
        followed = self._followed[start : start + len(param_groups)]
        return len(followed) == len(param_groups) and all(
            group is known
            and group.get("algorithm") == self._algorithms[number]
            and declared(group) == self._declarations[number]
            and _form(group) == self._forms[number]
            and len(group["params"]) == len(tensors)
            and all(map(operator.is_, group["params"], tensors))
            for group, (number, known, tensors) in zip(param_groups, followed, strict=True)
        )

    def _numbers(self, param_groups: Sequence[_Group]) -> list[int | None]:
        """Return the number of each group in the store; None for a group to be attached.

        Raises:
            ValueError: an edit cannot be followed.
        """
        by_dict = {id(group.hyperparameters): i for i, group in enumerate(self.groups)}
        known = {id(group) for group in param_groups}
        # An empty group in another dict is found by its position among the empty groups.
        empty = [
            number
            for number, group in enumerate(self.groups)
            if not group.parameters and id(group.hyperparameters) not in known
        ]
        numbers: list[int | None] = []
        for group in param_groups:
            owners = [
                self._members[key][0] for key in map(id, group["params"]) if key in self._members
            ]
            if id(group) in by_dict:
                numbers.append(by_dict[id(group)])
            elif not group["params"] and empty:
                numbers.append(empty.pop(0))
            else:
                numbers.append(owners[0] if owners else None)
        for index, number in enumerate(numbers):
            if number is not None:
                self._require_same(param_groups, index, number, numbers)
        kept = {id(tensor) for group in param_groups for tensor in group["params"]}
        for key, (_, member) in self._members.items():
            if key not in kept:
                raise _missing(member.name, "param_groups")
        return numbers

    def _require_same(
        self,
        param_groups: Sequence[_Group],
        index: int,
        number: int,
        numbers: Sequence[int | None],
    ) -> None:
        """Refuse a param group that is not, but for the order, a group that was attached."""
        group, attached = param_groups[index], self.groups[number]
        keys = list(map(id, group["params"]))
        members = {id(member.tensor): member for member in attached.parameters}
        missing = [members[key].name for key in members.keys() - set(keys)]
        for position, key in enumerate(keys):
            if key in members:
                continue
            if key in self._members:
                former, member = self._members[key]
                raise ValueError(
                    f"parameter {member.name!r} is in param group {index} now, and was attached in "
                    f"group {former}: put it back, because a parameter keeps its group"
                )
            names = group.get("param_names", ())
            name = names[position] if position < len(names) else f"{index}.{position}"
            change = "is new"
            if name in missing:
                change = "is another tensor"
            elif missing:
                change = f"is new, instead of {min(missing)!r}"
            raise ValueError(
                f"parameter {name!r} of param group {index} {change}, and the pages of the group "
                f"are laid out. Undo that; add parameters in a group of their own with "
                "optimizer.add_param_group(), and freeze parameters with requires_grad_(False)"
            )
        if missing:
            raise _missing(min(missing), f"param group {index}")
        if len(keys) > len(members) or numbers.count(number) > 1:
            names = [member.name for member in attached.parameters]
            raise ValueError(
                f"param group {index}, of {names[:3]}, or a parameter of it, is in param_groups "
                "twice: take the second out"
            )
        # A scheduler may have given the dict before the momentum that is the first of the betas.
        own = {"param_names", "momentum"} if "betas" in group else {"param_names"}
        lacking = attached.hyperparameters.keys() - group.keys() - own
        if lacking:
            raise ValueError(f"param group {index} lacks {min(lacking)!r}: copy all of its keys")
        if group.get("algorithm") != self._algorithms[number]:
            raise ValueError(
                f"param group {index} was attached with algorithm {self._algorithms[number]!r} and "
                f"has {group.get('algorithm')!r} now: put it back, because the states differ"
            )
        if declared(group) != self._declarations[number]:
            raise ValueError(
                f"param group {index} was attached with matrices={self._declarations[number]} and "
                f"has {declared(group)} now: put it back, because pages are cut between matrices"
            )
        for name, old, new in zip(_FORM_NAMES, self._forms[number], _form(group), strict=True):
            if new != old:
                was = f"{name}={old!r}" if name in _FORM_KEYS else f"{'a' if old else 'no'} {name}"
                raise ValueError(
                    f"param group {index} was attached with {was} and has "
                    f"{name}={group.get(name)!r} now: put it back, because the states differ"
                )


def _form(group: _Group) -> tuple[Any, ...]:
    """Return what the states of a group depend on, in the order of _FORM_NAMES."""
    return (normuon.is_used(group), *map(group.get, _FORM_KEYS))


def _missing(name: str, place: str) -> ValueError:
    return ValueError(
        f"parameter {name!r} is missing from {place}, and the store has its pages: put it back; "
        "requires_grad_(False) freezes a parameter"
    )
