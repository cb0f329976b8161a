"""Checks of hyperparameters and of saved states."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

import tierstore
from muon import normuon
from muon.blocks import KEYS as BLOCK_KEYS
from muon.blocks import blocks_of
from muon.coefficients import TABLES, steps_min
from muon.encoded import check_blocks
from muon.matrices import declared, matrices_of
from muon.scales import ADJUST_LR_FNS

# Keys of param groups: those of one algorithm, and those of both.
_OWN_KEYS = {
    "muon": frozenset(
        {
            "momentum",
            "nesterov",
            "ns_coefficients",
            "ns_steps",
            "adjust_lr_fn",
            "ns_dtype",
            "ns_batched",
            "ns_norm",
            "momentum_dtype",
        }
    ),
    "adamw": frozenset({"betas"}),
}
# Keys that a group of one algorithm may have, and need not.
_OPTIONAL_KEYS = {
    "muon": BLOCK_KEYS | {"matrices", "normuon_beta"},
    "adamw": frozenset({"moments_dtype"}),
}
_COMMON_KEYS = frozenset(
    {
        "params",
        "param_names",
        "algorithm",
        "use_muon",
        "lr",
        "weight_decay",
        "eps",
        "maximize",
        "cautious_wd",
        "master",
        "foreach",
    }
)

# Keys that change the results of other optimizers: the value that changes nothing here, and what
# to do about any other value.
_UNSUPPORTED: dict[str, tuple[bool, str]] = {
    "amsgrad": (False, "leave it out"),
    "capturable": (False, "leave it out"),
    "differentiable": (False, "leave it out"),
    "fused": (False, "leave it out; AdamW steps in one pass where there are kernels for it"),
    "dampening": (False, "leave it out"),
    "caution": (False, "leave it out"),
    "bias_correction": (True, "leave it out; AdamW corrects the bias of its averages"),
    "correct_bias": (True, "leave it out; AdamW corrects the bias of its averages"),
    "adam_w_mode": (True, "leave it out; the weight decay is decoupled, as in AdamW"),
    "adamw_mode": (True, "leave it out; the weight decay is decoupled, as in AdamW"),
    "decoupled_weight_decay": (True, "it must be True, as in AdamW; False is Adam's weight decay"),
}

# Names that other libraries have for keys of these param groups.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "adamw_eps": "eps",
    "beta1": "betas",
    "beta2": "betas",
    "adamw_betas": "betas",
    "mu": "momentum",
    "backend_steps": "ns_steps",
    "adjust_lr": "adjust_lr_fn",
}

_REQUIRED_KEYS = {
    algorithm: {"algorithm", "lr", "weight_decay", "eps", *keys}
    for algorithm, keys in _OWN_KEYS.items()
}

_KNOWN_KEYS = _COMMON_KEYS.union(*_OWN_KEYS.values(), *_OPTIONAL_KEYS.values(), _UNSUPPORTED)

# A key that resembles a known key at least this much is taken for a misspelling: "momentun"
# resembles "momentum" by 0.875.
_RESEMBLANCE_MIN = 0.87

# Common keys that resemble known keys.
_NOT_MISSPELLED = ("param_name", "hparams")

# Real, which numbers of numpy are, last: its check takes longer.
_NUMBERS = (float, int, Real)

# Arrays and tensors are refused: some fail in the middle of a step, and torch.load() refuses a
# state dict with arrays.
_TUPLE_ADVICE = ": pass a tuple of Python numbers"

_DTYPE_KEYS = ("ns_dtype", "momentum_dtype", "moments_dtype")

# Dtypes of the momentum and of Newton-Schulz.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def with_dtypes(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with the names of dtypes, as in state dicts, replaced by dtypes."""
    dtypes = {str(dtype): dtype for dtype in (*_DTYPES, torch.int8)}
    return {
        key: dtypes.get(str(value), value) if key in _DTYPE_KEYS else value
        for key, value in group.items()
    }


