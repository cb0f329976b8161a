"""Runs that are resumed: with and without DistributedDataParallel, and at an expected step."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import muon
import tierstore


def _model() -> nn.Module:
    torch.manual_seed(0)  # All ranks begin with the same values.
    return nn.Linear(3, 4)


def _step(optimizer: muon.Muon, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def resume_with_ddp(directory: Path, wrapped_first: bool) -> int:
    """Do a step with DDP and a step without it, in an order; return the step at the end."""
    for wrapped in (wrapped_first, not wrapped_first):
        model = nn.parallel.DistributedDataParallel(_model()) if wrapped else _model()
        with tierstore.TierStore(directory, resume=True) as store:
            optimizer = muon.Muon(muon.param_groups(model), store=store)
            optimizer.restore()
            _step(optimizer, model)
    return store.step


def want_less_on_rank_1(directory: Path) -> tuple[str, bool]:
    """Restore a run of one step; return the error, and whether the model is as before."""
    model = _model()
    with tierstore.TierStore(directory) as store:
        _step(muon.Muon(muon.param_groups(model), store=store), model)
        store.register(random=tierstore.RandomState())
        store.commit()
    model = _model()
    with tierstore.TierStore(directory, resume=True) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        if dist.get_rank() == 0:
            store.register(random=tierstore.RandomState())
        try:
            optimizer.restore()
        except (ValueError, tierstore.PeerFailed) as error:
            raised = f"{type(error).__name__}: {error}"
        expected = _model().parameters()
        unchanged = all(map(torch.equal, model.parameters(), expected))
    return raised, unchanged
