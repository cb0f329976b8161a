"""Steps of a class of ``torch.optim`` on views of a page instead of parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tierstore.layout.encodings import AnyState, assign, values_of
from tierstore.layout.parameters import STEPPED, dtype_name, master_dtype
from tierstore.layout.state_parts import EMPTY, empty_kind, parts_of, state_of
from tierstore.optim.classes import Kept, group_values, step_of
from tierstore.paging.views import PageView, without_collections

Scalars = Mapping[str, float]
"""Name -> value of each scalar of a parameter."""

_SMALL_NUMEL = 1 << 14
"""Smaller tensors are stacked: for them the overhead of a torch call exceeds the rule itself."""


class _Row(NamedTuple):
    """A chunk that is stepped, or several chunks stacked as one."""

    name: str
    """Name of the parameter, or of the first parameter of a stack."""
    master: torch.Tensor
    grad: torch.Tensor
    states: Mapping[str, torch.Tensor]
    kept: Kept
    scalars: Scalars
    in_page: Mapping[str, AnyState] = {}
    """The states in the page, if ``states`` has copies of them."""


class ClassSteps:
    """One step of one param group of a class, page after page.

    Every page sees the group as it was before the step. A step of a tensor of one element gives the
    new scalars: a rank also counts the steps of parameters that other ranks own.

    Args:
        optimizer: an optimizer of the class. Its own param groups and states are not used.
        make: makes another one for a list of param groups.
        group: the param group.
        kept_for: returns the states and numbers that the class keeps for a parameter.
        joins: whether small tensors are stepped as one. For elementwise classes this is the same.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group: Mapping[str, Any],
        kept_for: Callable[[torch.Tensor], Kept],
        *,
        joins: bool,
    ) -> None:
        self._optimizer = optimizer
        self._make = make
        self._before = group_values(group)
        self._after = self._before
        self._kept_for = kept_for
        self._joins = joins
        self._kept: dict[tuple[torch.Size, torch.dtype], Kept] = {}
        self._advanced: dict[Any, dict[str, float]] = {}

    @property
    def changed(self) -> dict[str, Any]:
        """The hyperparameters that the step changed, such as a count of steps."""
        nothing = object()
        found = self._after.items()
        return {key: value for key, value in found if self._before.get(key, nothing) is not value}

    def advanced(self, tensor: torch.Tensor, scalars: Scalars) -> dict[str, float]:
        """Return the scalars of a parameter after the step.

        Args:
            tensor: the parameter.
            scalars: the scalars before the step.
        """
        key = (tensor.ndim, tensor.dtype, *scalars.values())
        if key not in self._advanced:
            one = torch.ones((1,) * tensor.ndim, dtype=master_dtype(tensor.dtype), device="cpu")
            kept = self._kept_for(one)
            row = _Row("", one, torch.ones_like(one), {}, kept, {STEPPED: 0.0})
            [state] = self._step([row])
            if _is_stepped(scalars):  # Use the states that a first step leaves.
                states = {name: state[name] for name in kept.states}
                [state] = self._step([row._replace(states=states, scalars=scalars)])
            found = {}
            for name, kind in kept.kinds.items():
                number = float(state[name])
                if not math.isnan(number) and number != state[name]:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} keeps a number {name!r}, "
                        f"{state[name]}, that a float cannot represent exactly"
                    )
                found[name] = state[name] if kind is int else number
            self._advanced[key] = {**found, STEPPED: 1.0}
        return self._advanced[key]

    def step_nothing(self) -> None:
        """Step the group without a gradient, because a class may count steps in the group."""
        self._step([])

    @without_collections()
    def step_page(
        self, page: PageView, scalars: Mapping[str, Scalars], advanced: Mapping[str, Scalars]
    ) -> None:
        """Step the chunks of a page.

        Args:
            page: a page of the group.
            scalars: parameter name -> the scalars before the step.
            advanced: parameter name -> the scalars after it.

        Raises:
            ValueError: the states of the class differ from the states of a small tensor, or numbers
                depend on gradients.
        """
        rows: list[_Row] = []
        for shard in page.shards:
            kept, name = self._kept_of(shard.parameter.tensor), shard.spec.name
            for chunk in shard.chunks if shard.has_gradient else ():
                grad, states, in_page = chunk.grad, chunk.states, {}
                assert grad is not None
                if kept.shapes or kept.orders:
                    states = {
                        key: _as_created(of, kept.orders.get(key)) for key, of in states.items()
                    }
                    in_page = {key: of for key, of in chunk.states.items() if of is not states[key]}
                rows.append(_Row(name, chunk.master, grad, states, kept, scalars[name], in_page))
        if not rows:
            return
        joined, apart = _joined(rows) if self._joins else (rows, [])
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._before.get("fused"):  # Fused kernels take all tensors in memory order.
            joined, copies = _contiguous(joined)
        for row, state in zip(joined, self._step(joined), strict=True):
            for scalar in row.kept.kinds:
                value = state[scalar]
                kind = value.dtype if isinstance(value, torch.Tensor) else type(value)
                if kind != row.kept.kinds[scalar]:
                    raise self._changed(scalar, row, row.kept.kinds[scalar], kind)
                # Reading would wait for a GPU. Fused classes on a GPU only count steps.
                is_known = not (isinstance(value, torch.Tensor) and value.is_cuda)
                if is_known and float(value) != advanced[row.name][scalar]:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} keeps a number {scalar!r} of "
                        f"{row.name!r} that depends on more than steps and hyperparameters, so it "
                        "cannot be in pages"
                    )
            self._keep_states(row, state)
        for master, copy in copies:
            master.copy_(copy)
        for whole, parts in apart:
            torch.unbind_copy(whole, out=parts)

    def _keep_states(self, row: _Row, state: Mapping[str, Any]) -> None:
        """Copy the tensors of a state to the page, except views of the page.

        The step has created or replaced them, or they are copies of states in the page.
        """
        for key, kind in row.kept.empty.items():
            if empty_kind(state[key]) != kind:
                raise self._changed(key, row, EMPTY[kind], _described(state[key]))
        replaced = []
        for key, view in row.states.items():
            value, target = state[key], row.in_page.get(key, view)
            if value is target:
                continue
            if (now := _described(value)) != (before := _described(view)):
                raise self._changed(key, row, before, now)
            # A class may exchange two tensors. Each must then be written over the other.
            overlaps = value is not view and _storage(value) in map(_storage, row.states.values())
            replaced.append((target, value.clone() if overlaps else value))
        for target, value in replaced:
            assign(target, value)

    def _changed(self, key: str, row: _Row, before: Any, now: Any) -> ValueError:
        return ValueError(
            f"{type(self._optimizer).__name__} changes {key!r} of {row.name!r} from {before} to "
            f"{now}: pages are laid out before"
        )

    def _step(self, rows: Sequence[_Row]) -> list[dict[str, Any]]:
        """Step tensors as the parameters of the group; return the state of each afterwards."""
        optimizer = self._optimizer
        params = []
        for row in rows:
            params.append(row.master.detach())  # The detached tensor has its own gradient.
            # A separate tensor: a class may change its sizes.
            params[-1].grad = row.grad.detach().to(row.master.dtype)
        optimizer.state = defaultdict(dict)
        first = [p for p, row in zip(params, rows, strict=True) if not _is_stepped(row.scalars)]
        if first:  # Classes create states in the constructor, or at the first step.
            optimizer.state.update(self._make([{**self._before, "params": first}]).state)
        for param, row in zip(params, rows, strict=True):
            if _is_stepped(row.scalars):
                device = param.device if self._before.get("fused") else "cpu"
                numbers = {
                    name: torch.tensor(row.scalars[name], dtype=kind, device=device)  # ()
                    if isinstance(kind, torch.dtype)
                    else kind(row.scalars[name])
                    for name, kind in row.kept.kinds.items()
                }
                optimizer.state[param] = state_of({**numbers, **row.states}, row.kept.empty)
        optimizer.param_groups = [{**self._before, "params": params}]
        try:
            step_of(optimizer)
            found = [parts_of(optimizer.state[param]) for param in params]
            after = group_values(optimizer.param_groups[0])
        finally:  # Do not keep views and gradients, even after an error.
            optimizer.state, optimizer.param_groups = defaultdict(dict), []
        self._require_same(after, found, [row.kept for row in rows])
        return found

    def _require_same(
        self, after: dict[str, Any], found: Sequence[Mapping[str, Any]], kept: Sequence[Kept]
    ) -> None:
        """Check that a step changed the group like the other steps, and has the known states."""
        name = type(self._optimizer).__name__
        if self._after is self._before:
            self._after = after
        elif after != self._after:
            raise ValueError(
                f"{name} changes hyperparameters based on gradients, so it cannot be in pages"
            )
        for state, of in zip(found, kept, strict=True):
            if state.keys() != of.names:
                raise ValueError(
                    f"{name} keeps the states {sorted(state)}, but in its first steps it had "
                    f"{sorted(of.names)}: states that come later cannot be in pages"
                )

    def _kept_of(self, tensor: torch.Tensor) -> Kept:
        key = tensor.shape, tensor.dtype
        if key not in self._kept:
            self._kept[key] = self._kept_for(tensor)
        return self._kept[key]


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)}"
    return repr(value)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_created(state: AnyState, order: tuple[int, ...] | None) -> torch.Tensor:
    """Return a state of a page in one piece, in the memory order in which the class created it."""
    values = values_of(state)
    if order is None:
        return values
    of_class = torch.empty_permuted(values.shape, order, dtype=values.dtype, device=values.device)
    return of_class.copy_(values)


