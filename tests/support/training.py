"""A model made of awkward parameters, and gradients that depend on the step alone.

Gradients are injected instead of computed, so that a test decides which parameters have
one, and so that two runs that should be equal get equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import muon
import tierstore

# name -> (shape, param group). Groups 0, 2 and 4 are Muon's, 1 and 3 AdamW's.
Shapes = Mapping[str, tuple[tuple[int, ...], int]]
SHAPES: Shapes = {
    "wide": ((17, 61), 0),
    "tall": ((61, 17), 0),
    "square": ((32, 32), 0),
    "row": ((1, 37), 0),
    "column": ((37, 1), 0),
    "embedding": ((203, 19), 1),
    "bias": ((19,), 1),
    "scalar": ((), 1),
    "one": ((1,), 1),
    "slow": ((24, 40), 2),
    "cube": ((3, 5, 7), 3),
    "rarely": ((29,), 3),
    "empty": ((0, 4), 3),
}

GROUP_OPTIONS: list[dict[str, Any]] = [
    {"algorithm": "muon", "lr": 0.02, "momentum": 0.9},
    {"algorithm": "adamw", "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
    {
        "algorithm": "muon",
        "lr": 0.005,
        "weight_decay": 0.0,
        "nesterov": False,
        "adjust_lr_fn": "match_rms_adamw",
    },
    {"algorithm": "adamw", "lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0},
    {"algorithm": "muon", "lr": 0.01},
]

# The groups after those, of parameters that hold several matrices.
MATRICES_OPTIONS: list[dict[str, Any]] = [
    {"algorithm": "muon", "lr": 0.02, "matrices": (("stack",),)},
    {"algorithm": "muon", "matrices": (("split", 0, (16, 8, 8)), ("blocks", 0, 4))},
    {"algorithm": "muon", "matrices": (("interleaved", 0, 2),)},
    {"algorithm": "muon", "matrices": (("flatten",),)},
    {"algorithm": "muon", "block_grid": (2, 2), "block_period": 3, "block_lr_ratio": 0.5},
    {"algorithm": "muon", "lr": 0.02, "normuon_beta": 0.9},
    {"algorithm": "muon", "lr": 0.02, "normuon_beta": 0.9, "matrices": (("stack",),)},
]


def make_parameters(
    dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, (shape, _) in SHAPES.items()
    }


def make_groups(
    parameters: Mapping[str, torch.Tensor], shapes: Shapes = SHAPES
) -> list[dict[str, Any]]:
    """Return the groups that any of these parameters is in."""
    all_options = [*GROUP_OPTIONS, *MATRICES_OPTIONS]
    return [group for group in _groups(parameters, shapes, all_options) if group["params"]]


def make_all_groups(parameters: Mapping[str, torch.Tensor], shapes: Shapes) -> list[dict[str, Any]]:
    """Return the groups of GROUP_OPTIONS. Some may be empty."""
    return _groups(parameters, shapes, GROUP_OPTIONS)


def _groups(
    parameters: Mapping[str, torch.Tensor], shapes: Shapes, all_options: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {"params": [(n, parameters[n]) for n in shapes if shapes[n][1] == number], **options}
        for number, options in enumerate(all_options)
    ]


def has_gradient(name: str, step: int) -> bool:
    """ "rarely" has a gradient at every third step, "slow" (a whole page) at most steps."""
    return not (name == "rarely" and step % 3) and not (name == "slow" and step % 4 == 2)


def set_gradients(parameters: dict[str, torch.nn.Parameter], step: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for name, parameter in parameters.items():
        grad = torch.randn(parameter.shape, generator=generator) * math.sqrt(step)
        parameter.grad = grad.to(parameter.dtype) if has_gradient(name, step) else None


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 7)


def train(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    steps: range,
    *,
    scheduler: Any = None,
    after_step: Callable[[int], None] = lambda step: None,
    seed: int = 0,
) -> None:
    """Steps are numbered from 1."""
    for step in steps:
        set_gradients(parameters, step, seed)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        after_step(step)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def snapshot(
    optimizer: muon.Muon, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Copies of every parameter and every state, by name."""
    result = {f"parameter {name}": p.detach().clone() for name, p in parameters.items()}
    for name, states in optimizer.store.pages.read_states().items():
        result |= {f"{state} of {name}": tensor for state, tensor in states.items()}
    for name, scalars in optimizer.store.pages.scalars.items():
        result |= {f"{key} of {name}": torch.tensor(value) for key, value in scalars.items()}
    return result


def assert_identical(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def resident_run(
    steps: int, dtype: torch.dtype = torch.float32, *, page_bytes: int | str = "256MiB"
) -> dict[str, torch.Tensor]:
    """Run the same training with everything in memory: the reference of many tests."""
    parameters = make_parameters(dtype)
    store = tierstore.TierStore(None, page_bytes=page_bytes)
    optimizer = muon.Muon(make_groups(parameters), store=store)
    train(optimizer, parameters, range(1, steps + 1), scheduler=make_scheduler(optimizer))
    return snapshot(optimizer, parameters)
