"""States and numbers of a class of ``torch.optim``, and classes that pages do not support."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from tierstore.layout.chunks import storage_order
from tierstore.layout.encodings import MASTER
from tierstore.layout.other_rules import RULE
from tierstore.layout.parameters import STEPPED
from tierstore.layout.state_parts import empty_kind, parts_of, state_of

Class = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, called with params and options."""

ELEMENTWISE: frozenset[Any] = frozenset(
    {torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam}
    | {torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam}
    | {torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD}
)
"""Classes that step each element by itself. Cuts of a parameter do not change their bits."""

# States that a class does not initialize to 0: their value, or the key of the group that has it.
_INITIAL: dict[Any, Mapping[str, float | str]] = {
    torch.optim.ASGD: {"eta": "lr", "mu": 1.0},
    torch.optim.Adagrad: {"sum": "initial_accumulator_value"},
    torch.optim.NAdam: {"mu_product": 1.0},
    torch.optim.Rprop: {"step_size": "lr"},
}

_EIGHT_BITS = (
    "its states are codes, and it cannot step tensors of a page: "
    'muon.Muon(moments_dtype=torch.int8) has AdamW in groups with algorithm="adamw"'
)
_REFUSED = {
    "torch.optim.lbfgs": "it evaluates the closure several times in a step, and its states are of "
    "all parameters together",
    "torch.optim.sparse_adam": "it takes sparse gradients alone: torch.optim.Adam takes others",
    "bitsandbytes": _EIGHT_BITS,
    "torchao": _EIGHT_BITS,
}
_UNUSABLE = {
    "capturable": "pages are stepped one after the other, not in one graph",
    "differentiable": "states in pages have no gradients",
}

# Sizes of the tensors for trial steps of a class.
_SIZES = (5, 7, 3, 4, 2, 3, 2, 3, 2, 3, 2, 3, 2, 2, 2, 2, 2)
_STEPS = 8  # RAdam changes its rule at step 6.


@dataclass(frozen=True)
class Kept:
    """States and numbers that a class keeps for a parameter, under the names of parts_of()."""

    states: Mapping[str, torch.dtype]
    """Name -> dtype of the tensors."""
    shapes: Mapping[str, tuple[int, ...]]
    """Name -> shape, for tensors whose shape differs from the parameter, at least for other sizes:
    a factor of a square parameter may have the same shape."""
    empty: Mapping[str, str]
    """Name -> kind, for empty parts."""
    kinds: Mapping[str, torch.dtype | type]
    """Name of a scalar -> dtype of its tensor of shape (), or its type."""
    orders: Mapping[str, tuple[int, ...]]
    """Name -> dimensions from outermost to innermost in memory, for tensors that are not row-major.
    In another order a product of matrices may round differently."""

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of all parts."""
        return frozenset({*self.states, *self.empty, *self.kinds})


def require_usable(cls: Any) -> None:
    """Refuse a class that pages do not support.

    Raises:
        TypeError: ``cls`` is not a class of optimizers.
        ValueError: the class is not supported; the message gives the reason.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            f"Paged needs a class of optimizers, such as torch.optim.AdamW, got {cls!r}"
        )
    for base in cls.__mro__:
        for module, reason in _REFUSED.items():
            if base.__module__ == module or base.__module__.startswith(f"{module}."):
                raise ValueError(f"{cls.__name__} cannot be in pages: {reason}")


