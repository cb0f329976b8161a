"""A loop of torchtitan on several ranks, each with a loader of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import tierstore
from tests.support.attempts import attempt
from tests.support.titan_loop import Loop


def train(directory: Path, steps: int, fails_at: int = 0) -> list[torch.Tensor] | str:
    """Go on to a step; return the parameters, or what was raised."""
    store = tierstore.TierStore(directory, resume=True)
    loop = Loop(store, dist.get_rank())
    raised = attempt(lambda: loop.train(steps, fails_at))
    loop.checkpointer.close()
    return raised or loop.values
