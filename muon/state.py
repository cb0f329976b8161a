"""``optimizer.state`` as a mapping that reads from the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch

import tierstore


class PagedOptimizer(Protocol):
    """The part of ``muon.Muon`` that its state needs."""

    store: tierstore.TierStore
    param_groups: list[dict[str, Any]]

    def _attach_groups(self) -> None:
        """Attach the groups that the store does not have yet."""

    def _paged_group(self, number: int) -> tierstore.PagedGroup:
        """Return a group as the store has it, or would have it now."""

    def _scalar_states(self, number: int, name: str) -> dict[str, torch.Tensor]:
        """Return the states of a parameter that are not paged."""


class PagedState(Mapping[torch.Tensor, Mapping[str, torch.Tensor]]):
    """``optimizer.state``, with an entry for every parameter also before the first step."""

    def __init__(self, optimizer: PagedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        for number, group in enumerate(self._optimizer.param_groups):
            for index, candidate in enumerate(group["params"]):
                if candidate is parameter:
                    return _ParameterState(self._optimizer, number, index)
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(group["params"] for group in self._optimizer.param_groups)

    def __len__(self) -> int:
        return sum(len(group["params"]) for group in self._optimizer.param_groups)


class _ParameterState(Mapping[str, torch.Tensor]):
    """The states of one parameter: names are known, values are read from pages on access.

    On several ranks reading raises RuntimeError, because one rank alone cannot read a state.
    """

    def __init__(self, optimizer: PagedOptimizer, number: int, index: int) -> None:
        self._optimizer = optimizer
        self._paged = optimizer._paged_group(number).parameters[index]
        self._scalars = optimizer._scalar_states(number, self._paged.name)
        spec = self._paged.spec  # A float32 parameter has no separate master.
        states = spec.states if spec.owns_master else spec.all_states
        self._names = [name for name, _ in states]

    def __getitem__(self, state: str) -> torch.Tensor:
        if state in self._scalars:
            return self._scalars[state]
        if state not in self._names:
            raise KeyError(state)
        if self._optimizer.store.ranks is not None:
            raise RuntimeError(
                f"{state!r} of parameter {self._paged.name!r} may lie on other ranks: call "
                "state_dict(), or store.read_states(), on all ranks together"
            )
        self._optimizer._attach_groups()
        return self._optimizer.store.read_states([self._paged.name])[self._paged.name][state]

    def __iter__(self) -> Iterator[str]:
        return chain(self._scalars, self._names)

    def __len__(self) -> int:
        return len(self._scalars) + len(self._names)

    def __contains__(self, state: object) -> bool:
        return state in self._scalars or state in self._names