def require_options(cls: Any, group: Mapping[str, Any]) -> None:
    """Refuse options that steps of pages do not support.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    for name, reason in _UNUSABLE.items():
        if group.get(name):
            raise ValueError(f"{name}=True of {cls.__name__} cannot be in pages: {reason}")


def step_of(optimizer: torch.optim.Optimizer) -> None:
    """Step without the global hooks of optimizers. They are called once for a step of all pages.

    If a step calls the step of another class, that step calls the hooks.
    """
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def group_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def initial_value(state: str, group: Mapping[str, Any], cls: Any = None) -> float:
    """Return the value of a state or scalar before the first step.

    Args:
        state: name of the state or scalar.
        group: the hyperparameters.
        cls: the class; None: the class of ``torch.optim`` that has the state.
    """
    bases = _INITIAL.keys() if cls is None else cls.__mro__
    known = (_INITIAL[base] for base in bases if base in _INITIAL)
    found = next((values[state] for values in known if state in values), 0.0)
    return float(group.get(found, 0.0) if isinstance(found, str) else found)


def kept_by(
    cls: Class, options: Mapping[str, Any], group: Mapping[str, Any], ndim: int, dtype: torch.dtype
) -> tuple[Kept, frozenset[str]]:
    """Find the states and numbers of a class for a small parameter, by trial steps.

    Args:
        cls: the class.
        options: its arguments.
        group: the param group of the parameter.
        ndim: number of dimensions of the parameter.
        dtype: dtype of its master.

    Returns:
        The states and numbers; the keys of the group that a step changes, such as a step count.

    Raises:
        ValueError: a state cannot be in pages; the message names it.
    """
    # A state of a tensor without dimensions looks like a scalar.
    [tensor] = _tensors(1, max(ndim, 1), dtype)
    optimizer = cls([{**group_values(group), "params": [tensor]}], **options)
    own = _own_values(optimizer)
    found = []
    for number in range(_STEPS):
        tensor.grad = _waves(tensor, number + 1)  # A step may have changed it.
        step_of(optimizer)
        found.append(_kept(cls, optimizer.state[tensor], tensor.shape))
        _require_apart_in_memory(cls, optimizer.state[tensor], tensor)
    others = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if _own_values(optimizer) != own or others:
        raise ValueError(
            f"{_name(cls)} keeps {others or 'tensors or counts in its attributes'} outside of "
            "the states of parameters, and commits do not have them: keep them in the state of a "
            "parameter, or in the param group"
        )
    if any(each != found[0] for each in found):
        raise ValueError(
            f"{_name(cls)} creates states, or changes their shapes, after the first step of a "
            "parameter: pages are laid out before"
        )
    after = group_values(optimizer.param_groups[0]).items()
    changed = {key for key, value in after if key not in group or value is not group[key]}
    return found[0], frozenset(changed)


def kept_at(
    cls: Class,
    options: Mapping[str, Any],
    group: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    small: Kept,
) -> Kept:
    """Find the states and numbers of a class for a shape, by a trial step without values.

    Args:
        cls: the class.
        options: its arguments.
        group: the param group of the parameter.
        shape: shape of the parameter.
        dtype: dtype of its master.
        small: the result for a small parameter of as many dimensions.

    Raises:
        ValueError: a state cannot be in pages, or its shape is unknown; the message names it.
    """
    tensor = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    tensor.grad = torch.empty_like(tensor)
    optimizer = cls([{**group_values(group), "params": [tensor]}], **options)
    refused = None
    try:
        step_of(optimizer)
    except RuntimeError as error:  # The step reads a number of a tensor, after creating states.
        refused = error
    found = _kept(cls, optimizer.state[tensor], shape, small)
    if refused is not None and found.names != small.names:
        raise ValueError(
            f"the shapes of the states of {_name(cls)} are unknown for a parameter of shape "
            f"{list(shape)}: a step without values ends with: {refused}"
        ) from refused
    return found


def _kept(
    cls: Any, state: Mapping[str, Any], shape: Sequence[int], small: Kept | None = None
) -> Kept:
    """Return the content of the state of a parameter of a shape; see kept_at()."""
    states: dict[str, torch.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    empty: dict[str, str] = {}
    kinds: dict[str, torch.dtype | type] = {}
    orders: dict[str, tuple[int, ...]] = {}
    for name, value in parts_of(state).items():
        # A state of a parameter without dimensions looks like a number.
        is_state = small is not None and name in small.states
        if name in (STEPPED, MASTER):
            raise ValueError(f"{_name(cls)} keeps a state {name!r}, but pages use this name")
        if _is_number(value) and not is_state:
            if name.rpartition(".")[2].isdigit():
                raise ValueError(f"{_name(cls)} keeps a number in a list, {name!r}: keep a tensor")
            kinds[name] = value.dtype if isinstance(value, torch.Tensor) else type(value)
        elif isinstance(value, torch.Tensor):
            states[name] = value.dtype
            is_other = small is not None and name in small.shapes
            if is_other or tuple(value.shape) != tuple(shape):
                shapes[name] = tuple(value.shape)
            if not value.is_contiguous():
                orders[name] = tuple(storage_order(value.shape, value.stride()))
        elif (kind := empty_kind(value)) is not None:
            empty[name] = kind
        else:
            raise ValueError(
                f"{_name(cls)} keeps a state {name!r} of {type(value).__name__}: pages have "
                "tensors and numbers, and dicts and lists of them"
            )
    _require_names(cls, state)
    return Kept(states, shapes, empty, kinds, orders)


def _require_names(cls: Any, state: Mapping[str, Any]) -> None:
    """Refuse a state that cannot be rebuilt from its parts, such as one with a dot in a key.

    Raises:
        ValueError: the message names the parts.
    """
    parts = parts_of(state)
    try:
        is_same = _alike(state_of(parts, {}), dict(state))
    except (ValueError, TypeError):
        is_same = False
    if not is_same:
        raise ValueError(
            f"{_name(cls)} keeps a state of the parts {sorted(parts)}: pages have dicts whose keys "
            "are names without dots, and lists"
        )


def _alike(one: Any, other: Any) -> bool:
    """Return whether two states have the same dicts and lists."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return True


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return marks of the attributes that are or hold numbers or tensors. A change alters them."""
    others = vars(optimizer).keys() - {"state", "param_groups", "defaults"}
    found = {name: _mark(vars(optimizer)[name]) for name in others}
    return {name: mark for name, mark in found.items() if mark is not None}


def _mark(value: Any) -> Any:
    """Return a mark that a change of the value alters; None without numbers and tensors."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return [mark for pair in value.items() for part in pair if (mark := _mark(part))] or None
    if isinstance(value, list | tuple | set):
        return [mark for part in value if (mark := _mark(part))] or None
    return (value,) if type(value) in (bool, int, float) else None


