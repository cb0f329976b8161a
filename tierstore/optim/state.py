"""``optimizer.state`` as a mapping over the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Protocol

import torch
from typing_extensions import override

from tierstore.layout.parameters import PagedParameter
from tierstore.layout.state_parts import given_parts, state_of, state_path
from tierstore.optim.state_dicts import check_saved
from tierstore.store import TierStore


class Optimizer(Protocol):
    """The part of ``PagedOptimizer`` that its state needs."""

    store: TierStore
    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> PagedState:
        """The states of all parameters."""

    def _attach_groups(self) -> None:
        """Attach the groups that the store does not have yet."""

    def _described(
        self, tensor: torch.Tensor
    ) -> tuple[Mapping[str, torch.dtype | type | None], PagedParameter]:
        """Return the scalars of a parameter with their kinds, and its PagedParameter."""

    def _write_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all states of some parameters."""


class PagedState(MutableMapping[Any, Any]):
    """``optimizer.state``: parameter -> its states, also before the first step.

    On one rank, assigned states are written to the pages at once, and removing a parameter resets
    its states. On several ranks both raise RuntimeError: these ranks change a state together. Keys
    that are not tensors are kept unchanged.

    A mapping with parameters is never falsy: for a falsy state, torch's state-dict helpers do a
    step to initialize the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.others: dict[Any, Any] = {}
        """The entries that do not belong to a parameter. Commits do not have them."""
        # id() of a parameter -> its position when the positions were last noted.
        self._positions: dict[int, tuple[int, int]] = {}

    @property
    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters, in order of the groups."""
        return chain.from_iterable(group["params"] for group in self._optimizer.param_groups)

    def position(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the number of the group of a parameter, and the index in the group.

        Raises:
            KeyError: no group has the tensor.
        """
        groups = self._optimizer.param_groups
        found = self._positions.get(id(tensor))
        # The user may have edited the groups since the positions were noted.
        if found is None or not _is_at(tensor, groups, *found):
            self._positions = {
                id(parameter): (number, index)
                for number, group in enumerate(groups)
                for index, parameter in enumerate(group["params"])
            }
        if id(tensor) not in self._positions:
            raise KeyError("the tensor is not a parameter of this optimizer")
        return self._positions[id(tensor)]

    @override
    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            return self.others[key]
        return ParameterState(self._optimizer, key)

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, torch.Tensor):
            self._write({key: value})
        else:
            self.others[key] = value

    @override
    def __delitem__(self, key: Any) -> None:
        if isinstance(key, torch.Tensor):
            self._write({key: {}})
        else:
            del self.others[key]

    @override
    def __iter__(self) -> Iterator[Any]:
        return chain(self.parameters, self.others)

    @override
    def __len__(self) -> int:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return count + len(self.others)

    @override
    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return it. The caller owns returned states of a parameter."""
        if not isinstance(key, torch.Tensor) or key not in self:
            return self.others.pop(key, *default)
        states = self[key].copy()
        del self[key]
        return states

    @override
    def clear(self) -> None:
        """Reset the states of all parameters, and remove all other entries."""
        self.replace({})

    def replace(self, values: Mapping[Any, Any]) -> None:
        """Take the entries of a mapping. Reset the states of parameters that it lacks.

        Raises:
            KeyError, ValueError, RuntimeError: as in the assignment of one entry. Nothing was
                changed.
        """
        given = {key: value for key, value in values.items() if isinstance(key, torch.Tensor)}
        self._write({**{parameter: {} for parameter in self.parameters}, **given})
        self.others = {key: value for key, value in values.items() if key not in given}

    def _write(self, entries: Mapping[torch.Tensor, Any]) -> None:
        """Write those states of some parameters that differ from the current states."""
        views = {key: ParameterState(self._optimizer, key) for key in entries}
        states = {
            views[key].name: views[key].complete(dict(value))
            for key, value in entries.items()
            if not (isinstance(value, ParameterState) and value.is_of(self._optimizer, key))
        }
        if states:
            require_one_rank(self._optimizer)
            self._optimizer._write_states(states)


class ParameterState:
    """The states of one parameter: names are known, values are read from pages on access.

    Has the methods of a mapping, but is not registered as one: frameworks that move tensors to a
    device rebuild mappings, and leave other objects unchanged. Reading raises RuntimeError if it
    needs other ranks, because they may not make the same call.
    """

    def __init__(self, optimizer: Optimizer, tensor: torch.Tensor) -> None:
        self._optimizer = optimizer
        self._tensor = tensor
        self._scalars, self._paged = optimizer._described(tensor)
        self.name = self._paged.name
        """Name of the parameter."""
        spec = self._paged.spec  # A float32 parameter has no separate master.
        states = spec.states if spec.owns_master else spec.all_states
        self._parts = [*self._scalars, *(name for name, _ in states)]
        tops = (str(state_path(part)[0]) for part in (*self._parts, *self._paged.empty))
        self._names = [*dict.fromkeys(tops)]

    def __getitem__(self, state: str) -> Any:
        if state not in self._names:
            raise self._unknown(state)
        return _frozen(state_of(self._show(state), self._paged.empty)[state])

    def __setitem__(self, state: str, value: Any) -> None:
        if state not in self._names:
            raise self._unknown(state)
        require_one_rank(self._optimizer, f"{state!r} of parameter {self.name!r}")
        values = {**state_of(self._show(state), self._paged.empty), state: value}
        self._optimizer._write_states({self.name: self.complete(values)})

    def __delitem__(self, state: str) -> None:
        raise TypeError(
            f"state {state!r} of parameter {self.name!r} cannot be removed alone: "
            "optimizer.state.pop(parameter) resets all states of the parameter"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, state: object) -> bool:
        return state in self._names

    def keys(self) -> list[str]:
        """Return the names of all states."""
        return list(self._names)

    def values(self) -> list[Any]:
        """Return all states."""
        return [self[state] for state in self._names]

    def items(self) -> list[tuple[str, Any]]:
        """Return the name and value of each state."""
        return [(state, self[state]) for state in self._names]

    def get(self, state: str, default: Any = None) -> Any:
        """Return a state, or ``default`` for a name that the parameter does not have."""
        return self[state] if state in self._names else default

    def setdefault(self, state: str, default: Any = None) -> Any:
        """Return a state. A parameter always has all its states."""
        return self[state]

    def pop(self, state: str, *default: Any) -> Any:
        """Return the default for a name that the parameter does not have; see __delitem__()."""
        if state in self._names:
            del self[state]
        if not default:
            raise self._unknown(state)
        return default[0]

    def update(self, values: Mapping[str, Any]) -> None:
        """Assign several states."""
        self._optimizer.state[self._tensor] = {**dict(self.items()), **dict(values)}

    def clear(self) -> None:
        """Reset the states of the parameter."""
        del self._optimizer.state[self._tensor]

    def copy(self) -> dict[str, Any]:
        """Return all states, as tensors that the caller owns."""
        shown = self._show()
        owned = self._optimizer.store.pages.read_states([self.name])[self.name]
        parts = {part: _copied(owned.get(part, shown[part])) for part in self._parts}
        return state_of(parts, self._paged.empty)

    def __repr__(self) -> str:
        return f"<states of parameter {self.name!r}: {', '.join(self._names)}>"

    def is_of(self, optimizer: Optimizer, tensor: torch.Tensor) -> bool:
        """Return whether these are the states of a parameter of an optimizer."""
        return self._optimizer is optimizer and self._tensor is tensor

    def complete(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check states to write; return them. Current states are replaced by the shown tensors.

        Args:
            values: all states of the parameter, or none.

        Raises:
            KeyError: the parameter does not have a state of that name.
            ValueError: a state is missing, or of another type.
        """
        for state in values:
            if state not in self._names:
                raise self._unknown(state)
        if not values:
            return values
        require_one_rank(self._optimizer, f"a state of parameter {self.name!r}")
        parts = given_parts(_thawed(values))
        check_saved(parts, self._paged, self._scalars)
        shown = self._show()
        return {
            # Copy it: the value may be a view of memory that is written earlier.
            part: shown[part] if _same(value, shown[part]) else _copied(value)
            for part, value in parts.items()
        }

    def _show(self, state: str | None = None) -> dict[str, Any]:
        described = "a state" if state is None else repr(state)
        if self._optimizer.store.pages.needs_other_ranks([self.name]):
            require_one_rank(self._optimizer, f"{described} of parameter {self.name!r}")
        self._optimizer._attach_groups()
        shown = self._optimizer.store.pages.show_states(self.name)
        # float32 tensors, which a caller may change in place, or numbers of the class.
        kinds = {name: kind for name, kind in self._scalars.items() if isinstance(kind, type)}
        numbers = self._optimizer.store.pages.scalars.get(self.name, {})
        exact = {name: kind(numbers[name]) for name, kind in kinds.items() if name in numbers}
        return {name: value for name, value in {**shown, **exact}.items() if name in self._parts}

    def _unknown(self, state: object) -> KeyError:
        known = ", ".join(map(repr, self._names))
        return KeyError(
            f"parameter {self.name!r} has no state {state!r}, only {known}: keep other values in "
            "optimizer.state under your own key"
        )


def require_one_rank(optimizer: Optimizer, state: str = "a state") -> None:
    """Check that the job has one rank: with several, all ranks must call to use a state.

    Args:
        optimizer: the optimizer.
        state: text for the state that would be read or changed.

    Raises:
        RuntimeError: the job has several ranks.
    """
    if optimizer.store.pages.ranks is not None:
        raise RuntimeError(
            f"{state} may be on other ranks: to read it, call state_dict(), or "
            "store.pages.read_states(), on all ranks together; to change it, load_state_dict(), "
            "store.pages.write_states() or reset_state()"
        )


def _is_at(
    tensor: torch.Tensor, groups: Sequence[Mapping[str, Any]], number: int, index: int
) -> bool:
    if number >= len(groups) or index >= len(groups[number]["params"]):
        return False
    return groups[number]["params"][index] is tensor


def _frozen(value: Any) -> Any:
    """Return an immutable form of a part of a state, so that edits raise an error."""
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(part) for key, part in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thawed(part) for key, part in value.items()}
    return list(map(_thawed, value)) if isinstance(value, list | tuple) else value


def _same(value: Any, shown: Any) -> bool:
    """Return whether a value is the tensor that shows a state, or its copy on another device."""
    if value is shown:
        return True
    is_tensor = isinstance(value, torch.Tensor) and isinstance(shown, torch.Tensor)
    if not is_tensor or value.dtype != shown.dtype:
        return False
    if value.device == shown.device or value.shape != shown.shape:
        return False
    return torch.equal(value.to(shown.device), shown)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
