"""A small model whose gradients ranks compute themselves, each from its part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import muon
import tierstore
from tests.rank_programs.meshes import cpu_mesh

STEPS = 6
BATCH = 24
LR = 0.02


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 17, bias=False), nn.Tanh(), nn.Linear(17, 5)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 12, generator=generator)
    return inputs, torch.sin(inputs[:, :5] * inputs[:, 5:10])


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Newton-Schulz in float32: bfloat16 would make much of the last bits of gradients."""
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    return [
        {"params": [each for each in named if each[1].ndim == 2], "lr": LR},
        {"params": [each for each in named if each[1].ndim != 2], "algorithm": "adamw"},
    ]


def train(
    model: nn.Module, store: tierstore.TierStore | None, part: int, parts: int, **options: Any
) -> None:
    """Train with one of some equal parts of each batch."""
    optimizer = muon.Muon(groups_of(model), store=store, ns_dtype=torch.float32, **options)
    for step in range(STEPS):
        inputs, targets = (each.chunk(parts)[part] for each in batch(step))
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def _mesh(*names: str) -> DeviceMesh:
    shape = (2, 2) if len(names) == 2 else (dist.get_world_size(),)
    return cpu_mesh(*shape, names=names)


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _fsdp_and_tp(model: nn.Module) -> nn.Module:
    mesh = _mesh("dp", "tp")
    return _fsdp(_tensor_parallel(model, mesh["tp"]), mesh["dp"])


def _experts(model: nn.Module) -> nn.Module:
    """The second layer lies on a mesh of its own."""
    everyone = _mesh("all")
    fully_shard(model[2], mesh=_mesh("dp", "ep"))  # type: ignore[index]
    fully_shard(model, mesh=everyone)
    return model


# Name -> what wraps the model, and in how many parts a batch is cut.
WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], int]] = {
    "ddp": (DistributedDataParallel, 4),
    "fsdp": (lambda model: _fsdp(model, _mesh("dp")), 4),
    "hsdp": (lambda model: _fsdp(model, _mesh("replicas", "dp")), 4),
    "tp": (lambda model: _tensor_parallel(model, _mesh("tp")), 1),
    "fsdp and tp": (_fsdp_and_tp, 2),
    "experts": (_experts, 4),
}


def work(kind: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train on four ranks; return the whole parameters."""
    wrap, parts = WRAPPED[kind]
    model = wrap(make_model())
    # Ranks of one part come after each other: tensor parallelism is the last dimension.
    part = dist.get_rank() * parts // dist.get_world_size()
    with tierstore.TierStore(None, page_bytes=4096, timeout=30.0) as store:
        train(model, store, part, parts, **options)
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