def _require_apart_in_memory(cls: Any, state: Mapping[str, Any], tensor: torch.Tensor) -> None:
    """Refuse tensors of a state that share memory with each other or with the parameter.

    Pages store each tensor separately.

    Raises:
        ValueError: two tensors share memory; the message names them.
    """
    seen = {tensor.untyped_storage().data_ptr(): "the parameter"}
    for name, part in parts_of(state).items():
        if isinstance(part, torch.Tensor) and part.numel():
            other = seen.setdefault(part.untyped_storage().data_ptr(), name)
            if other != name:
                raise ValueError(
                    f"{_name(cls)} keeps {name!r} in the memory of {other}: pages store each state "
                    "separately"
                )


def require_apart(
    cls: Class, options: Mapping[str, Any], group: Mapping[str, Any], ndim: int
) -> None:
    """Refuse a class whose step of a parameter depends on other parameters.

    A page steps some of the parameters, and keeps numbers that do not depend on gradients.

    Raises:
        ValueError: one of the first steps of small tensors depends on other parameters.
    """
    values = group_values(group)
    together, apart = (_tensors(2, ndim, torch.float32) for _ in range(2))
    lists = [together, *([tensor] for tensor in apart)]
    optimizers = [cls([{**values, "params": params}], **options) for params in lists]
    for number in range(_STEPS):
        for params in (together, apart):
            for tensor, size in zip(params, (1.0, 40.0), strict=True):
                tensor.grad = size * _waves(tensor, number)
        for optimizer in optimizers:
            step_of(optimizer)
        kept = [parts_of(o.state[p]) for o in optimizers for p in o.param_groups[0]["params"]]
        numbers = [
            {name: float(value) for name, value in of.items() if _is_number(value)} for of in kept
        ]
        changed = [group_values(optimizer.param_groups[0]) for optimizer in optimizers]
        is_apart = all(map(torch.equal, together, apart)) and changed.count(changed[0]) == 3
        if not is_apart or numbers.count(numbers[0]) != len(numbers):
            raise ValueError(
                f"{_name(cls)} steps parameters together, or by numbers of their gradients or "
                f"shapes: step {number + 1} of two parameters differs from steps of one at a time. "
                "A page holds only some of the parameters"
            )


