"""The keys of param groups: one table with all facts about each key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from muon import newton_schulz
from muon.coefficients import TABLES
from muon.scales import ADJUST_LR_FNS

MUON, ADAMW = ("muon",), ("adamw",)
BOTH = MUON + ADAMW


class UnfitError(Exception):
    """A value does not fit its key.

    Args:
        expected: what the value must do, such as "be a number".
        advice: what to do about the value, including the leading punctuation.
    """

    def __init__(self, expected: str, advice: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.advice = advice


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a param group."""

    name: str
    meaning: str
    """Sentence about the key in docs/reference/param-groups.md."""
    of: tuple[str, ...] = field(default=BOTH, kw_only=True)
    """The algorithms whose groups may have the key."""
    defaults: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Algorithm -> value for a group that is passed without the key. Groups of another algorithm
    need not have the key."""
    argument: tuple[str, ...] = field(default=(), kw_only=True)
    """Algorithms whose default is the argument of this name of Muon."""
    check: Callable[[Any], None] | None = field(default=None, kw_only=True)
    """Raises UnfitError. None is not checked if it is the default, or if the key has no default."""
    one_of: tuple[Any, ...] = field(default=(), kw_only=True)
    """All values, if they are few."""
    form: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    """The part of the value that determines pages. It cannot change once pages are laid out."""
    is_loaded: bool = field(default=True, kw_only=True)
    """True if a state dict or a checkpoint changes the value."""
    is_planned: bool = field(default=False, kw_only=True)
    """True if the value changes a plan; see muon.plan."""
    only: bool | None = field(default=None, kw_only=True)
    """For a key of other optimizers, the value without effect here. Other values are refused."""
    advice: str = field(default="leave it out", kw_only=True)
    """The advice in the error for other values."""

    def is_optional(self, algorithm: str) -> bool:
        """Return whether None means that the value is absent."""
        return self.defaults.get(algorithm) is None

    def require_fit(self, value: Any) -> None:
        """Check a value.

        Raises:
            UnfitError: the value does not fit the key.
        """
        # Also compare types: True is not 1, and a tensor compares elementwise.
        if self.one_of and not any(type(v) is type(value) and v == value for v in self.one_of):
            raise UnfitError(f"be one of {', '.join(map(_text, self.one_of))}")
        if self.check is not None:
            self.check(value)


def _text(value: object) -> str:
    return str(value) if isinstance(value, torch.dtype) else repr(value)


# ------------------------------------------------------------------------------ checks of values


def number(value: object) -> float | None:
    """Return a number of Python or numpy, or a tensor of one element, as a float; else None."""
    # Most values are floats, and each step checks them in every group. Check Real, which includes
    # numpy numbers, last: it takes longer.
    if type(value) is float:
        return value
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype != torch.bool
    if is_one or (isinstance(value, int | Real) and type(value) is not bool):
        return float(value)  # type: ignore[arg-type]
    return None


# Refuse arrays and tensors: some fail in the middle of a step, and torch.load() refuses a state
# dict with arrays.
_TUPLE_ADVICE = ": pass a tuple of Python numbers"


def _need(holds: bool, expected: str, advice: str = "") -> None:
    if not holds:
        raise UnfitError(expected, advice)


def _are_numbers(values: object, count: int) -> bool:
    return (
        isinstance(values, Sequence)
        and len(values) == count
        and all(number(value) is not None for value in values)
    )


def _in(value: Any, low: float, high: float, expected: str) -> None:
    """Check that a value is a number in [low, high)."""
    found = value if type(value) is float else number(value)
    if found is None:
        is_long = isinstance(value, torch.Tensor) and value.numel() != 1
        advice = "" if is_long else ": pass a Python number, or a tensor of one element"
        raise UnfitError("have one element" if is_long else "be a number", advice)
    _need(low <= found < high, expected)


def _not_negative(value: Any) -> None:
    if type(value) is not float or not 0.0 <= value < math.inf:
        _in(value, -math.inf, math.inf, "be finite")
        _need(value >= 0, "not be negative")


def _flag(value: Any) -> None:
    _need(type(value) is bool, "be True or False")


def _momentum(value: Any) -> None:
    _in(value, 0.0, math.nextafter(1.0, 2.0), "lie in [0, 1]")


def _betas(value: Any) -> None:
    is_plain = type(value) is tuple and [beta.__class__ for beta in value] == [float, float]
    if not (is_plain and 0 <= value[0] < 1 and 0 <= value[1] < 1):
        expected = "be two numbers in [0, 1)"
        _need(_are_numbers(value, 2), expected, _TUPLE_ADVICE)
        for beta in value:
            _in(beta, 0.0, 1.0, expected)


def _beta(value: Any) -> None:
    _in(value, 0.0, 1.0, "be a number in [0, 1)")


def _steps(value: Any) -> None:
    _need(_is_whole(value) and 0 <= value < 100, "be a whole number in [0, 100)")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _coefficients(value: Any) -> None:
    if isinstance(value, str):
        known, advice = value in TABLES, ""
    else:
        is_table = isinstance(value, Sequence) and all(_are_numbers(one, 3) for one in value)
        known, advice = (is_table and len(value) > 0) or _are_numbers(value, 3), _TUPLE_ADVICE
    _need(known, f"be three numbers, three for each step, or one of {', '.join(TABLES)}", advice)


def _grid(value: Any) -> None:
    is_grid = _are_numbers(value, 2) and all(_is_whole(n) and n > 0 for n in value)
    _need(is_grid, "be two whole numbers above 0", _TUPLE_ADVICE)


def _period(value: Any) -> None:
    _need(_is_whole(value) and value > 0, "be a whole number above 0")


def _ratio(value: Any) -> None:
    _in(value, 0.0, math.inf, "be a number from 0 on")


# --------------------------------------------------------------------------------------- the table

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _muon(name: str, default: Any, meaning: str, **facts: Any) -> Key:
    """Return a key that every Muon group has."""
    return Key(name, meaning, of=MUON, defaults={"muon": default}, argument=MUON, **facts)


def _both(name: str, muon: Any, adamw: Any, meaning: str, **facts: Any) -> Key:
    """Return a key that every group has."""
    return Key(name, meaning, defaults={"muon": muon, "adamw": adamw}, **facts)


def _foreign(name: str, only: bool, advice: str = "leave it out", **facts: Any) -> Key:
    """Return a key that changes the results of other optimizers."""
    return Key(name, "", only=only, advice=advice, **facts)


def _as_it_is(value: Any) -> Any:
    return value


# Facts about the keys that determine the content of pages.
_LAID_OUT: dict[str, Any] = {"form": _as_it_is, "is_loaded": False}
_CORRECTED = "leave it out; AdamW corrects the bias of its averages"
_DECOUPLED = "leave it out; the weight decay is decoupled, as in AdamW"
_GUIDE = "../guide"

_TABLE = (
    Key("params", "parameters, or pairs of name and parameter", is_loaded=False),
    Key(
        "param_names",
        "names of `params`, which pairs give; parameters without names have their positions",
        **{**_LAID_OUT, "form": lambda names: list(names or ())},
    ),
    _both("algorithm", "muon", "adamw", '`"muon"`, the default, or `"adamw"`', **_LAID_OUT),
    Key(
        "use_muon",
        "`True` or `False` instead of `algorithm`, as in KellerJordan's, Motif's and DeepSpeed's "
        "Muon, whose groups can be passed as they are",
        is_loaded=False,
    ),
    _both("lr", 1e-3, 1e-3, "learning rate", argument=MUON, check=_not_negative),
    _both(
        *("weight_decay", 0.1, 1e-2),
        f"decoupled [weight decay]({_GUIDE}/muon.md#weight-decay)",
        argument=MUON,
        check=_not_negative,
    ),
    _both(
        *("eps", newton_schulz.EPS, 1e-8),
        "Muon: smallest norm that Newton-Schulz divides by; AdamW: added to the divisor",
        argument=MUON,
        check=_not_negative,
    ),
    Key("maximize", "step with the negated gradient", defaults={"adamw": False}, check=_flag),
    Key(
        "cautious_wd",
        f"[cautious weight decay]({_GUIDE}/muon.md#weight-decay)",
        defaults={"muon": False},
        argument=MUON,
        check=_flag,
    ),
    _both(
        *("master", None, None),
        f"form of the float32 [masters]({_GUIDE}/fewer-bytes.md#masters) of bfloat16 parameters",
        argument=BOTH,
        one_of=(None, "remainder", "24bit"),
        is_planned=True,
        **_LAID_OUT,
    ),
    _muon("momentum", 0.95, "weight of the past in the average of gradients", check=_momentum),
    _muon("nesterov", True, "look one step ahead", check=_flag),
    _muon(
        *("ns_coefficients", newton_schulz.COEFFICIENTS),
        f"[coefficients]({_GUIDE}/muon.md#coefficients) of the Newton-Schulz polynomial: three "
        "numbers, three for each step, or the name of a table",
        check=_coefficients,
    ),
    _muon(
        *("ns_steps", newton_schulz.STEPS),
        "Newton-Schulz iterations; a table of coefficients may need more",
        check=_steps,
    ),
    _muon(
        *("adjust_lr_fn", None),
        f"[scale of the update]({_GUIDE}/muon.md#scales)",
        one_of=ADJUST_LR_FNS,
    ),
    _muon(
        *("ns_dtype", torch.bfloat16),
        'dtype of Newton-Schulz; `"auto"` measures: bfloat16, or float32 where it is much faster',
        one_of=_DTYPES,
        is_planned=True,
    ),
    _muon(
        *("ns_batched", False),
        "compute small matrices of one shape in batches, for a GPU; rounds differently",
        check=_flag,
        is_planned=True,
    ),
    _muon(
        *("ns_norm", None),
        f'`"scaled"`: [norms]({_GUIDE}/muon.md#norms) whose squares neither overflow nor vanish',
        one_of=newton_schulz.NORMS,
    ),
    _muon(
        *("ns_method", None),
        f'`"gram"`: iterate [on X X^T]({_GUIDE}/muon.md#newton-schulz-on-x-xt), for a GPU; rounds '
        "differently",
        one_of=newton_schulz.METHODS,
        is_planned=True,
    ),
    _muon(
        *("momentum_dtype", None),
        f"dtype of the [momentum]({_GUIDE}/fewer-bytes.md#momentum-in-8-bits), if not the dtype of "
        "the parameter",
        one_of=(None, torch.int8, *_DTYPES),
        is_planned=True,
        **_LAID_OUT,
    ),
    Key(
        "matrices",
        f"the [matrices that each parameter holds]({_GUIDE}/muon.md#matrices)",
        of=MUON,
        **{**_LAID_OUT, "form": deepcopy},  # The lists may be edited.
    ),
    Key(
        "block_grid",
        f"rows and columns of the [blocks]({_GUIDE}/muon.md#blocks) of each matrix",
        of=MUON,
        check=_grid,
    ),
    Key("block_period", "steps between steps of whole matrices", of=MUON, check=_period),
    Key("block_lr_ratio", "factor of `lr` at steps of blocks", of=MUON, check=_ratio),
    Key(
        "normuon_beta",
        f"[NorMuon]({_GUIDE}/muon.md#rows), which normalizes the rows of updates. The value may "
        "change, but not whether there is one",
        of=MUON,
        check=_beta,
        form=lambda beta: beta is not None,
    ),
    Key(
        "betas",
        "weights of the past in the two averages",
        of=ADAMW,
        defaults={"adamw": (0.9, 0.999)},
        check=_betas,
    ),
    Key(
        "moments_dtype",
        f"dtype of the [moments]({_GUIDE}/fewer-bytes.md#moments-of-adamw), if not float32",
        of=ADAMW,
        defaults={"adamw": None},
        argument=ADAMW,
        one_of=(None, torch.float32, torch.bfloat16, torch.int8),
        is_planned=True,
        **_LAID_OUT,
    ),
    Key("foreach", "changes nothing", defaults={"adamw": None}, is_loaded=False),
    # torch.optim.AdamW expects these in a checkpoint.
    _foreign("amsgrad", False, defaults={"adamw": False}),
    _foreign("capturable", False, defaults={"adamw": False}),
    _foreign("differentiable", False, defaults={"adamw": False}),
    _foreign(
        *("fused", False, "leave it out; AdamW steps in one pass where there are kernels for it"),
        defaults={"adamw": None},
        is_loaded=False,
    ),
    _foreign(
        *("decoupled_weight_decay", True),
        "it must be True, as in AdamW; False is Adam's weight decay",
        defaults={"adamw": True},
    ),
    _foreign("dampening", False),
    _foreign("caution", False),
    _foreign("bias_correction", True, _CORRECTED),
    _foreign("correct_bias", True, _CORRECTED),
    _foreign("adam_w_mode", True, _DECOUPLED),
    _foreign("adamw_mode", True, _DECOUPLED),
)

KEYS = {key.name: key for key in _TABLE}
"""Name -> key."""

OTHER_NAMES = {
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
"""Names of keys in other libraries."""


DEFAULTS = {key.name: key.defaults[key.argument[0]] for key in _TABLE if key.argument}
"""Defaults of the arguments of Muon that are defaults of keys."""


def defaults(algorithm: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that every group of an algorithm has, with their defaults.

    Args:
        algorithm: the algorithm.
        arguments: arguments of Muon by name.
    """
    return {
        key.name: arguments[key.name] if algorithm in key.argument else key.defaults[algorithm]
        for key in KEYS.values()
        if algorithm in key.defaults
    }


