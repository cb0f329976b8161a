"""Param groups that an optimizer attaches to a store, with the named states of parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tierstore.errors import CheckpointError
from tierstore.layout.chunks import Chunk
from tierstore.layout.dtensors import (
    describe_placement,
    is_dtensor,
    local_tensor,
    placed_as,
    same_placement,
    same_shape,
)
from tierstore.layout.encodings import (
    ENCODINGS,
    MASTER,
    Encoding,
    StoredTensor,
    encodings_of,
)
from tierstore.layout.other_rules import RULE
from tierstore.layout.records import (
    RECORD_DATA_BYTES_MAX,
    RECORD_DIMENSIONS_MAX,
    RECORD_DTYPES,
)
from tierstore.layout.state_parts import EMPTY, nested, state_path

PARAMETER_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

STEPPED = "stepped"
"""Scalar of rules without a step count: 1.0 for a parameter with states, else 0.0."""

# Parts that wrappers add to the names of parameters, before the last part.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@functools.cache
def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the master of a parameter: float32, or a wider dtype of the parameter."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The properties of one parameter that determine the layout of pages."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    states: tuple[tuple[str, torch.dtype], ...]
    """Name and dtype of each state except the master."""
    elementwise: bool
    """True if the parameter may be cut at rows over several pages."""
    unit: int | None = None
    """Rows of the first dimension that stay together in one page; None: all, unless
    ``elementwise``."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of each state whose shape differs from the parameter."""
    encodings: tuple[tuple[str, str], ...] = ()
    """Name and encoding of each state that is encoded in pages."""
    empty: tuple[tuple[str, str], ...] = ()
    """Name and kind, from EMPTY, of each empty part of the state."""

    @property
    def owns_master(self) -> bool:
        """True if the parameter has the dtype of its master and is therefore its own master."""
        return self.dtype == master_dtype(self.dtype)

    @property
    def all_states(self) -> tuple[tuple[str, torch.dtype], ...]:
        """Name and dtype of the values of each state, the master first."""
        return ((MASTER, master_dtype(self.dtype)), *self.states)

    @functools.cached_property
    def stored(self) -> Sequence[StoredTensor]:
        """The tensors that pages keep, the master first."""
        found: list[StoredTensor] = []
        for state, dtype in self.all_states:
            encoding = self.encoding(state)
            if encoding is None:
                found.append(self.values_of(state, dtype))
            else:
                found += encoding.stored(state)
        return found

    def values_of(self, state: str, dtype: torch.dtype) -> StoredTensor:
        """Return the stored tensor of a state that is not encoded."""
        shape = dict(self.shapes).get(state)
        shared = None if shape is None else _shared(shape, self.shape)
        return StoredTensor(state, dtype, shape=shape, shared=shared)

    @functools.cached_property
    def _by_name(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.stored}

    @functools.cached_property
    def stores_parameter(self) -> bool:
        """True if pages keep the parameter itself under MASTER. Steps do not read it."""
        return self.stored[0].dtype == self.dtype

    @functools.cached_property
    def column_block(self) -> int:
        """Block of columns: a row may be cut only at multiples of this number."""
        return max(tensor.columns for tensor in self.stored)

    @property
    def free_states(self) -> list[str]:
        """Names of the free states: not along the parameter. The parameter then stays whole."""
        return [tensor.name for tensor in self.stored if tensor.is_free]

    def encoding(self, state: str) -> Encoding | None:
        """Return the encoding of a state; None if pages keep its values."""
        name = dict(self.encodings).get(state)
        return None if name is None else ENCODINGS[name]

    def bytes_of(self, numel: int) -> int:
        """Return the approximate bytes of consecutive elements in pages."""
        return sum(
            tensor.numel_of(numel, self.shape) * tensor.dtype.itemsize for tensor in self.stored
        )

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all stored tensors together."""
        return sum(
            math.prod(self.state_shape(tensor.name)) * tensor.dtype.itemsize
            for tensor in self.stored
        )

    def state_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a state or stored tensor."""
        return self.state_chunk(name, Chunk((0,) * len(self.shape), self.shape)).sizes

    def state_chunk(self, name: str, chunk: Chunk) -> Chunk:
        """Return the elements of a state or stored tensor that belong to a chunk.

        See StoredTensor.chunk().
        """
        tensor = self._by_name.get(name)
        return chunk if tensor is None else tensor.chunk(chunk)  # Encoded: the parameter's shape.

    def rectangle(self, shape: tuple[int, ...]) -> ParameterSpec:
        """Return the spec of a rectangle of the parameter."""
        if shape == self.shape:
            return self
        assert not self.free_states
        places = Chunk((0,) * len(shape), shape)
        others = (tensor for tensor in self.stored if tensor.shared is not None)
        shapes = tuple((tensor.name, tensor.chunk(places).sizes) for tensor in others)
        return replace(self, shape=shape, shapes=shapes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a commit; from_json() is the inverse."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "states": {name: dtype_name(dtype) for name, dtype in self.states},
            "elementwise": self.elementwise,
            **({} if self.unit is None else {"unit": self.unit}),
            **({"shapes": dict(self.shapes)} if self.shapes else {}),
            **({"encodings": dict(self.encodings)} if self.encodings else {}),
            **({"empty": dict(self.empty)} if self.empty else {}),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ParameterSpec:
        """Rebuild a spec from to_json()."""
        shape = tuple(fields["shape"])
        # Earlier layouts list the names of states that have one element for each row.
        shapes = dict.fromkeys(fields.get("row_states", ()), (*shape[:-1], 1))
        shapes |= {state: tuple(sizes) for state, sizes in fields.get("shapes", {}).items()}
        return cls(
            name=fields["name"],
            shape=shape,
            dtype=_dtype_of(fields["dtype"]),
            states=tuple((name, _dtype_of(dtype)) for name, dtype in fields["states"].items()),
            elementwise=fields["elementwise"],
            unit=fields.get("unit"),
            shapes=_others(shapes, shape),
            encodings=tuple(fields.get("encodings", {}).items()),
            empty=tuple(fields.get("empty", {}).items()),
        )

    def describe(self) -> str:
        """Return text for the spec."""
        shapes = dict(self.shapes)
        states = ", ".join(
            f"{name} {dtype_name(dtype)}{f' {list(shapes[name])}' if name in shapes else ''}"
            for name, dtype in self.states
        )
        encoded = "".join(f", {state} encoded as {name!r}" for state, name in self.encodings)
        kind = "elementwise" if self.elementwise else "whole"
        kind = kind if self.unit is None else f"in units of {self.unit} rows"
        return (
            f"{self.name!r} {dtype_name(self.dtype)} {list(self.shape)}, {kind}, "
            f"states: {states or 'none'}{encoded}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedParameter:
    """One parameter of the model and the states that the store keeps for it."""

    name: str
    """Unique in the store and the same in every run; keys of checkpoints contain it."""

    tensor: torch.Tensor
    """The parameter itself. The store writes the updated master into it after each page."""

    states: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Name and dtype of each state except "master"."""

    initial: Mapping[str, float] = field(default_factory=dict)
    """Name of a state -> value of its elements before the first step, if not 0."""

    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name -> shape of each state whose shape differs from the parameter. A state *along* the
    parameter has 1 in place of some sizes: (rows, 1) is a number for each row. Chunks that share
    its elements have copies, and the optimizer keeps the copies equal. A state of any other shape,
    such as (rows, rows), is *free*: its parameter stays whole, and one rank owns it."""

    empty: Mapping[str, str] = field(default_factory=dict)
    """Name -> kind, from EMPTY, of each empty part of the state. Checkpoints and state dicts also
    have these parts."""

    encodings: Mapping[str, str] = field(default_factory=dict)
    """Name of a state -> its encoding, if pages do not keep its values. For "master" of a bfloat16
    parameter: "remainder", the 16 bits that rounding takes away, or "24bit", the upper 8 of them.
    For a float32 state, with a scale for each 256 columns of a row: "int8_root" or, for values of
    at least 0, "uint8_root": the fourth powers of whole numbers."""

    elementwise: bool = False
    """True if the update of an element depends only on that element. The store may then cut the
    parameter at rows over several pages. False keeps the parameter, or each of its units, in one
    page."""

    unit: int | None = None
    """Number of rows of the first dimension that the update needs together: 1 for a stack of
    matrices; None: all rows. The number of rows must be a multiple of it. The store may then cut
    the parameter between units over several pages. If ranks cut units, it stays in one page."""

    partition: str | None = None
    """Ownership of a parameter that several ranks hold whole. With "by_parameter" one rank owns
    the parameter. With "flat" every rank owns an equal range of the elements of a subgroup. None:
    "flat" if elementwise, else "by_parameter"."""

    gradient: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    """Returns the gradient of ``tensor``, with the same placement, in float64, float32, bfloat16 or
    float16; or returns None if it has no gradient. A step calls it several times. Every call must
    return the same tensor. None: ``tensor.grad``."""

    cost: int | None = None
    """Relative cost of owning the whole parameter. Owners are chosen so that ranks have about equal
    costs. Comparable only among parameters with the same ``elementwise``. None: the number of
    elements."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"parameter {self.name!r} {problem}")

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient."""
        if self.gradient is not None:
            try:
                return self.gradient(self.tensor)
            except Exception as error:
                error.add_note(f"in the function that gives the gradient of {self.name!r}")
                raise
        return self.tensor.grad

    @property
    def spec(self) -> ParameterSpec:
        """The properties that determine the layout of pages."""
        return ParameterSpec(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=self.tensor.dtype,
            states=tuple(self.states.items()),
            elementwise=self.elementwise,
            unit=self.unit,
            shapes=_others(self.shapes, tuple(self.tensor.shape)),
            encodings=tuple(self.encodings.items()),
            empty=tuple(self.empty.items()),
        )


@dataclass(slots=True, kw_only=True)
class PagedGroup:
    """Parameters that share their hyperparameters. No page holds parts of two groups."""

    parameters: Sequence[PagedParameter]

    hyperparameters: dict[str, Any]
    """Read at every commit and updated in place by restore(). The
    keys "params" and "param_names", which torch.optim keeps in the same dict, are ignored."""

    rule: str | None = None
    """Name of the rule. Commits store it under RULE, because other rules may have the same states
    and hyperparameters."""

    check: Callable[[Mapping[str, Any]], None] = lambda hyperparameters: None
    """Called by restore(checkpoint=...) with the hyperparameters of the checkpoint, before any
    change. It raises ValueError if the optimizer cannot use them."""

    check_commit: Callable[[Mapping[str, Any]], None] = lambda hyperparameters: None
    """Called by restore() in the same way, with the hyperparameters of the run's last commit."""

    def own_hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters without "params" and "param_names", as in commits."""
        others = ("params", "param_names")
        own = {key: value for key, value in self.hyperparameters.items() if key not in others}
        return own if self.rule is None else {**own, RULE: self.rule}


def unwrapped_name(name: str, *, without_module: bool) -> str:
    """Return the name of a parameter without the parts that wrappers add.

    Args:
        name: the name.
        without_module: whether to leave out every part "module". DataParallel and
            DistributedDataParallel add it, but a module of the model may also have this name.
    """
    *modules, last = name.split(".")
    added = (*_WRAPPERS, "module") if without_module else _WRAPPERS
    return ".".join([*(part for part in modules if part not in added), last])


def unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name without the parts that wrappers add; if two become equal, change none.

    Example: "module.a.weight" and "b._orig_mod.weight" are "a.weight" and "b.weight".
    """
    plain = {name: unwrapped_name(name, without_module=True) for name in names}
    return plain if len({*plain.values()}) == len(plain) else {name: name for name in plain}


def refuse_codes(what: str, dtype: torch.dtype, expected: torch.dtype | None = None) -> None:
    """Refuse a weight or a moment whose elements are codes instead of numbers.

    Quantized models and optimizers store codes of 8 bits or fewer, and separate scales. If codes
    were read as numbers, they would be wrong by the scale.

    Args:
        what: names the tensor.
        dtype: dtype of its elements.
        expected: dtype of the state here. It is always accepted.

    Raises:
        CheckpointError: the dtype is neither ``expected`` nor a dtype of parameters.
    """
    if dtype not in (*PARAMETER_DTYPES, expected):
        raise CheckpointError(
            f"{what} is {dtype_name(dtype)}, but weights and moments are not: these are codes, "
            "which need scales to be numbers. Save the model and its optimizer dequantized"
        )


def _others(
    shapes: Mapping[str, Sequence[int]], shape: tuple[int, ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes that differ from the shape of the parameter."""
    return tuple((state, tuple(of)) for state, of in shapes.items() if tuple(of) != shape)


def _shared(shape: Sequence[int], parameter: Sequence[int]) -> tuple[bool, ...] | None:
    """Return for each dimension whether the state has size 1 there; None if the state is free."""
    pairs = list(zip(shape, parameter, strict=False))
    if len(shape) != len(parameter) or any(own not in (1, size) for own, size in pairs):
        return None
    return tuple(own != size for own, size in pairs)


def check_states(parameter: PagedParameter, states: Mapping[str, torch.Tensor]) -> None:
    """Check that tensors are states of the parameter: known names, shapes and placements.

    A plain tensor that holds the whole state is also accepted.

    Raises:
        ValueError: a tensor does not fit; the message names the first.
    """
    spec = parameter.spec
    known = dict(spec.states if spec.owns_master else spec.all_states)
    for state, tensor in states.items():
        if state not in known or tuple(tensor.shape) != spec.state_shape(state):
            expected = f", of shape {list(spec.state_shape(state))}" if state in known else ""
            raise ValueError(
                f"state {state!r} of shape {list(tensor.shape)} does not fit {spec.describe()}"
                f"{expected}"
            )
        refuse_codes(f"state {state!r} of {spec.name!r}", tensor.dtype, known[state])
        if not is_dtensor(tensor):
            continue
        placed = placed_as(parameter.tensor, local_tensor(tensor), spec.state_shape(state))
        if not same_placement(tensor, placed):
            raise ValueError(
                f"state {state!r} of {spec.name!r} is {describe_placement(tensor)}, expected "
                f"{describe_placement(placed)}: pass the whole state, or redistribute it"
            )
        # Without elements a local tensor may have fewer dimensions.
        own = tuple(local_tensor(parameter.tensor).shape)
        sizes = zip(own, tensor.shape, spec.shape, strict=False)
        part = [size if whole == full else whole for size, whole, full in sizes]
        if state in spec.free_states:
            part = [*tensor.shape]
        if not same_shape(local_tensor(tensor).shape, part):
            raise ValueError(
                f"the local tensor of state {state!r} of {spec.name!r} has shape "
                f"{list(local_tensor(tensor).shape)} on this rank, expected {part}: pass the whole "
                "state, or shard it like the parameter"
            )


def _problems(parameter: PagedParameter) -> Iterator[str]:
    """Yield the reasons why a parameter cannot be paged."""
    name, tensor = parameter.name, parameter.tensor
    if not name or any(ord(character) < 32 for character in name):
        yield "needs a name of printable text"
    if tensor.dtype not in PARAMETER_DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in PARAMETER_DTYPES)
        yield f"has dtype {dtype_name(tensor.dtype)}; only {names} can be paged"
    if tensor.ndim > RECORD_DIMENSIONS_MAX:
        yield f"has {tensor.ndim} dimensions; at most {RECORD_DIMENSIONS_MAX} can be paged"
    if type(local_tensor(tensor)) is not torch.Tensor or tensor.layout != torch.strided:
        kind = f"is a {type(tensor.data).__name__} of layout {tensor.layout}"
        yield f"{kind}; only plain dense tensors and DTensors of them can be paged"
    if parameter.partition not in (None, "flat", "by_parameter"):
        yield f"has partition {parameter.partition!r}; must be 'flat', 'by_parameter' or None"
    if parameter.unit is not None:
        if parameter.elementwise:
            yield f"is elementwise and has units of {parameter.unit} rows: leave one out"
        rows = tensor.shape[0] if tensor.ndim else 0
        is_count = type(parameter.unit) is int and parameter.unit > 0
        if not is_count or not tensor.ndim or rows % parameter.unit:
            yield f"of {rows} rows cannot have units of {parameter.unit!r} rows"
    if tensor.device.type not in ("cpu", "cuda"):
        yield f"is on {tensor.device}; only cpu and cuda devices are supported"
    for state, dtype in parameter.states.items():
        if state == MASTER or not _is_name(state):
            yield (
                f"has a state named {state!r}; must be an identifier other than {MASTER!r}, with "
                "names and positions in it after dots"
            )
        if dtype not in RECORD_DTYPES:
            yield f"has a state {state!r}, which cannot have dtype {dtype_name(dtype)}"
    parts = [*parameter.states, *parameter.empty]
    if any("." in part for part in parts) and all(map(_is_name, parts)):
        try:
            nested([(state_path(part), None) for part in parts])
        except ValueError as error:
            yield f"has the states {parts}: {error}"
    for state, kind in parameter.empty.items():
        if not _is_name(state) or kind not in EMPTY:
            yield f"has {kind!r} for the empty part {state!r}; it can be: {', '.join(EMPTY)}"
    for state, shape in parameter.shapes.items():
        if state not in parameter.states:
            yield f"has a shape for {state!r}, but no such state"
        elif any(type(size) is not int or size < 0 for size in shape):
            yield f"has {shape!r} for the shape of {state!r}, must be sizes"
        elif len(shape) > RECORD_DIMENSIONS_MAX:
            yield f"has {len(shape)} dimensions in {state!r}, of at most {RECORD_DIMENSIONS_MAX}"
        elif math.prod(shape) and not tensor.numel():
            yield f"has no elements, and therefore no page for {state!r} of shape {list(shape)}"
        elif _shared(shape, tensor.shape) is None:
            yield from _problems_of_free(parameter, state, shape)
    if not isinstance(parameter.encodings, Mapping):
        yield f"has encodings {parameter.encodings!r}, must be a mapping of states to names"
    for state, encoding in parameter.encodings.items():
        if encoding not in encodings_of(state):
            names = ", ".join(map(repr, encodings_of(state)))
            yield f"has {encoding!r} for the encoding of {state!r}; it can have: {names}"
        elif state != MASTER and (
            parameter.states.get(state) != torch.float32
            or tuple(parameter.shapes.get(state, tensor.shape)) != tuple(tensor.shape)
            or not tensor.ndim
        ):
            yield f"has {encoding!r} for {state!r}, which must be a float32 state of its shape"
        elif state != MASTER and tensor.dtype == torch.float64:
            yield f"has dtype float64, but {encoding!r} for {state!r} has fewer bits than float32"
        elif state == MASTER and tensor.dtype != torch.bfloat16:
            yield f"has dtype {dtype_name(tensor.dtype)}: a {encoding!r} master needs bfloat16"
    if parameter.encodings and not parameter.encodings.keys() - {*parameter.states, MASTER}:
        stored = [tensor_.name for tensor_ in parameter.spec.stored]
        for name in {name for name in stored if stored.count(name) > 1}:
            yield f"has a state {name!r}, which is the name of a tensor of an encoded state"


def _problems_of_free(parameter: PagedParameter, state: str, shape: Sequence[int]) -> Iterator[str]:
    """Yield the reasons why a parameter cannot have a free state."""
    what = f"has a state {state!r} of shape {list(shape)}"
    numel = math.prod(parameter.tensor.shape)
    if parameter.elementwise or parameter.unit is not None or parameter.partition == "flat":
        yield f"{what}, so it must stay whole on one rank, but it is cut here"
    if not math.prod(shape):
        yield f"{what}, which has no elements"
    widest = max(dtype.itemsize for dtype in (torch.float32, *parameter.states.values()))
    if numel * max(widest, parameter.tensor.itemsize) > RECORD_DATA_BYTES_MAX:
        yield f"{what}, and more elements than one record of a page may have"


def _is_name(state: str) -> bool:
    """Return whether a name is an identifier, with optional parts after dots."""
    first, *parts = state.split(".")
    return first.isidentifier() and all(part.isidentifier() or part.isdigit() for part in parts)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and messages, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
