"""Ranks of a pipeline: each stage is FSDP2 over its ranks, with a store of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import muon
import tierstore
from tests.rank_programs.fsdp import Tensors, whole
from tests.rank_programs.meshes import cpu_mesh

WIDTH = 32


class Net(nn.Module):
    """Layers one after the other; a stage has some of them, under the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH) for i in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return x


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    return muon.param_groups(model, lr=0.05, adamw_lr=0.01)


def train(directory: Path, steps: int) -> Tensors:
    """Train two stages of two ranks; publish each, and return its weights and its momentum."""
    mesh = cpu_mesh(2, 2, names=("stages", "replicas"))
    number = mesh.get_local_rank("stages")
    module = Net()
    for name in list(module.layers):
        if int(name) // 2 != number:
            del module.layers[name]
    fully_shard(module, mesh=mesh["replicas"])
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda x, target: (x - target).square().mean())
    with tierstore.TierStore(
        directory / f"run-{number}",
        page_bytes=8192,
        buffers=4,
        process_group=mesh.get_group("replicas"),
    ) as store:
        optimizer = muon.Muon(groups_of(module), store=store, ns_dtype=torch.float32)
        for step in range(1, steps + 1):
            torch.manual_seed(10 * step + mesh.get_local_rank("replicas"))
            inputs, targets = torch.randn(2, 4, WIDTH)
            if number == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets)
            optimizer.step()
            optimizer.zero_grad()
        store.checkpoint(directory / f"stage-{number}", model=module)
        found = {f"model.{name}": whole(value) for name, value in module.named_parameters()}
        for name, tensors in store.pages.read_states().items():
            found |= {f"{name}.{state}": whole(value) for state, value in tensors.items()}
    dist.barrier()
    return found
