"""Gradients that differ between ranks, and gradients that are not finite on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import muon
import tierstore
from tests.rank_programs.meshes import cpu_mesh
from tests.support.attempts import attempt
from tests.support.fake_cuda import fake_cuda
from tierstore.ranks.peers import Alone

NAMES = ("first", "second", "third")

# Layout -> placements on a mesh of 2 x 2 ranks, or None for plain tensors.
LAYOUTS: dict[str, Any] = {
    "plain": None,
    "replicated": (Replicate(), Replicate()),
    "sharded": (Shard(0), Shard(1)),
    "hsdp": (Replicate(), Shard(0)),
}


class Job:
    """Parameters of ones in some layout, and their optimizer."""

    def __init__(self, store: tierstore.TierStore, layout: str = "plain", **options: Any) -> None:
        placements = LAYOUTS[layout]
        self._mesh = None if placements is None else cpu_mesh(2, 2)
        self._placements = placements
        self.parameters = {name: nn.Parameter(self._part(torch.ones(6, 4))) for name in NAMES}
        self.store = store
        self.optimizer = muon.Muon(list(self.parameters.items()), store=store, **options)

    def _part(self, local: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return local
        return distribute_tensor(local, self._mesh, self._placements)

    def step(self, change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None) -> str:
        """Step with gradients of ones after a change of local tensors: what is raised."""
        for parameter in self.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        change({name: _local(p.grad) for name, p in self.parameters.items() if p.grad is not None})
        return attempt(self.optimizer.step)

    @property
    def values(self) -> list[torch.Tensor]:
        return [_local(each).clone() for each in self.parameters.values()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spoil_on_1(gradients: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 1 and gradients["second"].numel():
        gradients["second"][0, 0] = float("nan")


def nan_on_one(directory: Path | None, layout: str, nonfinite: str) -> tuple[str, bool, int, str]:
    """Step once, then with a NaN on rank 1, then once more.

    Returns:
        What the second step raised or warned of, whether it changed something, the steps at the
        end, and what the third one raised.
    """
    with tierstore.TierStore(directory, timeout=30.0) as store:
        job = Job(store, layout, nonfinite=nonfinite)
        assert job.step() == ""
        before = job.values
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            raised = job.step(_spoil_on_1)
        changed = not all(map(torch.equal, job.values, before))
        return raised + "".join(str(w.message) for w in warned), changed, store.step, job.step()


def nan_on_a_device(directory: Path) -> tuple[str, int]:
    """Step with a NaN on rank 1 that nobody waits for, then commit: what is raised."""
    with fake_cuda():
        store = tierstore.TierStore(directory, timeout=30.0)
        job = Job(store)
        assert job.step() == ""
        store.synchronize()
        raised = job.step(_spoil_on_1)
        if not raised:
            raised = attempt(store.synchronize)
        step = store.committed.step
        attempt(store.close)
    return raised, step


def other_options() -> str:
    with tierstore.TierStore(None, timeout=30.0) as store:
        return Job(store, nonfinite="skip" if dist.get_rank() else "raise").step()


def not_reduced(layout: str, step: int, ranks: list[int]) -> tuple[list[str], bool, str]:
    """Have gradients of other values on some ranks, at one step and at the next one.

    Args:
        layout: how the parameters are placed.
        step: the step, from 1.
        ranks: the ranks with other values.

    Returns:
        What both steps raised, whether the first one changed something, and what a step with
        gradients that are reduced then raises.
    """

    def differ(gradients: dict[str, torch.Tensor]) -> None:
        if dist.get_rank() in ranks:
            gradients["second"].mul_(2)

    with tierstore.TierStore(None, timeout=30.0) as store:
        job = Job(store, layout)
        for _ in range(1, step):
            assert job.step() == ""
        before = job.values
        raised = [job.step(differ)]
        changed = not all(map(torch.equal, job.values, before))
        raised.append(job.step(differ))
        return raised, changed, job.step()


def rounded_otherwise() -> str:
    """Have gradients that differ by the rounding of a sum."""

    def differ(gradients: dict[str, torch.Tensor]) -> None:
        gradients["second"].mul_(1 + 1e-4 * dist.get_rank())

    with tierstore.TierStore(None, timeout=30.0) as store:
        return Job(store).step(differ)


def absent_on_one() -> tuple[str, str]:
    """Have a gradient on one rank alone, and no gradient on any: what is raised and warned of."""
    with tierstore.TierStore(None, timeout=30.0) as store:
        job = Job(store)
        if dist.get_rank() == 1:
            job.parameters["second"].grad = torch.ones(6, 4)
        first = attempt(job.optimizer.step)
        job.optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            job.optimizer.step()
        return first, "".join(str(each.message) for each in warned)


def cut_elsewhere() -> tuple[str, int]:
    """Step with a gradient of other rows than the parameter: what is raised, and the steps."""
    rank = dist.get_rank()
    mesh = cpu_mesh(2)
    with tierstore.TierStore(None, timeout=30.0) as store:
        parameter = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        optimizer = muon.Muon([("matrix", parameter)], store=store)
        rows = torch.ones(4 - 2 * rank, 4)
        parameter.grad = DTensor.from_local(
            rows, mesh, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1)
        )
        return attempt(optimizer.step), store.step


def missing_on_one(layout: str, missing: str) -> tuple[str, int]:
    """Step with a gradient that rank 1 has not: what is raised, and the steps at the end."""
    with tierstore.TierStore(None, timeout=30.0) as store:
        job = Job(store, layout, missing=missing)
        for name, each in job.parameters.items():
            # Without the first parameter no rank has a gradient of it.
            absent = name == "first" or (name == "third" and dist.get_rank() == 1)
            each.grad = None if absent else torch.ones_like(each)
        return attempt(job.optimizer.step), store.step


def summed_up_elsewhere(directory: Path) -> None:
    """Step with float32 gradients beside bfloat16 shards: as with the same ones in ``.grad``."""
    mesh = cpu_mesh()
    grads = [torch.randn(7, 4, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    start = torch.randn(7, 4, generator=torch.Generator().manual_seed(9)).bfloat16()
    shards = nn.Parameter(distribute_tensor(start, mesh, (Shard(0),)))
    alone = nn.Parameter(start.clone())
    with tierstore.TierStore(directory) as store:
        optimizer = muon.Muon(
            [("weight", shards)],
            store=store,
            ns_dtype=torch.float32,
            momentum_dtype=torch.float32,
            gradient=lambda tensor: tensor.main_grad,  # type: ignore[attr-defined]
        )
        other = muon.Muon(
            [("weight", alone)],
            store=tierstore.TierStore(None, process_group=Alone()),
            ns_dtype=torch.float32,
            momentum_dtype=torch.float32,
            gradient=lambda tensor: tensor.main_grad,  # type: ignore[attr-defined]
        )
        for grad in grads:
            shards.main_grad = distribute_tensor(grad, mesh, (Shard(0),))
            alone.main_grad = grad
            optimizer.step()
            other.step()
        assert torch.equal(cast(DTensor, shards.detach()).full_tensor(), alone)
