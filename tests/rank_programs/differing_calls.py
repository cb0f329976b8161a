"""Calls that differ between ranks, and ranks that differ in other ways."""

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
from tests.support.adamw import AdamW
from tests.support.attempts import attempt

NAMES = ("first", "second", "third", "fourth")


def _open(
    directory: Path | None = None, **options: Any
) -> tuple[tierstore.TierStore, muon.Muon, dict[str, nn.Parameter]]:
    parameters = {name: nn.Parameter(torch.ones(6, 4)) for name in NAMES}
    dist.barrier()  # Else a short timeout could end before a rank of a busy machine comes.
    store = tierstore.TierStore(directory, **{"timeout": 30.0, **options})
    return store, muon.Muon(list(parameters.items()), store=store), parameters


def _timeout() -> float:
    """Return the seconds that this rank waits: few on rank 0, which makes a call alone."""
    return 30.0 if dist.get_rank() else 3.0


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
    store, optimizer, _ = _open(timeout=_timeout())
    with store:
        _step(optimizer)
        alone = attempt(optimizer.state_dict) if dist.get_rank() == 0 else ""
        dist.barrier()
        return alone, attempt(lambda: _step(optimizer))


def store_of_one() -> tuple[str, str]:
    """Open a store on rank 0 while rank 1 steps another, then step together: what each raises."""
    store, optimizer, _ = _open()
    with store:
        _step(optimizer)

        def differ() -> None:
            if dist.get_rank():
                _step(optimizer)
            else:  # Rank 1 looks for absent ranks after 1.25 s and after 2.5 s.
                tierstore.TierStore(None, timeout=3.0).close()

        first = attempt(differ)
        dist.barrier()
        return first, attempt(lambda: _step(optimizer))


def state_dict_of_own_parts() -> str:
    """Ask on rank 0 alone for a state dict. Each rank has its own part of it."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    parameter = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    with tierstore.TierStore(None, timeout=30.0) as store:
        group = {"params": [("first", parameter)], "algorithm": "adamw"}
        optimizer = muon.Muon([group], store=store)
        _step(optimizer)
        raised = attempt(optimizer.state_dict) if dist.get_rank() == 0 else ""
        dist.barrier()
    return raised


def state_dict_before_a_step() -> list[str]:
    """Ask on rank 0 alone for the state dict of new parameters, then step together."""
    store, optimizer, _ = _open(timeout=_timeout())
    with store:
        alone = attempt(optimizer.state_dict) if dist.get_rank() == 0 else ""
        dist.barrier()
        return [alone, attempt(lambda: _step(optimizer))]


def _train(directory: Path, differ: Callable[[Any, Any], None]) -> tuple[int, list[nn.Parameter]]:
    """Do three steps, and something before the last; return the step and the parameters."""
    store, optimizer, parameters = _open(directory)
    with store:
        _step(optimizer)
        store.commit()
        _step(optimizer)
        differ(store, optimizer)
        _step(optimizer)
        store.synchronize()
        return store.committed.step, list(parameters.values())


def other_call(directory: Path, name: str) -> list[Any]:
    """Make a call on rank 0 while rank 1 steps, then go on.

    Returns:
        The error of the call, and the error of a commit that all ranks then make; the committed
        step; whether the parameters equal a training without the call.
    """
    raised = []

    def differ(store: tierstore.TierStore, optimizer: muon.Muon) -> None:
        state_dict, states = optimizer.state_dict(), store.pages.read_states()
        new = {"params": [("new", nn.Parameter(torch.ones(6, 4)))], "ns_dtype": "auto"}
        calls: dict[str, Callable[[], Any]] = {
            "state_dict()": optimizer.state_dict,
            "load_state_dict()": lambda: optimizer.load_state_dict(state_dict),
            "read_states()": store.pages.read_states,
            "write_states()": lambda: store.pages.write_states(states),
            "move()": lambda: store.move("host"),
            "commit()": store.commit,
            "synchronize()": store.synchronize,
            "checkpoint()": lambda: store.checkpoint(directory / "checkpoint"),
            "restore()": optimizer.restore,
            "restore(rewind=True)": lambda: optimizer.restore(directory / "other", rewind=True),
            "add_param_group()": lambda: optimizer.add_param_group(new),
        }
        call = calls[name] if dist.get_rank() == 0 else optimizer.step
        raised.append(attempt(call))
        raised.append(attempt(store.commit))
        assert not (directory / "checkpoint").exists()

    step, found = _train(directory / "run", differ)
    _, expected = _train(directory / "without", lambda *_: None)
    return [*raised, step, all(map(torch.equal, found, expected))]


def open_again() -> list[str]:
    """Open a store on rank 0 alone, then on all ranks: what each raises."""
    alone = ""
    if dist.get_rank() == 0:
        alone = attempt(lambda: tierstore.TierStore(None, timeout=1.0))
    dist.barrier()

    def train() -> None:
        store, optimizer, _ = _open()
        with store:
            _step(optimizer)

    return [alone, attempt(train)]


def states_of_own_parts() -> list[bool]:
    """Compare states that each rank reads alone with a training of this rank alone."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world_size)))
    whole = torch.arange(24.0).reshape(6, 4)
    parameter = nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(0)]))
    reference = nn.Parameter(whole.clone())
    stock = AdamW([reference])
    with tierstore.TierStore(None, timeout=30.0) as store:
        group = {"params": [("first", parameter)], "algorithm": "adamw"}
        optimizer = muon.Muon([group], store=store)
        gradient = torch.linspace(-1, 1, 24).reshape(6, 4)
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        reference.grad = gradient
        optimizer.step()
        stock.step()
        expected = stock.state[reference]["exp_avg"].chunk(world_size)[rank]
        same = []
        for reading in range(world_size):
            if rank == reading:
                states: Any = (
                    optimizer.state[parameter],
                    store.pages.read_states(["first"])["first"],
                )
                same = [torch.equal(found["exp_avg"].to_local(), expected) for found in states]
            dist.barrier()
    return same
