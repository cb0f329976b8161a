"""A checkpoint of Megatron, written by several ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from tests.rank_programs.meshes import cpu_mesh
from tests.support.megatron import Truth, write_fsdp_dtensor, write_torch_dist


def write(kind: str, root: Path, truth: Truth) -> None:
    mesh = cpu_mesh()

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    writer = write_torch_dist if kind == "torch_dist" else write_fsdp_dtensor
    writer(root, truth, place=place)
