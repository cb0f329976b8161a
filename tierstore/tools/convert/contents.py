"""Contents of a source: its entries, and everything else that a checkpoint holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch

from tierstore.checkpoint.model_contents import plain_names
from tierstore.checkpoint.saved_values import as_number
from tierstore.checkpoint.stored_paths import MOMENTS
from tierstore.errors import CheckpointError
from tierstore.layout.encodings import MASTER, REMAINDER
from tierstore.layout.other_rules import AVERAGE, other_rule
from tierstore.layout.parameters import STEPPED, dtype_name, refuse_codes
from tierstore.run.manifest import are_states
from tierstore.tools.convert.entries import BUFFER, Entry
from tierstore.tools.convert.torch_names import ORDER_ADVICE, Shape, match_distinct, match_names

STEP = "step"
"""Name of the step count among the scalars of a parameter."""
_AT_FIRST_STEP = frozenset({STEPPED, "eta", "step_size"})
"""States and numbers of SGD, ASGD and Rprop."""
_COUNTED = "exp_avg_sq"  # A moment whose bias is corrected by a step count.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A param group."""

    hyperparameters: Mapping[str, Any]
    """Under their names in torch.optim; without "params" and "param_names"."""
    parameters: Sequence[str]
    momentum_convention: str | None = AVERAGE
    """Of ``momentum_buffer``: AVERAGE (kept as it is), HEAVY_BALL, or None if not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unnamed:
    """Optimizers whose parameters have numbers instead of names."""

    shapes: Sequence[Sequence[Shape | None]]
    """Shape of each parameter of each group; None if its states do not have the shape."""
    named: Callable[[Sequence[Sequence[str]]], Contents]
    """Return the contents, given the names of the parameters of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of one source, or of several together."""

    source: str
    """The formats, for messages."""
    wrapped: bool = False
    """True if names may have prefixes of wrappers, which merge() leaves out."""
    entries: Sequence[Entry] = ()
    groups: Sequence[Group] = ()
    scalars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameter -> name -> number of its optimizer state, such as "step", or value of EMPTY."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Name -> value of the model that is not a tensor, such as extra state."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further name of a tied tensor of the model -> the name of its entry."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Parameter -> its dtype in the model, where the master has another."""
    cuts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameter -> ``elementwise`` and ``unit`` of PagedParameter, if the source tells."""
    order: Mapping[str, Shape] | None = None
    """Parameter -> shape in the order of the model, if the source tells the order. A source with
    an order and no entries has precedence."""
    unnamed: Unnamed | None = None
    """Optimizers that merge() gives names."""
    step: int | None = None
    extra: dict[str, Any] | None = None
    """Name -> state of each registered object of a commit; None: none."""
    notes: Sequence[str] = ()
    """Facts that a user should know, one sentence each."""
    lost: Sequence[str] = ()
    """Values that are not carried, each as ``name: reason``."""

    @property
    def grouped(self) -> dict[str, Group]:
        """Parameter -> its group."""
        return {name: group for group in self.groups for name in group.parameters}

    @property
    def weights(self) -> dict[str, Entry]:
        """Name -> entry, of all tensors of the model."""
        return {entry.parameter: entry for entry in self.entries if entry.state in (MASTER, BUFFER)}

    def cast_weights(self, dtype: torch.dtype | None) -> list[Entry]:
        """Return the entries, with masters of floats in another dtype; None: as they are."""
        return [
            entry.cast(dtype)
            if dtype is not None and entry.state == MASTER and entry.dtype.is_floating_point
            else entry
            for entry in self.entries
        ]


def _without_wrappers(sources: Sequence[Contents]) -> list[Contents]:
    """Return sources without the prefixes of wrappers in names.

    "module." is the prefix of a wrapper if all names of the model in all sources begin with it.
    The names of an optimizer, and of an order alone, may have the prefix if the model lacks it, or
    lack the prefix if the model has it.

    Raises:
        CheckpointError: two names become equal.
    """
    ours = [source for source in sources if source.wrapped]
    model = plain_names(dict.fromkeys(chain.from_iterable(map(_names_of_model, ours))))
    known = set(model.values())

    def fitting(names: Collection[str]) -> dict[str, str]:
        plain = plain_names(names, unwrap_parallel=False)
        return plain if known.issuperset(plain.values()) else plain_names(names)

    optimizer = fitting(dict.fromkeys(chain.from_iterable(map(_names_of_optimizer, ours))))
    orders = [model if source.entries else fitting(source.order or ()) for source in sources]
    return [
        _renamed(source, model, optimizer, order) if source.wrapped else source
        for source, order in zip(sources, orders, strict=True)
    ]


def _names_of_model(contents: Contents) -> Iterator[str]:
    yield from contents.weights
    yield from contents.values
    yield from contents.aliases


def _names_of_optimizer(contents: Contents) -> Iterator[str]:
    yield from (e.parameter for e in contents.entries if e.state not in (MASTER, BUFFER))
    yield from (name for name in contents.grouped if isinstance(name, str))
    yield from contents.scalars


Names = Mapping[str, str]
"""Name -> another name. Names that it lacks are kept."""


def _renamed(contents: Contents, model: Names, optimizer: Names, order: Names) -> Contents:
    """Return contents under other names of the model, of its optimizer, and in its order."""

    def renamed(values: Mapping[str, Any], names: Names) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    def named(entry: Entry) -> Entry:
        names = model if entry.state in (MASTER, BUFFER) else optimizer
        return replace(entry, parameter=names.get(entry.parameter, entry.parameter))

    return replace(
        contents,
        entries=list(map(named, contents.entries)),
        groups=[
            replace(group, parameters=[optimizer.get(name, name) for name in group.parameters])
            for group in contents.groups
        ],
        scalars=renamed(contents.scalars, optimizer),
        values=renamed(contents.values, model),
        aliases={model[alias]: model[name] for alias, name in contents.aliases.items()},
        dtypes=renamed(contents.dtypes, model),
        cuts=renamed(contents.cuts, model),
        order=None if contents.order is None else renamed(contents.order, order),
    )


def merge(
    sources: Sequence[Contents], *, optimizer: bool = True, assume_model_order: bool = False
) -> Contents:
    """Return the contents of several sources together, without prefixes of wrappers.

    Args:
        sources: the contents of each.
        optimizer: whether states are wanted. If not, states without a param group are accepted.
        assume_model_order: whether the param groups of optimizers without names were filled in
            the order of the model.

    Raises:
        CheckpointError: a name occurs twice, also without prefixes, the sources are of different
            steps, an optimizer state has no param group, the names of the parameters of an
            optimizer cannot be found, or the model lacks a parameter.
    """
    sources = _without_wrappers(sources)
    try:
        sources = [*sources, *_named(sources, assume_model_order=assume_model_order)]
    except CheckpointError:
        if optimizer:
            raise
    entries = list(chain.from_iterable(source.entries for source in sources))
    groups = list(chain.from_iterable(source.groups for source in sources))
    places = [entry.place for entry in entries]
    places += [(alias, MASTER) for source in sources for alias in source.aliases]
    _refuse_twice(places, lambda place: f"{place[1]} of {place[0]!r}")
    _refuse_twice(
        chain.from_iterable(g.parameters for g in groups), lambda name: f"group of {name!r}"
    )
    steps = {source.step for source in sources} - {None}
    if len(steps) > 1:
        raise CheckpointError(f"the sources are of different steps, {sorted(map(str, steps))}")
    extras = [source.extra for source in sources if source.extra is not None]
    extra = next(iter(extras), None)
    lost = list(chain.from_iterable(source.lost for source in sources))
    if any(other != extra for other in extras):
        lost.append("extra of one source: another source has a different extra")
    if extra is not None and not are_states(extra):
        lost.append("extra: it is not a dict of names and states")
        extra = None
    merged = Contents(
        source=" and ".join(dict.fromkeys(source.source for source in sources)),
        entries=entries,
        groups=groups,
        scalars=_joined("scalars", [source.scalars for source in sources]),
        values=_joined("value", [source.values for source in sources]),
        aliases=_joined("name", [source.aliases for source in sources]),
        dtypes=_joined("dtype", [source.dtypes for source in sources]),
        cuts=_joined("cut", [source.cuts for source in sources]),
        step=next(iter(steps), None),
        extra=extra,
        notes=list(chain.from_iterable(source.notes for source in sources)),
        lost=lost,
    )
    if optimizer:
        _require_weights(merged)
    return _classified(merged, optimizer=optimizer)


def require_numbers(contents: Contents) -> None:
    """Refuse weights and moments that are codes; see refuse_codes().

    Raises:
        CheckpointError: a weight or moment is a code; the message names the first.
    """
    weights = contents.weights
    for entry in contents.entries:
        weight = weights.get(entry.parameter, entry)
        is_weight = entry.state == MASTER
        # Without groups, a tensor that is not of floats may be a buffer.
        is_other = is_weight and not contents.groups and not entry.dtype.is_floating_point
        is_other |= entry.shape != weight.shape and entry.state not in MOMENTS
        if entry.state == BUFFER or is_other or entry.dtype.is_complex or _is_encoded(entry):
            continue
        state = "weight" if is_weight else entry.state
        refuse_codes(f"{state} of {entry.parameter!r}", entry.dtype)


def _is_encoded(entry: Entry) -> bool:
    """Return whether an entry is a tensor of an encoded state; see layout/encodings.py."""
    return entry.state == REMAINDER or entry.state.endswith(f"_{dtype_name(entry.dtype)}_root")


def with_counts(contents: Contents, *, of_group: bool) -> Contents:
    """Return contents in which each parameter with AdamW's moments has a step count.

    FusedAdam of Apex and of TransformerEngine has one count, in the param group.

    Args:
        contents: the contents.
        of_group: leave the count in its group as well, where FusedAdam looks for it.

    Raises:
        CheckpointError: the source has no step count.
    """
    moments = [entry.parameter for entry in contents.entries if entry.state == _COUNTED]
    scalars, groups, taken = dict(contents.scalars), contents.grouped, set[str]()
    for name in moments:
        if STEP in scalars.get(name, {}) or name not in groups:
            continue
        if other_rule(groups[name].hyperparameters) is not None:  # The rule has its own count.
            continue
        count = as_number(groups[name].hyperparameters.get(STEP))
        if count is None:
            raise CheckpointError(
                f"the source has moments of {name!r}, and not the number of steps that they were "
                "averaged over, neither in its state nor in its param group. AdamW would step "
                "wrongly with them: convert the weights with --only model"
            )
        scalars[name] = {**scalars.get(name, {}), STEP: count}
        taken.add(name)

    def without_count(group: Group) -> Group:
        if of_group or taken.isdisjoint(group.parameters):
            return group
        others = {key: value for key, value in group.hyperparameters.items() if key != STEP}
        return replace(group, hyperparameters=others)

    return replace(contents, scalars=scalars, groups=list(map(without_count, contents.groups)))


def without_first_states(contents: Contents) -> Contents:
    """Leave out states of parameters without steps if their class makes them at the first step.

    ASGD and Rprop initialize these states with the learning rate of the first step. SGD with
    dampening steps differently if a parameter has no state.
    """
    states: dict[str, set[str]] = defaultdict(set)
    for entry in contents.entries:
        states[entry.parameter].add(entry.state)
    left_out = {
        name
        for name, numbers in contents.scalars.items()
        if not numbers.get(STEPPED, numbers.get(STEP, 1.0))
        and not _AT_FIRST_STEP.isdisjoint({*numbers, *states[name]})
    }
    return replace(
        contents,
        entries=[
            entry
            for entry in contents.entries
            if entry.state in (MASTER, BUFFER) or entry.parameter not in left_out
        ],
        scalars={n: numbers for n, numbers in contents.scalars.items() if n not in left_out},
    )


def _require_weights(contents: Contents) -> None:
    """Refuse param groups with a parameter that the model lacks; without a model, accept all."""
    known = contents.weights.keys() | contents.aliases.keys()
    absent = [name for name in contents.grouped if name not in known]
    if known and absent:
        raise CheckpointError(
            f"the optimizer has {absent[0]!r} ({len(absent)} such parameters), and the model has "
            "no tensor of this name: save both from the same model, or convert the model with "
            "--only model"
        )


def _named(sources: Sequence[Contents], *, assume_model_order: bool) -> list[Contents]:
    """Return the contents of the optimizers without names."""
    unnamed = [source.unnamed for source in sources if source.unnamed is not None]
    if not unnamed:
        return []
    shapes = [group for optimizer in unnamed for group in optimizer.shapes]
    grouped = {name for source in sources for name in source.grouped}
    weights = {
        entry.parameter: entry.shape
        for source in sources
        for entry in source.weights.values()
        if entry.dtype.is_floating_point or entry.dtype.is_complex
    }
    orders = [source.order for source in sources if source.order is not None and not source.entries]
    for name, shape in chain.from_iterable(order.items() for order in orders):
        if weights and weights.get(name) != shape:
            raise CheckpointError(
                f"the source of the order has {name!r} of shape {list(shape)}, and the model "
                + (f"has shape {list(weights[name])}" if name in weights else "has no such tensor")
            )
    if not orders and all(source.order is not None for source in sources if source.weights):
        orders = [source.order for source in sources if source.order is not None]
    candidates = chain.from_iterable(order.items() for order in orders or [weights])
    tensors = [item for item in candidates if item[0] not in grouped]
    notes = []
    if not assume_model_order:
        names = match_distinct(shapes, tensors)
    elif orders:
        names = match_names(shapes, tensors)
        notes = [
            f"the optimizer has no names for its {sum(map(len, names))} parameters: they were "
            "assigned in the order of the model, as --assume-model-order says"
        ]
    else:
        raise CheckpointError(
            "the parameters of the optimizer have no names, and no source tells the order of the "
            f"parameters in the model: {ORDER_ADVICE}"
        )
    rest = iter(names)
    found = [u.named(list(islice(rest, len(u.shapes)))) for u in unnamed]
    return [replace(found[0], notes=[*notes, *found[0].notes]), *found[1:]]


def _classified(contents: Contents, *, optimizer: bool) -> Contents:
    """Mark tensors of the model that no param group has as buffers, if there are groups.

    Raises:
        CheckpointError: a state has no group.
    """
    grouped = contents.grouped
    states = [entry for entry in contents.entries if entry.state not in (MASTER, BUFFER)]
    stray = [entry for entry in states if entry.parameter not in grouped]
    if stray and optimizer:
        raise CheckpointError(
            f"{stray[0].state} of {stray[0].parameter!r} ({len(stray)} such tensors) belongs to "
            "no param group of the source: convert the weights with --only model"
        )
    if not grouped:
        return contents
    return replace(
        contents,
        entries=[
            replace(entry, state=BUFFER)
            if entry.state == MASTER and entry.parameter not in grouped
            else entry
            for entry in contents.entries
        ],
    )


def _refuse_twice(keys: Iterable[Any], text: Any) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise CheckpointError(
                f"the sources have the {text(key)} twice: name every part of the checkpoint once"
            )
        seen.add(key)


def _joined(what: str, mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    _refuse_twice(chain.from_iterable(mappings), lambda name: f"{what} of {name!r}")
    return {name: value for mapping in mappings for name, value in mapping.items()}
