"""Runs of models with and without DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import muon
import tierstore


def resume_with_ddp(directory: Path, wrapped_first: bool) -> int:
    """Do a step with DDP and a step without it, in an order; return the step at the end."""
    for wrapped in (wrapped_first, not wrapped_first):
        torch.manual_seed(0)  # All ranks begin with the same values.
        layer = nn.Linear(3, 4)
        model = nn.parallel.DistributedDataParallel(layer) if wrapped else layer
        with tierstore.TierStore(directory, resume=True) as store:
            optimizer = muon.Muon(muon.param_groups(model), store=store)
            optimizer.restore()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    return store.step
