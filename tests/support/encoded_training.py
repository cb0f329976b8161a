"""A bfloat16 model whose gradients depend on its parameters, so that every bit of them matters."""

from __future__ import annotations

from typing import Any

import torch

import muon

# Rows of more than one block of columns, of one block, and short ones.
SHAPES = {
    "tall": (48, 20),
    "wide": (20, 560),
    "embedding": (64, 300),
    "bias": (130,),
    "scale": (),
}
ADAMW = ("embedding", "bias", "scale")


def parameters_of(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype))
        for name, shape in SHAPES.items()
    }


def gradient(name: str, step: int, value: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
    noise = torch.randn(SHAPES[name], generator=generator)
    return (noise + value.detach().float()).bfloat16()


def groups_of(parameters: dict[str, torch.nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    matrices = [(name, parameters[name]) for name in SHAPES if name not in ADAMW]
    others = [(name, parameters[name]) for name in ADAMW]
    return [
        {"params": matrices, "lr": 0.02, **options},
        {"params": others, "algorithm": "adamw", "lr": 1e-3, **options},
    ]


def train(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, step, parameter).to(parameter.dtype)
        optimizer.step()


def step_in_place(
    parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Do a step that changes no parameter by itself."""
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def bytes_of_second_step(optimizer: muon.Muon, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return the bytes that the second step reads and writes."""
    moved = []
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.store.synchronize()
        stats = optimizer.store.stats()
        moved.append((stats.bytes_read, stats.bytes_written))
    (read, written), (read_by_then, written_by_then) = moved
    return read_by_then - read, written_by_then - written
