"""Train a byte-level GPT with DDP: each rank has the model, and steps its part of it.

Parameters and gradients are float32. A matrix is orthogonalized on one rank, which keeps its
state and sends the result to the others::

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

Start it again with ``--resume`` to go on from the last committed step, on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import data_parallel
from gpt import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def share(model: GPT) -> nn.Module:
    """Have gradients averaged over the ranks."""
    return DistributedDataParallel(model)


if __name__ == "__main__":
    data_parallel.run(share, Path("runs/train-ddp"))
