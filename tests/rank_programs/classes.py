"""Ranks that train with a class of ``torch.optim`` on pages."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import tierstore
from tests.support.class_training import (
    PAGES,
    STEPS,
    Reference,
    gradient,
    parameters,
    shapes_of,
    train,
)


def resumed(
    case: str, kind: str, dtype: torch.dtype, directory: Path, ends: Sequence[int] = (7, STEPS)
) -> None:
    """Train, leave and go on: the run has the bits of the class on one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for last in ends:
        own = full = parameters(dtype, shapes_of(case))
        if kind in ("fsdp", "replicated"):
            placed: list[Placement] = [Shard(0) if kind == "fsdp" else Replicate()]
            own = {
                name: nn.Parameter(distribute_tensor(p.detach(), mesh, placed)) if p.ndim else p
                for name, p in full.items()
            }
        options = {} if kind in ("fsdp", "replicated") else {"partition": kind}
        with tierstore.TierStore(directory, resume=True, **PAGES) as store:
            optimizer = train(case, own, store, last, full.values(), **options)
            if last == STEPS:
                Reference(case, dtype).require_equal(own, optimizer.state_dict()["state"])


def train_and_die(
    rank: int,
    world_size: int,
    file: Path,
    case: str,
    dtype: torch.dtype,
    directory: Path,
    last: int,
) -> None:
    """Train until a step, and die before its commit is waited for, perhaps before other ranks."""
    torch.set_num_threads(1)
    method = f"file://{file}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    store = tierstore.TierStore(directory, resume=True, **PAGES)
    train(case, parameters(dtype, shapes_of(case)), store, last, partition="by_parameter")
    os.kill(os.getpid(), signal.SIGKILL)


def measure(
    algorithm: str,
    model: nn.Module,
    directory: Path,
    store_options: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[tierstore.Stats, tierstore.Stats]:
    """Return the counters before and after the second step of a class on pages."""
    module, _, name = algorithm.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    with tierstore.TierStore(directory, **store_options) as store:
        optimizer = tierstore.Paged(model.named_parameters(), cls, store=store, **options)
        counters = []
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            store.synchronize()
            counters.append(store.stats())
    return counters[0], counters[1]


def step_whole() -> None:
    """Step a rule that sees whole parameters: each is stepped by the rank that owns it."""
    shapes = ((90, 40), (20, 30), (5, 5), (8, 40))
    own, stock = parameters(torch.float32, shapes), parameters(torch.float32, shapes)
    with tierstore.TierStore(None) as store:
        paged = tierstore.Paged(own.items(), torch.optim.Muon, store=store, lr=0.1)
        optimizer = torch.optim.Muon([*stock.values()], lr=0.1)
        for step in range(1, 6):
            for index, (mine, theirs) in enumerate(zip(own.values(), stock.values(), strict=True)):
                mine.grad, theirs.grad = (gradient(step, index, of) for of in (mine, theirs))
            paged.step()
            optimizer.step()
        for name, mine in own.items():
            assert torch.equal(mine, stock[name])


def load_parts() -> None:
    """Load states that are zeros on one rank: both ranks take them as stepped."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    gradient_ = torch.cat([torch.zeros(2, 4), torch.ones(2, 4)])
    with tierstore.TierStore(None) as store:
        shard = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        options = {"lr": 0.1, "momentum": 0.9}
        paged = tierstore.Paged([("w", shard)], _Own, store=store, elementwise=True, **options)
        for _ in range(2):
            shard.grad = distribute_tensor(gradient_, mesh, [Shard(0)])
            paged.step()
            paged.load_state_dict(paged.state_dict())
        assert store.pages.scalars["w"]["stepped"] == 1


class _Own(torch.optim.SGD):
    """Not one of the classes that are known to be elementwise."""


def make_of_shards() -> list[str]:
    """Return what Paged raises for a shard, without and with the word of the user."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    found = []
    for elementwise in (None, True):
        with tierstore.TierStore(None) as store:
            try:
                tierstore.Paged([("w", shard)], _Own, store=store, elementwise=elementwise)
            except ValueError as error:
                found.append(str(error))
            else:
                found.append("")
    return found