def require_same_class(
    cls: Any,
    defaults: Mapping[str, Any],
    saved: Mapping[str, Any],
    where: str,
    own: Mapping[str, Any],
) -> None:
    """Refuse a saved param group that another class of ``torch.optim`` has written.

    Args:
        cls: the class.
        defaults: its keys and their defaults.
        saved: the group.
        where: names the group in the error.
        own: the group of this program. It may have additional keys.

    Raises:
        ValueError: the group is of another class; the message names the key that shows it.
    """
    if not saved.keys() - {"params", "param_names"} or saved.get(RULE) == cls.__name__:
        return  # Only states, or a commit of the class.
    if RULE in saved or ("algorithm" in saved and "algorithm" not in own):
        raise ValueError(f"{where} is of {saved.get(RULE, 'muon.Muon')}, and not of {cls.__name__}")
    for key in sorted((saved.keys() & _known_keys()) - defaults.keys() - own.keys()):
        raise ValueError(f"{where} is not of {cls.__name__}, which has no {key!r}")
    # Keys that later releases of torch have added.
    newer = {"maximize", "foreach", "fused", "capturable", "differentiable"}
    newer |= {"decoupled_weight_decay"}
    for key in sorted(defaults.keys() - saved.keys() - newer):
        raise ValueError(f"{where} is not of {cls.__name__}: it has no {key!r}")
    key = "decoupled_weight_decay"  # In Adam it is an option, in AdamW it is always True.
    if issubclass(cls, torch.optim.AdamW) and not saved.get(key, True):
        raise ValueError(f"{where} is not of {cls.__name__}: {key} is {saved[key]!r}, not True")


def is_of_torch(saved: Mapping[str, Any]) -> bool:
    """Return whether a saved param group has the keys of a class that pages support."""
    for cls in ELEMENTWISE:
        defaults = _defaults_of(cls)
        if saved.keys() <= defaults.keys() | {"params", "param_names", "initial_lr"}:
            with contextlib.suppress(ValueError):
                require_same_class(cls, defaults, saved, "", own={})
                return True
    return False


@functools.cache
def _known_keys() -> frozenset[str]:
    """Return the keys of param groups of the classes that pages support."""
    return frozenset(key for cls in ELEMENTWISE for key in _defaults_of(cls))


@functools.cache
def _defaults_of(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = cls([torch.zeros((2, 2), dtype=torch.float32, device="cpu")]).defaults
    return found


def _tensors(count: int, ndim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return small tensors on the CPU with gradients."""
    found = []
    for index in range(count):
        sizes = _SIZES[index : index + ndim]  # Two shapes, because numbers may depend on shapes.
        tensor = torch.empty(sizes, dtype=dtype, device="cpu")
        tensor.copy_(_waves(tensor, index)).requires_grad_()
        tensor.grad = _waves(tensor, index + 1)
        found.append(tensor)
    return found


def _waves(like: torch.Tensor, number: int) -> torch.Tensor:
    """Return values in [-1, 1] of the shape of a tensor, different for each number."""
    places = torch.arange(like.numel(), dtype=like.dtype, device="cpu")
    return torch.sin(places * (1.7 + number)).view(like.shape)


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float) or (
        isinstance(value, torch.Tensor) and value.shape == ()
    )


def _name(cls: Any) -> str:
    return str(getattr(cls, "__name__", cls))


def signature(group: Mapping[str, Any], keys: Collection[str]) -> tuple[Any, ...]:
    """Return the key of the names of states: which hyperparameters are 0, None or False.

    Args:
        group: the param group.
        keys: the keys of the class.
    """
    return tuple((key, _choice(group.get(key))) for key in keys)


def shape_options(group: Mapping[str, Any], changing: Collection[str]) -> Any:
    """Return the hyperparameters that the shapes of states may depend on: all whole numbers.

    Args:
        group: the param group.
        changing: keys that a step changes.
    """
    values = group_values(group).items()
    return repr([(k, v) for k, v in values if k not in changing and type(v) in (int, tuple, dict)])


def _choice(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_choice, value))
    if isinstance(value, torch.Tensor):
        return bool(value.any())
    return bool(value) if isinstance(value, Real) else repr(value)
