"""State dicts in the format of ``torch.optim``: made from pages, and checked before a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from tierstore.layout.parameters import PagedGroup, PagedParameter, unwrapped_names
from tierstore.layout.state_parts import given_parts, state_of

_Group = dict[str, Any]


def pack(
    groups: Sequence[_Group],
    paged: Sequence[PagedGroup],
    states: Mapping[str, Mapping[str, torch.Tensor]],
    scalars: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[Any, Any], list[_Group]]:
    """Return the states and the groups of a state dict.

    Args:
        groups: the param groups.
        paged: the PagedGroup of each group.
        states: parameter name -> state name -> tensor.
        scalars: parameter name -> scalar name -> value in the form of the state dict.
    """
    packed_groups: list[_Group] = []
    packed_states: dict[Any, Any] = {}
    for group, members in zip(groups, paged, strict=True):
        # Store dtypes by name, because torch's state-dict helpers support only plain values.
        packed = {
            key: str(value) if isinstance(value, torch.dtype) else value
            for key, value in group.items()
            if key != "params"
        }
        if "param_names" in group:
            packed["param_names"] = [member.name for member in members.parameters]
        start = sum(len(group["params"]) for group in packed_groups)
        packed["params"] = list(range(start, start + len(members.parameters)))
        packed_groups.append(packed)
        for index, member in enumerate(members.parameters, start):
            if member.name in states:
                parts = {**scalars.get(member.name, {}), **states[member.name]}
                packed_states[index] = state_of(parts, member.empty)
    return packed_states, packed_groups


def match(
    state_dict: Mapping[str, Any],
    groups: Sequence[_Group],
    paged: Callable[[int], PagedGroup],
    loaded: Callable[[_Group, _Group, int], _Group],
    scalars: Callable[[_Group], Collection[str]],
) -> tuple[list[_Group], dict[str, dict[str, Any]], dict[Any, Any]]:
    """Check a state dict.

    Args:
        state_dict: the state dict.
        groups: the param groups.
        paged: returns the PagedGroup of a group number, with parameters in the order of the param
            group.
        loaded: returns the hyperparameters that a param group gets from a saved group.
        scalars: returns the names of the scalars of the parameters of a group.

    Returns:
        Hyperparameters for each group, states by parameter name, and the entries that do not
        belong to a parameter.

    Raises:
        ValueError: the groups or states of the state dict do not match.
    """
    saved_groups = _by_name(groups, state_dict["param_groups"])
    lengths = [len(group["params"]) for group in groups]
    saved_lengths = [len(group["params"]) for group in saved_groups]
    if lengths != saved_lengths:
        raise ValueError(
            f"the state dict has groups of {saved_lengths} parameters, but this optimizer has "
            f"groups of {lengths}"
        )
    hyperparameters = []
    states: dict[str, dict[str, Any]] = {}
    unmatched = dict(state_dict["state"])
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        hyperparameters.append(loaded(group, saved, number))
        names = scalars(group)
        for saved_id, parameter in zip(saved["params"], paged(number).parameters, strict=True):
            # torch's helpers add empty dicts for missing entries of a flattened state dict.
            states[parameter.name] = given_parts(unmatched.pop(saved_id, {}))
            lacks = {*parameter.states, *names} - states[parameter.name].keys()
            if states[parameter.name] and lacks == {"step"} and "step" in saved:
                # FusedAdam has the count in the group.
                states[parameter.name]["step"] = saved["step"]
                hyperparameters[-1].pop("step", None)
            check_saved(states[parameter.name], parameter, names)
    lost = [key for key in unmatched if isinstance(key, int)]
    if lost:
        raise ValueError(f"the state dict has states without a parameter: {lost[:3]}")
    return hyperparameters, states, deepcopy(unmatched)


def _by_name(groups: Sequence[_Group], saved: Sequence[_Group]) -> Sequence[_Group]:
    """Return saved groups with their parameters reordered by name to match the groups.

    Without names on one side, parameters are matched by position, as in ``torch.optim``.

    Raises:
        ValueError: the names differ, or groups are divided differently.
    """
    named = [group.get("param_names", ()) for group in groups]
    given = [group.get("param_names", ()) for group in saved]
    if not all(named) or not all(given):
        return saved
    ours, theirs = (
        unwrapped_names(name for names in both for name in names) for both in (named, given)
    )
    absent = [name for name in ours if ours[name] not in {*theirs.values()}]
    new = [name for name in theirs if theirs[name] not in {*ours.values()}]
    if absent or new:
        raise ValueError(
            "the state dict is of parameters with other names: it "
            + " and ".join(
                f"{verb} {len(names)}, such as {', '.join(map(repr, names[:3]))}"
                for verb, names in (("lacks", absent), ("has further", new))
                if names
            )
            + ". Without param_names in its groups, states are matched by position"
        )
    found = []
    for number, names in enumerate(named):
        wanted = [ours[name] for name in names]
        for group, group_names in zip(saved, given, strict=True):
            plain = [theirs[name] for name in group_names]
            if {*plain} == {*wanted} and len(plain) == len(group["params"]):
                ids = dict(zip(plain, group["params"], strict=True))
                found.append({**group, "params": [ids[name] for name in wanted]})
                break
        else:
            raise ValueError(
                f"param group {number} has parameters of several groups of the state dict, or a "
                "part of one group: make the param groups as they were saved"
            )
    return found


def check_keys(state_dict: Mapping[str, Any]) -> None:
    """Check that a dict is the state dict of an optimizer.

    Raises:
        ValueError: the dict is not the state dict of an optimizer.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "the state dict of an optimizer has the keys 'state' and 'param_groups', got "
            f"{list(state_dict)}"
        )


def check_saved(
    saved: Mapping[str, Any], parameter: PagedParameter, scalars: Collection[str]
) -> None:
    """Check that a state dict has either all states of a parameter or none, and no unknown state.

    The master may be missing: state dicts of torch.optim have no master.

    Args:
        saved: state name -> value.
        parameter: the parameter.
        scalars: the names of its scalars.

    Raises:
        ValueError: the states do not fit; the message names the parameter.
    """
    expected = {*parameter.states, *scalars}
    if saved and saved.keys() - {"master"} != expected:
        raise ValueError(
            f"the state dict has {sorted(saved)} for parameter {parameter.name!r}, expected "
            f"{sorted(expected)}"
        )
    for state, value in saved.items():
        if isinstance(value, torch.Tensor):
            fits = state not in scalars or value.numel() == 1
        else:
            fits = state in scalars and isinstance(value, int | float)
        if not fits:
            raise ValueError(
                f"{state!r} of parameter {parameter.name!r} must be a tensor of the parameter's "
                f"shape, or one number for a step; got a {type(value).__name__}"
            )
