"""Models that ranks do not have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import muon
import tierstore


def _on_some_ranks(rank: int) -> tuple[Any, dict[str, Any]]:
    return distribute_tensor(torch.ones(6, 4), DeviceMesh("cpu", [0, 1]), [Shard(0)]), {}


def _other_values(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.full((6, 4), float(rank // 2)), {}


def _other_partition(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.ones(6, 4), {"partition": "flat" if rank == 2 else "auto"}


def _other_shape(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.ones(6, 4 + rank // 2), {}


KINDS: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "on some ranks": _on_some_ranks,
    "other values": _other_values,
    "other partition": _other_partition,
    "other shape": _other_shape,
}


def refusal(kind: str) -> tuple[str, str]:
    """Return class and text of what the first step raises on this rank of three."""
    tensor, options = KINDS[kind](dist.get_rank())
    parameter = torch.nn.Parameter(tensor)
    with tierstore.TierStore(None, peer_timeout=30.0) as store:
        optimizer = muon.Muon([("matrix", parameter)], store=store, **options)
        parameter.grad = torch.ones_like(parameter)
        try:
            optimizer.step()
        except (ValueError, tierstore.TierstoreError) as error:
            return type(error).__name__, str(error)
    return "", ""


def other_hyperparameters(key: str, value: Any) -> tuple[list[str], torch.Tensor]:
    """Give the last of three ranks another hyperparameter, twice, and then to all.

    Returns:
        What was raised, and the parameter at the end.
    """
    parameter = torch.nn.Parameter(torch.ones(6, 4))
    raised = []
    with tierstore.TierStore(None, peer_timeout=30.0) as store:
        optimizer = muon.Muon([("matrix", parameter)], store=store)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        after_one = parameter.detach().clone()
        if dist.get_rank() == 2:
            optimizer.param_groups[0][key] = value
        for _ in range(2):
            with pytest.raises(ValueError) as caught:
                optimizer.step()
            raised.append(str(caught.value))
            assert torch.equal(parameter, after_one)
        optimizer.param_groups[0][key] = value
        optimizer.step()
    return raised, parameter.detach()
