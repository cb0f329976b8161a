"""Models that ranks do not have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import muon
import tierstore
from tests.support.kept import commit_with, unwanted


def _on_some_ranks(rank: int) -> tuple[Any, dict[str, Any]]:
    return distribute_tensor(torch.ones(6, 4), DeviceMesh("cpu", [0, 1]), [Shard(0)]), {}


def _other_values(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.full((6, 4), float(rank // 2)), {}


def _other_partition(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.ones(6, 4), {"partition": "flat" if rank == 2 else "auto"}


def _other_shape(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.ones(6, 4 + rank // 2), {}


def _other_hooks(rank: int) -> tuple[Any, dict[str, Any]]:
    return torch.ones(6, 4), {"hooks": [muon.Hyperball()] if rank == 2 else []}


def _row_without_a_column(rank: int) -> tuple[Any, dict[str, Any]]:
    tensor = distribute_tensor(torch.ones(6, 2), DeviceMesh("cpu", [0, 1, 2]), [Shard(1)])
    return tensor, {"group": {"normuon_beta": 0.9}}


def _large_for_whole_steps(rank: int) -> tuple[Any, dict[str, Any]]:
    tensor = distribute_tensor(torch.ones(6, 4), DeviceMesh("cpu", [0, 1, 2]), [Shard(0)])
    blocks = {"block_grid": (3, 1), "block_period": 100, "block_lr_ratio": 1.0}
    return tensor, {"group": blocks, "gather_memory": 64}


def _listed(*chunks: tuple[int, int]) -> Callable[[int], tuple[Any, dict[str, Any]]]:
    """Let three ranks list these rows, given as (start, count), of 6."""

    def make(rank: int) -> tuple[Any, dict[str, Any]]:
        start, count = chunks[rank]
        own = DTensor.from_local(
            torch.ones(count, 4),
            DeviceMesh("cpu", [0, 1, 2]),
            [Shard(0)],
            run_check=False,
            shape=(6, 4),
            stride=(4, 1),
        )
        parameter = torch.nn.Parameter(own)
        place = ChunkStorageMetadata(torch.Size((start, 0)), torch.Size((count, 4)))
        parameter._local_tensor.__create_chunk_list__ = lambda: [place]
        return parameter, {}

    return make


KINDS: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "on some ranks": _on_some_ranks,
    "other values": _other_values,
    "other partition": _other_partition,
    "other shape": _other_shape,
    "other hooks": _other_hooks,
    "a row without a column": _row_without_a_column,
    "large for whole steps": _large_for_whole_steps,
    "parts that overlap": _listed((0, 4), (3, 3), (6, 0)),
    "parts in another order": _listed((4, 2), (0, 4), (6, 0)),
    "parts that leave rows out": _listed((0, 3), (3, 2), (6, 0)),
}


def refusal(kind: str) -> tuple[str, str]:
    """Return class and text of what the first step raises on this rank of three."""
    tensor, options = KINDS[kind](dist.get_rank())
    parameter = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor)
    with tierstore.TierStore(None, timeout=30.0) as store:
        group = {"params": [("matrix", parameter)], **options.pop("group", {})}
        optimizer = muon.Muon([group], store=store, **options)
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
    with tierstore.TierStore(None, timeout=30.0) as store:
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


def move_where_one_has_no_room(directory: Path, host_memory: list[int]) -> tuple[str, bool]:
    """Move pages of unequal sizes to disk, with enough memory for it on one of two ranks.

    Returns:
        What was raised, and whether all goes on as without a move.
    """
    sizes = {"a": (64, 64), "b": (32, 128), "c": (64, 64)}
    found = []
    for moves in (True, False):
        named = {name: torch.nn.Parameter(torch.ones(size)) for name, size in sizes.items()}
        first = torch.nn.Parameter(torch.ones(20))
        groups = [
            {"params": [("first", first)], "algorithm": "adamw"},
            {"params": list(named.items()), "algorithm": "muon"},
        ]
        store = tierstore.TierStore(
            directory / str(moves),
            page_bytes=4096,
            host_memory=host_memory[dist.get_rank()] if moves else "1GiB",
            timeout=30.0,
        )
        with store:
            optimizer = muon.Muon(groups, store=store)
            for step in range(3):
                for parameter in (first, *named.values()):
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                if moves and step == 0:
                    with pytest.raises(tierstore.TierstoreError) as raised:
                        store.move("nvme")
        found.append([first, *named.values()])
    return str(raised.value), all(map(torch.equal, *found))


def _trained(store: tierstore.TierStore, steps: int) -> muon.Muon:
    parameter = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = muon.Muon([("matrix", parameter)], store=store)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return optimizer


def other_options(directory: Path, key: str, values: list[Any]) -> tuple[str, int]:
    """Open a run of two steps with other options on each rank; then go on with it.

    Returns:
        What was raised, and the step that is found afterwards.
    """
    with tierstore.TierStore(directory, timeout=30.0) as store:
        _trained(store, 2)
    options = {"resume": True, "timeout": 30.0, key: values[dist.get_rank()]}
    if options.get("overwrite"):
        del options["resume"]
    with pytest.raises(ValueError) as raised:
        tierstore.TierStore(directory, **options)
    with tierstore.TierStore(directory, resume=True, timeout=30.0) as store:
        return str(raised.value), _trained(store, 0).restore()


def other_commit(directory: Path, how: str) -> tuple[str, int]:
    """Do after two steps something else on one rank than on the others; then go on.

    Returns:
        What was raised, and the step that is found afterwards.
    """
    alone = dist.get_rank() == 1
    store = tierstore.TierStore(directory, commit_every=3, timeout=30.0)
    optimizer = _trained(store, 3)
    store.synchronize()
    optimizer.param_groups[0]["lr"] = 0.5 if alone and how == "lr" else 0.25
    optimizer.zero_grad()
    call = partial(commit_with, store, 1) if how == "lr" or alone else optimizer.step
    with pytest.raises((ValueError, tierstore.RollCallError)) as raised:
        call()
    with contextlib.suppress(ValueError, tierstore.TierstoreError):
        store.close()
    with tierstore.TierStore(directory, commit_every=3, resume=True, timeout=30.0) as store:
        return str(raised.value), _trained(unwanted(store), 0).restore()


def cut_over_more_ranks() -> str:
    """Step a parameter that is cut over all ranks with a store of one."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    parameter.grad = torch.ones_like(parameter)
    with tierstore.TierStore(None, process_group=group) as store:
        optimizer = muon.Muon([("matrix", parameter)], store=store)
        with pytest.raises(ValueError) as raised:
            optimizer.step()
    assert torch.equal(parameter.detach().to_local(), torch.ones_like(parameter.to_local()))
    return str(raised.value)


def begin_with_other_values(directory: Path) -> list[float]:
    """Begin from a checkpoint with what each rank drew for itself."""
    with tierstore.TierStore(directory / "run", timeout=30.0) as store:
        _trained(store, 2)
        store.checkpoint(directory / "checkpoint")
    torch.manual_seed(dist.get_rank())
    parameter = torch.nn.Parameter(torch.randn(6, 4))
    with tierstore.TierStore(directory / "new", timeout=30.0) as store:
        optimizer = muon.Muon([("matrix", parameter)], store=store)
        assert optimizer.restore(checkpoint=directory / "checkpoint") == 2
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    values: list[float] = parameter.flatten().tolist()
    return values
