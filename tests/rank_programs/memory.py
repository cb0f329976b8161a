"""Memory of ranks for matrices and parameters in flight, and the validity of pages in a window."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import muon
import tierstore
from muon.exchange import Exchange
from tests.rank_programs.meshes import cpu_mesh
from tierstore.ranks.job import ProcessGroupRanks

ROWS, COLUMNS, COUNT = 64, 32, 8


@dataclass(slots=True)
class Live:
    """Memory of tensors that exchanges allocated."""

    peak: int = 0
    rounds: int = 0
    watching: bool = True
    storages: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def look(self) -> None:
        """Update the peak with the storages that are alive now."""
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.storages.values()))


@contextmanager
def watched() -> Iterator[Live]:
    """Track the memory of rounds and gathered matrices, without computations."""
    live = Live()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            outputs = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(outputs):
                if live.watching and isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    live.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return outputs

    real_stages = Exchange.stages

    def stages(
        exchange: Exchange,
        round_: Any,
        dtype: torch.dtype,
        *,
        with_averages: bool,
        **calls: Callable[..., Any],
    ) -> Iterator[None]:
        live.rounds += 1

        def unwatched(call: Callable[..., Any], *arguments: Any) -> Any:
            live.look()
            live.watching = False
            try:
                return call(*arguments)
            finally:
                live.watching = True

        real = real_stages(
            exchange,
            round_,
            dtype,
            with_averages=with_averages,
            **{name: partial(unwatched, call) for name, call in calls.items()},
        )
        for _ in range(3):
            with Watch():
                next(real, None)
            yield

    with mock.patch.object(Exchange, "stages", stages):
        yield live


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Result of steps with limited memory for matrices."""

    peak: int
    rounds: int
    error: str | None
    unchanged: bool
    step: int
    values: list[torch.Tensor]


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(2 * COUNT)]


def groups_of(parameters: list[Any]) -> list[dict[str, Any]]:
    """One group that exchanges bfloat16 and one that exchanges float32."""
    named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    return [{"params": named[:COUNT]}, {"params": named[COUNT:], "ns_dtype": torch.float32}]


def gather(gather_memory: list[int], directory: Path) -> Gathered:
    """Do two steps of parameters cut at rows, given the ``gather_memory`` of each rank."""
    rank = dist.get_rank()
    mesh = cpu_mesh()
    parameters = [
        torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)])) for matrix in matrices()
    ]
    error = None
    before = [parameter.detach().to_local().clone() for parameter in parameters]
    with (
        tierstore.TierStore(directory, timeout=30.0) as store,
        watched() as live,
    ):
        optimizer = muon.Muon(groups_of(parameters), store=store, gather_memory=gather_memory[rank])
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        try:
            for _ in range(2):
                optimizer.step()
        except ValueError as refused:
            error = str(refused)
        step = store.step
    after = [parameter.detach().to_local() for parameter in parameters]
    return Gathered(
        peak=live.peak,
        rounds=live.rounds,
        error=error,
        unchanged=all(map(torch.equal, before, after)),
        step=step,
        values=after,
    )


def spread_peak(bytes_max: int) -> int:
    """Send 6 KiB from each rank to its replicas, ``bytes_max`` in flight; return the peak."""
    # Broadcasts end when they are waited for: gloo may keep a buffer a moment longer.
    in_flight: dict[Any, int] = {}
    peak = 0
    real_broadcast, real_wait = dist.broadcast, ProcessGroupRanks.wait

    def broadcast(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal peak
        work = real_broadcast(tensor, **options)
        in_flight[work] = tensor.nbytes
        peak = max(peak, sum(in_flight.values()))
        return work

    def wait(ranks: ProcessGroupRanks, work: dist.Work, *thread: Any) -> None:
        real_wait(ranks, work, *thread)
        in_flight.pop(work, None)  # Other collectives are also waited for.

    parameters = [torch.nn.Parameter(torch.ones(16, 16)) for _ in range(24)]
    with (
        tierstore.TierStore(None, timeout=30.0) as store,
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(ProcessGroupRanks, "wait", wait),
        mock.patch("tierstore.paging.replication._BYTES_MAX", bytes_max),
    ):
        optimizer = muon.Muon(parameters, store=store)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.eye(16)
            optimizer.step()
    assert all(torch.equal(parameter, parameters[0]) for parameter in parameters)
    assert not in_flight
    return peak


def step_late(directory: Path, present: set[int]) -> list[float]:
    """Step pages as late as a window of three allows; some parameters have no gradient."""
    parameters = [torch.nn.Parameter(torch.ones(9, 7, dtype=torch.bfloat16)) for _ in range(9)]
    groups = [
        tierstore.pages.PagedGroup(
            parameters=[tierstore.pages.PagedParameter(name=f"p{index}", tensor=parameter)],
            hyperparameters={},
        )
        for index, parameter in enumerate(parameters)
    ]

    def step(page: tierstore.pages.PageView) -> None:
        for chunk in itertools.chain.from_iterable(shard.chunks for shard in page.shards):
            chunk.master.add_(1)

    with tierstore.TierStore(directory, buffers=5, timeout=30.0) as store:
        store.pages.attach(groups)
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.ones_like(parameter) if index in present else None
        assert store.pages.window_max == 3
        with store.pages.sweep(window=3) as pages:
            waiting: list[tierstore.pages.PageView] = []
            for number, page in enumerate(pages):
                waiting.append(page)
                while len(waiting) == 3 or (waiting and number + 1 == pages.count):
                    step(waiting.pop(0))
    return [float(parameter.detach().float().mean()) for parameter in parameters]