def algorithm_of(group: Mapping[str, Any], number: int, *, is_saved: bool = False) -> str:
    """Return the algorithm of a group: its key ``algorithm``, or the key ``use_muon``.

    Args:
        group: the param group.
        number: its number, for the messages.
        is_saved: whether it is a group of a state dict.

    Raises:
        ValueError: there is no such algorithm, or the keys contradict each other.
    """
    where = f"group {number} of the state dict" if is_saved else f"param group {number}"
    use_muon = group.get("use_muon")
    if use_muon not in (None, True, False):
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
        ValueError: names the first hyperparameter that cannot be used.
    """
    _check_keys(group, number)
    for name in ("lr", "weight_decay", "eps"):
        value = group[name]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(f"a tensor {name} must have one element")
        advice = ": pass a Python number, or a tensor of one element"
        _require(group, name, isinstance(value, (*_NUMBERS, torch.Tensor)), "be a number", advice)
        _require(group, name, value >= 0, "not be negative")
    cautious = group.get("cautious_wd")
    _require(group, "cautious_wd", cautious is None or type(cautious) is bool, "be True or False")
    masters = (None, "remainder", "24bit")
    if group.get("master") not in masters:
        raise ValueError(f"master must be one of {masters}, got {group['master']!r}")
    if group["algorithm"] == "muon":
        _check_muon(group)
    else:
        dtypes = (None, torch.float32, torch.bfloat16, torch.int8)
        if group.get("moments_dtype") not in dtypes:
            raise ValueError(f"moments_dtype must be one of {dtypes}, got {group['moments_dtype']}")
        expected = "be two numbers in [0, 1)"
        _require(group, "betas", _are_numbers(group["betas"], 2), expected, _TUPLE_ADVICE)
        holds = all(0 <= beta < 1 for beta in group["betas"])
        # A scheduler that cycles the betas keeps this key in the group.
        advice = ". The max_momentum of a scheduler must be below 1, too"
        _require(group, "betas", holds, expected, advice if "max_momentum" in group else "")


def check_loaded(group: Mapping[str, Any], loaded: Mapping[str, Any], number: int) -> None:
    """Check hyperparameters that are to be loaded into a group.

    Raises:
        ValueError: names the first that cannot be used.
    """
    check_hyperparameters(loaded, number)
    if normuon.is_used(loaded) != normuon.is_used(group):
        raise ValueError(
            f"normuon_beta is {loaded.get('normuon_beta')!r} in what is to be loaded and "
            f"{group.get('normuon_beta')!r} in param group {number}: the states of NorMuon cannot "
            "be added or removed"
        )


def check_matrices(name: str, shape: Sequence[int], group: Mapping[str, Any]) -> None:
    """Check that the matrices that a Muon group declares, and their blocks, fit a parameter.

    Raises:
        ValueError: they do not; names the parameter.
    """
    declarations = declared(group), blocks_of(group)
    try:
        for declaration in declarations:
            matrices_of(shape, declaration)
        normuon.check_rows(shape, group)
        check_blocks(shape, group, declarations)
    except ValueError as error:
        raise ValueError(f"parameter {name!r} has shape {tuple(shape)}: {error}") from error


def _check_keys(group: Mapping[str, Any], number: int) -> None:
    """Refuse absent keys, and keys that would change the result elsewhere.

    For a key of other optimizers, None stands for an absent key.
    """
    algorithm = algorithm_of(group, number)
    if missing := _REQUIRED_KEYS[algorithm] - group.keys():
        key = "algorithm" if "algorithm" in missing else min(missing)
        raise ValueError(
            f"param group {number} has no {key!r}: a key may be changed, but not removed"
        )
    own = _OWN_KEYS[algorithm] | _OPTIONAL_KEYS[algorithm]
    for key in group.keys() - _COMMON_KEYS - own:
        value = group[key]
        if key in _UNSUPPORTED:
            harmless, advice = _UNSUPPORTED[key]
            if value is not None and bool(value) != harmless:
                raise ValueError(
                    f"{key} is not supported, got {value!r} in param group {number}: {advice}"
                )
        elif key in _KNOWN_KEYS:
            # Schedulers set the momentum of all groups; see muon.param_groups.cycle_betas().
            if value is not None and not (key == "momentum" and "max_momentum" in group):
                raise ValueError(
                    f"{key} is not a key of algorithm={algorithm!r}, which param group {number} "
                    "has: leave it out"
                )
        elif meant := _meant(key):
            raise ValueError(
                f"unknown key {key!r} in param group {number}: did you mean {meant!r}?"
            )


@functools.cache
def _meant(key: object) -> str | None:
    """Return the known key that an unknown key was probably meant for; None if there is none.

    A key of several words that has a known key among them ("no_weight_decay") is not misspelled.
    """
    if not isinstance(key, str) or key in _NOT_MISSPELLED:
        return None
    if key in _OTHER_NAMES:
        return _OTHER_NAMES[key]
    lower = key.lower().rstrip("_")
    close = difflib.get_close_matches(lower, _KNOWN_KEYS, n=1, cutoff=_RESEMBLANCE_MIN)
    extended = lower not in close and any(f"_{known}_" in f"_{lower}_" for known in close)
    return None if extended or not close else close[0]


def _check_muon(group: Mapping[str, Any]) -> None:
    steps = group["ns_steps"]
    one_of_dtypes = f"be one of {', '.join(map(str, _DTYPES))}"
    momentum = group["momentum"]
    is_number = isinstance(momentum, _NUMBERS)
    _require(group, "momentum", is_number, "be a number", ": pass a Python number")
    _check_coefficients(group)
    checks: dict[str, tuple[bool, str]] = {
        "momentum": (0 <= momentum <= 1, "lie in [0, 1]"),
        "adjust_lr_fn": (group["adjust_lr_fn"] in ADJUST_LR_FNS, f"be one of {ADJUST_LR_FNS}"),
        "ns_steps": (isinstance(steps, int) and 0 <= steps < 100, "be a whole number in [0, 100)"),
        "ns_dtype": (group["ns_dtype"] in _DTYPES, one_of_dtypes),
        "ns_batched": (isinstance(group["ns_batched"], bool), "be True or False"),
        "ns_norm": (group["ns_norm"] in (None, "scaled"), "be None or 'scaled'"),
        "momentum_dtype": (
            group["momentum_dtype"] in (None, torch.int8, *_DTYPES),
            f"{one_of_dtypes}, torch.int8",
        ),
    }
    for name, (holds, expected) in checks.items():
        _require(group, name, holds, expected)
    _check_blocks(group)
    if not normuon.is_used(group):
        return
    beta = group["normuon_beta"]
    is_beta = isinstance(beta, _NUMBERS) and type(beta) is not bool and 0 <= float(beta) < 1
    _require(group, "normuon_beta", is_beta, "be a number in [0, 1)")
    if group.get("block_grid") is not None:
        raise ValueError("normuon_beta and block_grid cannot be combined: leave one out")


def _check_blocks(group: Mapping[str, Any]) -> None:
    given = {key: group[key] for key in BLOCK_KEYS if group.get(key) is not None}
    if missing := sorted(BLOCK_KEYS - given.keys() if given else ()):
        raise ValueError(
            f"a Muon group with {min(given)} needs {missing[0]}, too: blocks have block_grid, "
            "block_period and block_lr_ratio"
        )
    if not given:
        return
    grid, period, ratio = (group[k] for k in ("block_grid", "block_period", "block_lr_ratio"))
    is_grid = _are_numbers(grid, 2) and all(type(n) is int and n > 0 for n in grid)
    _require(group, "block_grid", is_grid, "be two whole numbers above 0", _TUPLE_ADVICE)
    is_period = type(period) is int and period > 0
    _require(group, "block_period", is_period, "be a whole number above 0")
    is_ratio = isinstance(ratio, int | float) and 0 <= ratio < float("inf")
    _require(group, "block_lr_ratio", is_ratio, "be a number from 0 on")


def _check_coefficients(group: Mapping[str, Any]) -> None:
    found = group["ns_coefficients"]
    if isinstance(found, str):
        known, advice = found in TABLES, ""
    else:
        is_table = isinstance(found, Sequence) and all(_are_numbers(one, 3) for one in found)
        known, advice = (is_table and len(found) > 0) or _are_numbers(found, 3), _TUPLE_ADVICE
    expected = f"be three numbers, three for each step, or one of {', '.join(TABLES)}"
    _require(group, "ns_coefficients", known, expected, advice)
    least = steps_min(found)
    is_enough = not isinstance(group["ns_steps"], int) or group["ns_steps"] >= least
    _require(group, "ns_steps", is_enough, f"be {least} or more with {found!r}")


def _are_numbers(values: object, count: int) -> bool:
    return (
        isinstance(values, Sequence)
        and len(values) == count
        and all(isinstance(value, _NUMBERS) for value in values)
    )


def _require(
    group: Mapping[str, Any], name: str, holds: bool, expected: str, advice: str = ""
) -> None:
    if not holds:
        raise ValueError(f"{name} must {expected}, got {group[name]!r}{advice}")


def check_saved(
    saved: Mapping[str, Any], parameter: tierstore.PagedParameter, *, has_step: bool
) -> None:
    """Check that a state dict has either all states of a parameter or none, and no unknown state.

    The master may be missing, because state dicts of torch.optim have none.

    Raises:
        ValueError: names the parameter.
    """
    expected = {*parameter.states, *(("step",) if has_step else ())}
    if saved and saved.keys() - {"master"} != expected:
        raise ValueError(
            f"the state dict has {sorted(saved)} for parameter {parameter.name!r}, expected "
            f"{sorted(expected)}"
        )
    for state, value in saved.items():
        if isinstance(value, torch.Tensor):
            fits = state != "step" or value.numel() == 1
        else:
            fits = state == "step" and isinstance(value, int | float)
        if not fits:
            raise ValueError(
                f"{state!r} of parameter {parameter.name!r} must be a tensor of the parameter's "
                f"shape, or one number for a step; got a {type(value).__name__}"
            )
