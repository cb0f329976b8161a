"""Train a byte-level GPT with FSDP2: ranks share parameters, gradients and optimizer state.

Parameters are bfloat16, their masters are float32 in the pages of each rank, and gradients
are reduced in float32::

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py

Pass ``--resume`` to continue from the last committed step, on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import data_parallel
import torch
import torch.distributed as dist
from gpt import GPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def share(model: GPT) -> nn.Module:
    """Shard the parameters at rows; each block is gathered when it computes."""
    model.bfloat16()
    mesh = init_device_mesh(model.embedding.weight.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        # float32 is faster on a processor without instructions for bfloat16.
        param_dtype=model.dtype,
        reduce_dtype=torch.float32,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


if __name__ == "__main__":
    data_parallel.run(share, Path("runs/train-fsdp2"))
