"""Muon beside reference optimizers, over two copies of the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

import muon
import tierstore
from tests.support import training
from tests.support.adamw import AdamW


def reference_of(group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the reference for one of our param groups: torch.optim.Muon, or AdamW."""
    options = {key: value for key, value in group.items() if key != "algorithm"}
    if group["algorithm"] == "muon":
        return torch.optim.Muon([options])
    return AdamW([options])


class Pair:
    """One Muon, and for each of its groups the reference.

    Args:
        groups: which of the groups of tests/support/training.py to take, in which order.
        store: the store of our optimizer.
        lr: the learning rate of all groups; None leaves each its own.
    """

    def __init__(
        self,
        groups: Sequence[int] = (0, 1, 2, 3),
        *,
        store: tierstore.TierStore | None = None,
        lr: float | torch.Tensor | None = None,
    ) -> None:
        self.ours, self.theirs = training.make_parameters(), training.make_parameters()
        own_lr = {} if lr is None else {"lr": lr}
        mine, others = (
            # A copy, because schedulers write into a tensor lr.
            [
                {**training.make_groups(parameters)[number], **copy.deepcopy(own_lr)}
                for number in groups
            ]
            for parameters in (self.ours, self.theirs)
        )
        names = [name for group in mine for name, _ in group["params"]]
        self.ours = {name: self.ours[name] for name in names}
        self.theirs = {name: self.theirs[name] for name in names}
        self.optimizer = muon.Muon(mine, store=store)
        self.references = [reference_of(group) for group in others]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Ours and all of theirs."""
        return [self.optimizer, *self.references]

    @property
    def groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Our param groups, each beside the one of its reference."""
        theirs = [reference.param_groups[0] for reference in self.references]
        return list(zip(self.optimizer.param_groups, theirs, strict=True))

    def step(self, *steps: int) -> None:
        """Step all with the same gradients, which nobody may change."""
        for step in steps:
            training.set_gradients(self.ours, step)
            training.set_gradients(self.theirs, step)
            self.step_with_own_gradients()

    def step_with_own_gradients(self) -> None:
        """Step all with the gradients that are there."""
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in self.ours.items()}
        for optimizer in self.optimizers:
            optimizer.step()
        for name, grad in grads.items():
            now = self.ours[name].grad
            assert (now is None) == (grad is None), name
            assert now is None or grad is None or torch.equal(now, grad), name

    def assert_identical(self) -> None:
        """Parameters and states are the same bits."""
        for name, mine in self.ours.items():
            assert torch.equal(mine, self.theirs[name]), name
        for reference in self.references:
            for name, other in self.theirs.items():
                for state, expected in reference.state.get(other, {}).items():
                    actual = self.optimizer.state[self.ours[name]][state]
                    assert torch.equal(actual, expected), (state, name)


def stored(optimizer: muon.Muon) -> dict[str, Any]:
    """Copies of all that a refused call must not change."""
    return {
        "groups": [{**group, "params": list(group["params"])} for group in optimizer.param_groups],
        "parameters": [p.clone() for group in optimizer.param_groups for p in group["params"]],
        "states": optimizer.store.pages.read_states(),
        "scalars": copy.deepcopy(optimizer.store.pages.scalars),
        "step": optimizer.store.step,
    }


def assert_same(actual: Any, expected: Any) -> None:
    """Equal, tensors bit for bit."""
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_same(actual[key], expected[key])
    elif isinstance(actual, list):
        for mine, other in zip(actual, expected, strict=True):
            assert_same(mine, other)
    else:
        assert actual == expected
