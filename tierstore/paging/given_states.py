"""State tensors that callers hold, and whether a caller changed one of them in place."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping

import torch

from tierstore.layout.dtensors import version_of

States = Mapping[str, Mapping[str, torch.Tensor]]


class GivenStates:
    """The state tensors that were given out since the states last changed.

    Tensors that show the current state are kept here until then. A change in place is therefore
    found even if the caller dropped the tensor. Tensors of the caller are referred to weakly.
    """

    def __init__(self) -> None:
        self._shown: dict[str, dict[str, torch.Tensor]] = {}
        # Versions of shown copies and mappings. Other shown tensors are views: a change of a view
        # is a change of the state.
        self._versions: dict[tuple[str, str], int] = {}
        self._owned: dict[tuple[str, str], tuple[weakref.ref[torch.Tensor], int]] = {}
        self.was_refused = False
        """True if require_unchanged() has raised an error."""

    def show(self, name: str, states: Mapping[str, torch.Tensor], *, views: bool) -> None:
        """Keep the tensors that show the current states of a parameter.

        Args:
            name: the parameter.
            states: state name -> tensor.
            views: whether the tensors are views of the memory of the page.
        """
        self._shown.setdefault(name, {}).update(states)
        for state, tensor in states.items():
            if tensor.numel() and not views:
                self._versions[name, state] = version_of(tensor)

    def shown(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the tensors that show the states of a parameter; None if there are none."""
        return self._shown.get(name)

    def give(self, values: States) -> None:
        """Note tensors of the caller that have the values of the current states."""
        for name, states in values.items():
            for state, tensor in states.items():
                self._owned[name, state] = weakref.ref(tensor), version_of(tensor)

    def is_current(self, name: str, state: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was given out as the current state, and not changed since."""
        if self._shown.get(name, {}).get(state) is tensor:
            return not self._is_changed(name, state)
        reference, version = self._owned.get((name, state), (None, 0))
        return reference is not None and reference() is tensor and version_of(tensor) == version

    def changed(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield parameter name, state name and tensor of each shown copy that was changed."""
        for name, state in self._versions:
            if self._is_changed(name, state):
                yield name, state, self._shown[name][state]

    def require_unchanged(self) -> None:
        """Refuse in-place changes that are in no page.

        Raises:
            ValueError: names the first state that was changed.
        """
        for name, state, _ in self.changed():
            self.was_refused = True
            raise ValueError(
                f"state {state!r} of parameter {name!r} was changed in place, but its page was "
                f"not: assign the tensor, optimizer.state[parameter][{state!r}] = tensor, or pass "
                "it to write_states()"
            )

    def forget(self, names: Collection[str] | None = None) -> None:
        """Forget the tensors of some parameters, or of all, because the states change now."""
        self._owned.clear()
        for name in list(self._shown) if names is None else names:
            self._hide(name)

    def forget_changed(self, names: Collection[str]) -> None:
        """Forget in-place changes to the states of some parameters."""
        for name in {name for name, _, _ in self.changed()}.intersection(names):
            self._hide(name)

    def _hide(self, name: str) -> None:
        for state in self._shown.pop(name, {}):
            self._versions.pop((name, state), None)

    def _is_changed(self, name: str, state: str) -> bool:
        version = self._versions.get((name, state))
        return version is not None and version_of(self._shown[name][state]) != version
