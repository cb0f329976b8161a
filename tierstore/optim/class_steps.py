"""Steps of a class of ``torch.optim`` with views of a page in place of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tierstore.layout.parameters import STEPPED, master_dtype
from tierstore.optim.classes import Kept, step_of, values_of
from tierstore.paging.views import PageView

Scalars = Mapping[str, float]
"""Name -> value of each scalar of a parameter."""


class ClassSteps:
    """One step of one param group of a class, page after page.

    Every page sees the group as it was before the step. A step of a tensor of one element tells
    what the scalars become: a rank counts also the steps of parameters that other ranks own.

    Args:
        optimizer: of the class; its own param groups and states are not used.
        make: makes another one for a list of param groups.
        group: the param group.
        kept_for: returns what the class keeps for a parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group: Mapping[str, Any],
        kept_for: Callable[[torch.Tensor], Kept],
    ) -> None:
        self._optimizer = optimizer
        self._make = make
        self._before = values_of(group)
        self._after = self._before
        self._kept_for = kept_for
        self._kept: dict[tuple[int, torch.dtype], Kept] = {}
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
            scalars: those before the step.
        """
        key = (tensor.ndim, tensor.dtype, *scalars.values())
        if key not in self._advanced:
            kept = self._kept_of(tensor)
            one = torch.zeros((1,) * tensor.ndim, dtype=master_dtype(tensor.dtype), device="cpu")
            one.grad = torch.zeros_like(one)
            states = {name: one.to(dtype, copy=True) for name, dtype in kept.states.items()}
            [state] = self._step([one], [states], [kept], [scalars])
            found = {name: float(state[name]) for name in kept.kinds}
            self._advanced[key] = found | ({STEPPED: 1.0} if STEPPED in scalars else {})
        return self._advanced[key]

    def step_page(
        self, page: PageView, scalars: Mapping[str, Scalars], advanced: Mapping[str, Scalars]
    ) -> None:
        """Step the chunks of a page.

        Args:
            page: a page of the group.
            scalars: parameter name -> the scalars before the step.
            advanced: parameter name -> the scalars after it.

        Raises:
            ValueError: the class keeps other states than a small tensor had, or numbers that depend
                on gradients.
        """
        shards = [shard for shard in page.shards if shard.has_gradient]
        names = [shard.spec.name for shard in shards for _ in shard.chunks]
        chunks = [chunk for shard in shards for chunk in shard.chunks]
        if not chunks:
            return
        tensors = []
        for chunk in chunks:
            tensor = chunk.master.detach()
            grad = chunk.grad
            assert grad is not None
            tensor.grad = grad.to(tensor.dtype)
            tensors.append(tensor)
        kept = [self._kept_of(shard.parameter.tensor) for shard in shards for _ in shard.chunks]
        states = [chunk.states for chunk in chunks]
        found = self._step(tensors, states, kept, [scalars[name] for name in names])
        for name, state, views, of in zip(names, found, states, kept, strict=True):
            for scalar in of.kinds:
                value = state[scalar]
                # A GPU would be waited for: its fused classes count steps alone.
                is_known = not (isinstance(value, torch.Tensor) and value.is_cuda)
                if is_known and float(value) != advanced[name][scalar]:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} keeps a number {scalar!r} of "
                        f"{name!r} that depends on gradients, so it cannot be in pages"
                    )
            for key, view in views.items():
                if state[key] is not view:  # Created in this step, or replaced.
                    view.copy_(state[key])

    def _step(
        self,
        tensors: Sequence[torch.Tensor],
        states: Sequence[Mapping[str, torch.Tensor]],
        kept: Sequence[Kept],
        scalars: Sequence[Scalars],
    ) -> list[dict[str, Any]]:
        """Step tensors as the parameters of the group; return the state of each afterwards.

        Args:
            tensors: with gradients.
            states: of each tensor by name, in place; not used at its first step.
            kept: what the class keeps for each.
            scalars: of each, before the step.
        """
        optimizer = self._optimizer
        first = [index for index, of in enumerate(scalars) if not _is_stepped(of)]
        optimizer.state = defaultdict(dict)
        if first:  # Classes create states with the optimizer, or at the first step.
            params = [tensors[index] for index in first]
            optimizer.state.update(self._make([{**self._before, "params": params}]).state)
        if len(first) < len(tensors):
            device = tensors[0].device if self._before.get("fused") else torch.device("cpu")
            of_classes: dict[int, list[int]] = {}
            for index in sorted({*range(len(tensors))} - {*first}):
                of_classes.setdefault(id(kept[index]), []).append(index)
            for indices in of_classes.values():
                given: list[dict[str, Any]] = [dict(states[index]) for index in indices]
                for name, kind in kept[indices[0]].kinds.items():
                    values: Sequence[Any] = [scalars[index][name] for index in indices]
                    if isinstance(kind, torch.dtype):  # One allocation for all of them.
                        values = torch.tensor(values, dtype=kind, device=device).unbind()
                    else:
                        values = [kind(value) for value in values]
                    for state, value in zip(given, values, strict=True):
                        state[name] = value
                optimizer.state.update(zip((tensors[i] for i in indices), given, strict=True))
        optimizer.param_groups = [{**self._before, "params": [*tensors]}]
        step_of(optimizer)
        found = [optimizer.state[tensor] for tensor in tensors]
        after = values_of(optimizer.param_groups[0])
        optimizer.state, optimizer.param_groups = defaultdict(dict), []
        self._require_same(after, found, kept)
        return found

    def _require_same(
        self, after: dict[str, Any], found: Sequence[Mapping[str, Any]], kept: Sequence[Kept]
    ) -> None:
        """Check that a step left the group as the other steps did, and the states as known."""
        name = type(self._optimizer).__name__
        if self._after is self._before:
            self._after = after
        elif after != self._after:
            raise ValueError(
                f"{name} changes hyperparameters by gradients, so it cannot be in pages"
            )
        for state, of in zip(found, kept, strict=True):
            expected = len(of.states) + len(of.kinds)
            if len(state) != expected and sum(v is not None for v in state.values()) != expected:
                raise ValueError(
                    f"{name} keeps the states {sorted(state)}, and a small tensor had "
                    f"{sorted({*of.states, *of.kinds})}: states that depend on the size of a "
                    "parameter cannot be in pages"
                )

    def _kept_of(self, tensor: torch.Tensor) -> Kept:
        key = tensor.ndim, tensor.dtype
        if key not in self._kept:
            self._kept[key] = self._kept_for(tensor)
        return self._kept[key]


def _is_stepped(scalars: Scalars) -> bool:
    return scalars.get(STEPPED, scalars.get("step", 1.0)) > 0
