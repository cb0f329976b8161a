"""A small net, its training by seeds, and a checkpoint of it, for tests of what others saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import muon
import tierstore
from tests.support.adamw import AdamW

Make = Callable[[nn.Module], list[dict[str, Any]]]


def small_net(depth: int = 2, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, bias=bias) for _ in range(depth)))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], **options: Any
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step(**options)


def stock_adamw(model: nn.Module, **options: Any) -> AdamW:
    return AdamW(list(model.named_parameters()), **{"lr": 0.01, **options})


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.named_parameters()), "algorithm": "adamw", "lr": 0.01}]


def states_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_state_dict(model, optimizer, options=options)


def save(value: dict[str, Any], path: Path) -> Path:
    dcp.save(value, checkpoint_id=path, no_dist=True)
    return path


def begun(
    checkpoint: Path, run: Path, model: nn.Module | None = None, make: Make = one_group
) -> tuple[nn.Module, muon.Muon]:
    """Begin a run from a checkpoint. The caller closes the store, unless this raises."""
    model = small_net() if model is None else model
    store = tierstore.TierStore(run, page_bytes=4096)
    try:
        optimizer = muon.Muon(make(model), store=store)
        optimizer.restore(checkpoint=checkpoint)
    except BaseException:
        store.close()
        raise
    return model, optimizer


def assert_trains_alike(
    one: nn.Module,
    optimizer: torch.optim.Optimizer,
    other: nn.Module,
    other_optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
) -> None:
    """Train both on; the weights are equal bit for bit."""
    steps = list(steps)
    train(one, optimizer, steps)
    train(other, other_optimizer, steps)
    for (name, found), expected in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(found, expected), name
