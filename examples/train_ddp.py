"""Train a byte-level GPT with DDP: each rank holds the model and steps a part of it.

Parameters and gradients are float32. One rank owns each matrix: it keeps the state,
orthogonalizes, and sends the result to the other ranks::

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

Pass ``--resume`` to continue from the last committed step, on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import data_parallel
from gpt import GPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def share(model: GPT) -> nn.Module:
    """Wrap the model so that gradients are averaged over ranks."""
    return DistributedDataParallel(model)


if __name__ == "__main__":
    data_parallel.run(share, Path("runs/train-ddp"))
