"""Calls that differ between ranks, for the tests of known failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import muon
import tierstore

# What raises this today waits so long first.
PEER_TIMEOUT_S = 3.0

NAMES = ("first", "second", "third", "fourth")


def _attempt(call: Callable[[], Any]) -> str:
    """Return class and text of what a call raises; "" for nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _open(
    directory: Path | None = None, **options: Any
) -> tuple[tierstore.TierStore, muon.Muon, dict[str, nn.Parameter]]:
    parameters = {name: nn.Parameter(torch.ones(6, 4)) for name in NAMES}
    store = tierstore.TierStore(directory, **{"peer_timeout": 30.0, **options})
    return store, muon.Muon(list(parameters.items()), store=store), parameters


def _step(optimizer: muon.Muon) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def leave_run(directory: Path) -> None:
    store, optimizer, _ = _open(directory)
    with store:
        _step(optimizer)


def state_dict_of_one() -> tuple[str, str]:
    """Ask on rank 0 alone for the state dict, then step together: what each raises."""
    store, optimizer, _ = _open(roll_call_timeout=PEER_TIMEOUT_S)
    with store:
        _step(optimizer)
        alone = _attempt(optimizer.state_dict) if dist.get_rank() == 0 else ""
        dist.barrier()
        return alone, _attempt(lambda: _step(optimizer))


def store_of_one() -> tuple[str, str]:
    """Open a store on rank 0 while rank 1 steps another, then step together: what each raises."""
    store, optimizer, _ = _open(peer_timeout=PEER_TIMEOUT_S)
    with store:
        _step(optimizer)

        def differ() -> None:
            if dist.get_rank():
                _step(optimizer)
            else:
                tierstore.TierStore(None, peer_timeout=PEER_TIMEOUT_S).close()

        first = _attempt(differ)
        dist.barrier()
        return first, _attempt(lambda: _step(optimizer))


def state_dict_of_own_parts() -> str:
    """Ask on rank 0 alone for a state dict, of which each rank has its own part."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    parameter = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    with tierstore.TierStore(None, peer_timeout=PEER_TIMEOUT_S) as store:
        group = {"params": [("first", parameter)], "algorithm": "adamw"}
        optimizer = muon.Muon([group], store=store)
        _step(optimizer)
        raised = _attempt(optimizer.state_dict) if dist.get_rank() == 0 else ""
        dist.barrier()
    return raised
