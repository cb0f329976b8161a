"""Checks of hyperparameters, including loaded hyperparameters."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import tierstore
from muon import normuon
from muon.blocks import KEYS as BLOCK_KEYS
from muon.blocks import blocks_of
from muon.coefficients import steps_min
from muon.encoded import check_blocks
from muon.keys import (
    BOTH,
    KEYS,
    OTHER_NAMES,
    Key,
    UnfitError,
    form,
    loaded,
    not_loaded,
    with_dtypes,
)
from muon.matrices import declared, matrices_of

_REQUIRED_KEYS = {
    algorithm: {key.name for key in KEYS.values() if algorithm in key.defaults}
    for algorithm in BOTH
}

# A key that resembles a known key at least this much is taken for a misspelling: "momentun"
# resembles "momentum" by 0.875.
_RESEMBLANCE_MIN = 0.87

# Common keys that resemble known keys.
_NOT_MISSPELLED = ("param_name", "hparams")


def algorithm_of(group: Mapping[str, Any], number: int, *, is_saved: bool = False) -> str:
    """Return the algorithm of a group: its key ``algorithm``, or the key ``use_muon``.

    Args:
        group: the param group.
        number: its number, for the messages.
        is_saved: whether it is a group of a state dict.

    Raises:
        ValueError: the algorithm is unknown, or the keys contradict each other.
    """
    where = f"group {number} of the state dict" if is_saved else f"param group {number}"
    use_muon = group.get("use_muon")
    if use_muon is not None and type(use_muon) is not bool:
        raise ValueError(f"use_muon of {where} must be True or False: {use_muon!r}")
    algorithm: str = group.get("algorithm", "adamw" if use_muon is False else "muon")
    if algorithm not in ("muon", "adamw"):
        raise ValueError(f"algorithm must be 'muon' or 'adamw', got {algorithm!r} in {where}")
    if use_muon is not None and use_muon != (algorithm == "muon"):
        raise ValueError(
            f"{where} has algorithm={algorithm!r} and use_muon={use_muon!r}: leave one of them out"
        )
    return algorithm


def check_hyperparameters(group: Mapping[str, Any], number: int) -> None:
    """Check that a group has no key with another meaning, and that every value is in its range.

    Args:
        group: the param group.
        number: its number, for the messages.

    Raises:
        ValueError: a hyperparameter cannot be used; the message names the first.
    """
    algorithm = algorithm_of(group, number)
    if missing := _REQUIRED_KEYS[algorithm] - group.keys():
        name = "algorithm" if "algorithm" in missing else min(missing)
        raise ValueError(
            f"param group {number} has no {name!r}: a key may be changed, but not removed"
        )
    for name, value in group.items():
        if name not in KEYS:
            if meant := _meant(name):
                raise ValueError(
                    f"unknown key {name!r} in param group {number}: did you mean {meant!r}?"
                )
            continue
        key = KEYS[name]
        if key.only is not None:
            if value is not None and bool(value) != key.only:
                raise ValueError(
                    f"{name} is not supported, got {value!r} in param group {number}: {key.advice}"
                )
        elif algorithm not in key.of:
            # Schedulers set the momentum of all groups; see muon.param_groups.cycle_betas().
            if value is not None and not (name == "momentum" and "max_momentum" in group):
                raise ValueError(
                    f"{name} is not a key of algorithm={algorithm!r}, which param group {number} "
                    "has: leave it out"
                )
        elif value is not None or not key.is_optional(algorithm):
            try:
                key.require_fit(value)
            except UnfitError as error:
                raise _unfit(error, key, value, group) from None
    _check_together(group)


def _unfit(error: UnfitError, key: Key, value: Any, group: Mapping[str, Any]) -> ValueError:
    advice = error.advice
    # A scheduler that cycles the betas keeps this key in the group.
    if key.name == "betas" and not advice and "max_momentum" in group:
        advice = ". The max_momentum of a scheduler must also be below 1"
    return ValueError(f"{key.name} must {error.expected}, got {value!r}{advice}")


def _check_together(group: Mapping[str, Any]) -> None:
    """Check the keys that depend on each other."""
    given = {key: group[key] for key in BLOCK_KEYS if group.get(key) is not None}
    if missing := sorted(BLOCK_KEYS - given.keys() if given else ()):
        raise ValueError(
            f"a Muon group with {min(given)} also needs {missing[0]}: blocks have block_grid, "
            "block_period and block_lr_ratio"
        )
    if group["algorithm"] != "muon":
        return
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    if steps < (least := steps_min(coefficients)):
        raise ValueError(f"ns_steps must be {least} or more with {coefficients!r}, got {steps}")
    if normuon.is_used(group) and given:
        raise ValueError("normuon_beta and block_grid cannot be combined: leave one out")


def check_loaded(group: Mapping[str, Any], loaded: Mapping[str, Any], number: int) -> None:
    """Check hyperparameters before they are loaded into a group.

    Raises:
        ValueError: a hyperparameter cannot be used; the message names the first.
    """
    check_hyperparameters(loaded, number)
    before, after = form(group), form(loaded)
    for name in before:
        if after[name] != before[name]:
            raise ValueError(
                f"{name} to load is {loaded.get(name)!r}, but {group.get(name)!r} in param group "
                f"{number}: pages depend on it, so it cannot be changed"
            )


def check_in_checkpoint(group: Mapping[str, Any], saved: Mapping[str, Any], number: int) -> None:
    """Check the hyperparameters in a checkpoint for the parameters of a group.

    Raises:
        ValueError: the hyperparameters are of another rule, or cannot be used.
    """
    check_loaded(group, {**group, **with_dtypes(saved), **not_loaded(group)}, number)
    check_rule(group, saved, number)


def check_rule(group: Mapping[str, Any], saved: Mapping[str, Any], number: int) -> None:
    """Check that the saved hyperparameters for the parameters of a group are of its rule.

    Raises:
        ValueError: the hyperparameters are of another rule with the same states.
    """
    where = f"in the checkpoint, the group of the parameters of param group {number}"
    tierstore.pages.refuse_other_rule(saved, group["algorithm"], where)


def loaded_from(group: dict[str, Any], saved: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the hyperparameters that a group gets from a group of a state dict.

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
    # Copy, as torch.optim does: a tensor lr must not be shared with the state dict.
    hyperparameters = with_dtypes(deepcopy(loaded(group, saved)))
    check_loaded(group, {**group, **hyperparameters}, number)
    told = saved.keys() - {"params", "param_names"}
    if expected is not None and told:  # Without a key, only states are loaded.
        tierstore.pages.refuse_other_rule(saved, expected, f"group {number} of the state dict")
    return hyperparameters


def check_matrices(name: str, shape: Sequence[int], group: Mapping[str, Any]) -> None:
    """Check that the matrices that a Muon group declares, and their blocks, fit a parameter.

    Raises:
        ValueError: they do not fit; the message names the parameter.
    """
    declarations = declared(group), blocks_of(group)
    try:
        for declaration in declarations:
            matrices_of(shape, declaration)
        normuon.check_rows(shape, group)
        check_blocks(shape, group, declarations)
    except ValueError as error:
        raise ValueError(f"parameter {name!r} has shape {tuple(shape)}: {error}") from error


@functools.cache
def _meant(key: object) -> str | None:
    """Return the known key that an unknown key probably stands for, or None.

    A key of several words that has a known key among them ("no_weight_decay") is not misspelled.
    """
    if not isinstance(key, str) or key in _NOT_MISSPELLED:
        return None
    if key in OTHER_NAMES:
        return OTHER_NAMES[key]
    lower = key.lower().rstrip("_")
    close = difflib.get_close_matches(lower, KEYS, n=1, cutoff=_RESEMBLANCE_MIN)
    extended = lower not in close and any(f"_{known}_" in f"_{lower}_" for known in close)
    return None if extended or not close else close[0]
