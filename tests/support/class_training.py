"""Training of a class of ``torch.optim``, on pages and as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pytorch_optimizer import SOAP, Shampoo
from torch import nn
from torch.distributed.tensor import DTensor

import tierstore

CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "ASGD": (torch.optim.ASGD, {"t0": 5, "weight_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adagrad-initial": (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam-amsgrad": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "Adam-foreach": (torch.optim.Adam, {"foreach": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW-tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    "Adamax": (torch.optim.Adamax, {}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop-centered": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD-dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
}
"""Name -> class and options."""

WHOLE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1}),
    "SOAP": (SOAP, {"precondition_frequency": 3}),
    # A dimension above the largest has an empty list in the place of its factor.
    "SOAP-limited": (SOAP, {"max_precondition_dim": 40, "precondition_1d": True}),
    "Shampoo": (Shampoo, {"momentum": 0.9, "preconditioning_compute_steps": 2}),
}
"""Classes that see whole parameters and have states of other shapes."""

SHAPES = ((70, 33), (17,), (4, 5, 6), (), (1,), (0, 3))
"""The first has more than a page of 8 KiB."""
SHAPES_WHOLE = ((70, 33), (17,), (4, 5, 6), (24, 24), (1,))
STEPS = 30
PAGES: dict[str, Any] = {"page_bytes": 8192, "host_memory": "1MiB"}


# Of a parameter without steps, a checkpoint has the states that the class would create now. These
# depend on the lr, or a first step on whether there are states.
DEPEND_ON_THE_FIRST_STEP = {"ASGD", "Rprop", "SGD-dampening"}


def case_of(case: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return a case; a scheduler changes the tensors of its options."""
    return deepcopy({**CASES, **WHOLE}[case])


def shapes_of(case: str) -> Sequence[tuple[int, ...]]:
    return SHAPES_WHOLE if case in WHOLE else SHAPES


def parameters(
    dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> dict[str, nn.Parameter]:
    """Return parameters by name, the same each time."""
    random = torch.Generator().manual_seed(0)
    return {
        f"p{index}": nn.Parameter(torch.randn(shape, generator=random).to(dtype))
        for index, shape in enumerate(shapes)
    }


def gradient(step: int, index: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient; None at times, for all in step 6, and for the third before step 8."""
    if (step + index) % 5 == 0 or step == 6 or (index == 2 and step < 8):
        return None
    random = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(like.shape, generator=random).to(like.dtype)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Reference:
    """The class as it is, over float32 copies of parameters in lower precision."""

    def __init__(self, case: str, dtype: torch.dtype, last: int = STEPS) -> None:
        cls, options = case_of(case)
        self.rounded = parameters(dtype, shapes_of(case))
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in self.rounded.items()}
        self.optimizer = cls([*self.masters.values()], **options)
        self.scheduler = scheduled(self.optimizer)
        self.go_on(0, last)

    def go_on(self, first: int, last: int) -> None:
        """Do the steps after ``first``."""
        for step in range(first + 1, last + 1):
            for index, (name, own) in enumerate(self.rounded.items()):
                grad = gradient(step, index, own)
                self.masters[name].grad = None if grad is None else grad.float()
            self.optimizer.step()
            self.scheduler.step()

    def require_equal(self, found: Mapping[str, torch.Tensor], states: Mapping[Any, Any]) -> None:
        """Check parameters, and the states of a state dict."""
        for name, master in self.masters.items():
            assert torch.equal(whole(found[name]), master.detach().to(found[name].dtype)), name
        for index, own in self.optimizer.state_dict()["state"].items():
            _require_equal(states[index], own, f"of parameter {index}")


def _require_equal(found: Any, expected: Any, where: str) -> None:
    """Check a state, or a part of one."""
    if isinstance(expected, dict | list):
        assert isinstance(found, list) == isinstance(expected, list), where
        assert len(found) >= len(expected), where  # Ours may have a master.
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            _require_equal(found[key], expected[key], f"{key!r} {where}")
    elif expected is None:
        assert found is None, where
    else:
        assert torch.equal(whole(found), torch.as_tensor(expected)), where


def whole(tensor: Any) -> torch.Tensor:
    """Return all elements of a tensor, a DTensor or a number."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else torch.as_tensor(tensor)
    return found.detach()


def train(
    case: str,
    own: Mapping[str, nn.Parameter],
    store: tierstore.TierStore | None = None,
    last: int = STEPS,
    full: Iterable[torch.Tensor] | None = None,
    **options: Any,
) -> tierstore.Paged:
    """Begin or go on, up to a step.

    Args:
        case: of CASES.
        own: the parameters.
        store: with a directory; None keeps the states in memory.
        last: the step.
        full: tensors with the shape and dtype of whole parameters, if these are DTensors.
        options: of Paged.
    """
    cls, given = case_of(case)
    optimizer = tierstore.Paged(own.items(), cls, store=store, **options, **given)
    scheduler = scheduled(optimizer)
    first = 0
    if store is not None:
        store.register(scheduler=scheduler)
        first = optimizer.restore()
    shapes = [*(own.values() if full is None else full)]
    for step in range(first + 1, last + 1):
        for index, (parameter, like) in enumerate(zip(own.values(), shapes, strict=True)):
            grad = gradient(step, index, like)
            parameter.grad = grad if grad is None else as_part(grad, parameter)
        optimizer.step()
        scheduler.step()
        if store is not None:
            store.commit()
    return optimizer


def as_part(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient placed as its parameter."""
    if not isinstance(parameter, DTensor):
        return grad
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(grad, parameter.device_mesh, parameter.placements)


def train_and_die(case: str, dtype: torch.dtype, directory: Path, last: int) -> None:
    """Train on a directory until a step, and die before its commit is waited for."""
    import os
    import signal

    torch.set_num_threads(1)
    store = tierstore.TierStore(directory, resume=True, **PAGES)
    train(case, parameters(dtype, shapes_of(case)), store, last)
    os.kill(os.getpid(), signal.SIGKILL)