def _is_stepped(scalars: Scalars) -> bool:
    return scalars.get(STEPPED, scalars.get("step", 1.0)) > 0


def _contiguous(
    rows: Sequence[_Row],
) -> tuple[list[_Row], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return rows with contiguous tensors, and pairs of a master and the copy that is stepped."""
    found = [
        row._replace(master=row.master.contiguous(), grad=row.grad.contiguous()) for row in rows
    ]
    pairs = zip(rows, found, strict=True)
    return found, [(own.master, new.master) for own, new in pairs if own.master is not new.master]


def _joined(
    rows: Sequence[_Row],
) -> tuple[list[_Row], list[tuple[torch.Tensor, list[torch.Tensor]]]]:
    """Return rows with small rows of one shape stacked, and the tensors of each stack.

    Example: two rows of shape (8,) and one of (1 << 20,) become a row of (2, 8) and the large one.
    """
    found: list[_Row] = []
    small: dict[Any, list[_Row]] = {}
    for row in rows:
        if row.master.numel() < _SMALL_NUMEL:
            key = (row.master.shape, id(row.kept), *row.scalars.values())
            small.setdefault(key, []).append(row)
        else:
            found.append(row)
    apart: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for alike in small.values():
        masters = [row.master for row in alike]
        states = {name: [row.states[name] for row in alike] for name in alike[0].states}
        stacked = {name: torch.stack(tensors) for name, tensors in states.items()}
        master, grad = torch.stack(masters), torch.stack([row.grad for row in alike])
        found.append(alike[0]._replace(master=master, grad=grad, states=stacked))
        apart += [(master, masters), *((stacked[name], states[name]) for name in states)]
    return found, apart