def of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Muon that are defaults of keys."""
    return {name: arguments[name] for name in DEFAULTS}


_FORMS = [(key.name, key.form) for key in KEYS.values() if key.form is not None]
_ABSENT = dict.fromkeys(name for name, _ in _FORMS)


def form(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that determine the pages of a group."""
    given = {**_ABSENT, **group}
    return {name: given[name] if of is _as_it_is else of(given[name]) for name, of in _FORMS}


def loaded(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a saved group that loading applies to a group."""

    def is_loaded(name: str, value: Any) -> bool:
        key = KEYS.get(name)
        if key is None:
            return True
        # torch's state-dict helpers add None for missing keys.
        return key.is_loaded and (value is not None or key.is_optional(group["algorithm"]))

    return {name: value for name, value in saved.items() if is_loaded(name, value)}


def not_loaded(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group that loading does not change."""
    return {name: group[name] for name, key in KEYS.items() if not key.is_loaded and name in group}


def with_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with numbers instead of tensors, except "lr", as in torch.optim."""
    types = set(map(type, (*group.values(), *group.get("betas", ()))))
    if torch.Tensor not in types:
        return group
    found: dict[str, Any] = {
        name: number(value)
        for name, value in group.items()
        if value.__class__ is torch.Tensor and name in KEYS and name != "lr"
    }
    if torch.Tensor in [beta.__class__ for beta in group.get("betas", ())]:
        found["betas"] = tuple(map(number, group["betas"]))
    return {**group, **found}


def with_dtypes(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with names of dtypes, as in state dicts, replaced by dtypes."""
    return {key: _dtypes(key).get(str(value), value) for key, value in group.items()}


def from_text(name: str, text: str) -> Any:
    """Return the value of a key from a text: "int8" is torch.int8, "true" is True.

    Another text is returned as it is, for the check of the key.
    """
    texts = {
        str(value).removeprefix("torch.").lower(): value
        for value in KEYS[name].one_of or (False, True)
    }
    return texts.get(text.removeprefix("torch.").lower(), text)


def _dtypes(name: str) -> dict[str, torch.dtype]:
    values = KEYS[name].one_of if name in KEYS else ()
    return {str(value): value for value in values if isinstance(value, torch.dtype)}
