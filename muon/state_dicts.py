"""State dicts in the format of ``torch.optim``: made from pages, and checked before a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

import tierstore
from muon.checks import algorithm_of, check_loaded, check_saved
from muon.keys import loaded, with_dtypes

_Group = dict[str, Any]


def pack(
    groups: Sequence[_Group],
    names: Sequence[Sequence[str]],
    states: Mapping[str, Mapping[str, torch.Tensor]],
    scalars: Mapping[str, Mapping[str, float]],
) -> tuple[dict[Any, Any], list[_Group]]:
    """Return the states and the groups of a state dict.

    Args:
        groups: the param groups.
        names: the names of the parameters of each group.
        states: parameter name -> state name -> tensor.
        scalars: parameter name -> scalar name -> value.
    """
    packed_groups = []
    packed_states: dict[Any, Any] = {}
    for group, group_names in zip(groups, names, strict=True):
        # Dtypes by name, because torch's state-dict helpers support plain values only.
        packed = {
            key: str(value) if isinstance(value, torch.dtype) else value
            for key, value in group.items()
            if key != "params"
        }
        if "param_names" in group:
            packed["param_names"] = list(group_names)
        start = len(packed_states)
        packed["params"] = list(range(start, start + len(group_names)))
        packed_groups.append(packed)
        for index, name in enumerate(group_names, start):
            packed_states[index] = {**_as_tensors(scalars.get(name, {})), **states[name]}
    return packed_states, packed_groups


def match(
    state_dict: Mapping[str, Any],
    groups: Sequence[_Group],
    paged: Callable[[int], tierstore.pages.PagedGroup],
) -> tuple[list[_Group], dict[str, dict[str, Any]], dict[Any, Any]]:
    """Check a state dict.

    Args:
        state_dict: the state dict.
        groups: the param groups.
        paged: returns the group of a number as it is paged, with its parameters in the order of
            the param group.

    Returns:
        Hyperparameters for each group, states by parameter name, and the entries that are not
        of a parameter.

    Raises:
        ValueError: the state dict is of other groups, or has other states.
    """
    saved_groups = _by_name(groups, state_dict["param_groups"])
    lengths = [len(group["params"]) for group in groups]
    saved_lengths = [len(group["params"]) for group in saved_groups]
    if lengths != saved_lengths:
        raise ValueError(
            f"the state dict has groups of {saved_lengths} parameters, this optimizer has "
            f"groups of {lengths}"
        )
    hyperparameters = []
    states: dict[str, dict[str, Any]] = {}
    unmatched = dict(state_dict["state"])
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        hyperparameters.append(_hyperparameters(group, saved, number))
        for saved_id, parameter in zip(saved["params"], paged(number).parameters, strict=True):
            # torch's helpers add empty dicts for missing entries of a flattened state dict.
            saved_states: dict[str, Any] = unmatched.pop(saved_id, {})
            states[parameter.name] = {
                key: value
                for key, value in saved_states.items()
                if not isinstance(value, dict) or value
            }
            has_step = group["algorithm"] == "adamw"
            lacks = {*parameter.states, "step"} - states[parameter.name].keys()
            if has_step and states[parameter.name] and lacks == {"step"} and "step" in saved:
                # FusedAdam has the count in the group.
                states[parameter.name]["step"] = saved["step"]
                hyperparameters[-1].pop("step", None)
            check_saved(states[parameter.name], parameter, has_step=has_step)
    lost = [key for key in unmatched if isinstance(key, int)]
    if lost:
        raise ValueError(f"the state dict has states without a parameter: {lost[:3]}")
    return hyperparameters, states, deepcopy(unmatched)


def _by_name(groups: Sequence[_Group], saved: Sequence[_Group]) -> Sequence[_Group]:
    """Return saved groups with their parameters in the order of groups that have the same names.

    Without names on one side, parameters are matched by position, as in ``torch.optim``.

    Raises:
        ValueError: the names are others, or the groups have parts of each other.
    """
    named = [group.get("param_names", ()) for group in groups]
    given = [group.get("param_names", ()) for group in saved]
    if not all(named) or not all(given):
        return saved
    ours, theirs = (
        tierstore.pages.unwrapped_names(name for names in both for name in names)
        for both in (named, given)
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
            + ". Without param_names in its groups, states go by position"
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
                "part of one: make the param groups as they were saved"
            )
    return found


def check_keys(state_dict: Mapping[str, Any]) -> None:
    """Check that a dict is the state dict of an optimizer.

    Raises:
        ValueError: it is not.
    """
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "the state dict of an optimizer has the keys 'state' and 'param_groups', got "
            f"{list(state_dict)}"
        )


def _hyperparameters(group: _Group, saved: _Group, number: int) -> _Group:
    """Return the hyperparameters that a saved group gives a group.

    Raises:
        ValueError: the saved group is for another algorithm, or has a bad value.
    """
    choice = ("algorithm", "use_muon")
    keys = {key: saved[key] for key in choice if saved.get(key) is not None}
    expected = group.get("algorithm")
    algorithm = algorithm_of(keys, number, is_saved=True) if keys else expected
    if algorithm != expected:
        raise ValueError(
            f"group {number} of the state dict is for {algorithm!r}, but this optimizer's "
            f"group is for {expected!r}"
        )
    # Copied, as in torch.optim: a tensor lr must not be shared with the state dict.
    hyperparameters = with_dtypes(deepcopy(loaded(group, saved)))
    check_loaded(group, {**group, **hyperparameters}, number)
    told = saved.keys() - {"params", "param_names"}
    if expected is not None and told:  # Without a key, only states are loaded.
        tierstore.pages.refuse_other_rule(saved, expected, f"group {number} of the state dict")
    return hyperparameters


def _as_tensors(scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return the scalars of a parameter as ``torch.optim`` has them."""
    return {
        name: torch.tensor(value, dtype=torch.float32, device="cpu")  # ()
        for name, value in scalars.items()
    }
