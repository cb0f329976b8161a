"""Ranks that scale their loss. One of them finds an overflow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import muon
import tierstore
from tests.rank_programs.fsdp import Net
from tests.rank_programs.meshes import cpu_mesh

STEPS = 16
OVERFLOWS = range(3, 13)
INIT_SCALE = 2.0**12


def train(directory: Path) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """Train a sharded model; in ten steps the gradients of the last rank overflow.

    Returns:
        The scale after each step, the number of steps that were done, and whole parameters.
    """
    model = Net()
    fully_shard(model, mesh=cpu_mesh())
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=2)
    tokens = torch.arange(5)
    scales = []
    with tierstore.TierStore(directory) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        store.register(scaler=scaler)
        for step in range(STEPS):
            scaler.scale(model(tokens)).backward()
            if step in OVERFLOWS and dist.get_rank() == dist.get_world_size() - 1:
                for parameter in model.parameters():
                    cast(DTensor, parameter.grad).to_local().fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            store.commit()
            scales.append(scaler.get_scale())
        done = store.step
    whole = {name: cast(DTensor, p).full_tensor().detach() for name, p in model.named_parameters()}
    return scales, done, whole
