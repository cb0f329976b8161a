"""Real ranks that tell what DTensor, FSDP2, HSDP and tensor parallelism put on each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.rank_programs.meshes import cpu_mesh
from tierstore.layout.dtensors import holding_of
from tierstore.layout.sharding import Sharding

# Odd counts, fewer than ranks, none.
ROWS = (4, 5, 1, 2, 7, 9, 13, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Part of a tensor on one rank; the elements of the tensor are their flat positions."""

    world_size: int
    case: str
    shape: tuple[int, ...]
    sharding: Sharding
    coordinate: tuple[int, ...]
    local_shape: tuple[int, ...]
    local_values: list[int]


def positions(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).to(torch.float32).reshape(shape)


Cases = Iterator[tuple[str, DTensor]]


def distributed(mesh: DeviceMesh) -> Cases:
    """DTensors, cut along each dimension or not at all."""
    for rows in ROWS:
        yield "rows", distribute_tensor(positions(rows, 3), mesh, [Shard(0)])
        yield "columns", distribute_tensor(positions(2, rows, 2), mesh, [Shard(-2)])
        yield "whole", distribute_tensor(positions(rows), mesh, [Replicate()])
    yield "scalar", distribute_tensor(positions(), mesh, [Replicate()])


def distributed_twice(mesh: DeviceMesh) -> Cases:
    """DTensors cut along each dimension of a mesh that has two."""
    for rows in ROWS:
        for placements in (
            [Shard(0), Shard(0)],
            [Shard(1), Shard(0)],
            [Shard(0), Replicate()],
            [Replicate(), Shard(1)],
            [Replicate(), Replicate()],
        ):
            yield "two dimensions", distribute_tensor(positions(rows, 3), mesh, placements)
        # Cut without sending anything: torch cannot scatter uneven strided shards.
        strided = [_StridedShard(1, split_factor=mesh.size(1)), Replicate()]
        yield "strided", distribute_tensor(positions(2, rows), mesh, strided, src_data_rank=None)


class Model(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up = nn.Linear(columns, rows)
        self.down = nn.Linear(rows, columns, bias=False)
        self.table = nn.Parameter(torch.empty(rows, 3, 2))
        for parameter in self.parameters():
            parameter.data = positions(*parameter.shape)


def parameters_of(case: str, model: nn.Module) -> Cases:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):  # Tensor parallelism alone leaves some as they are.
            yield f"{case}, {name}", parameter


def fully_sharded(mesh: DeviceMesh) -> Cases:
    """FSDP2, and HSDP on a mesh of two dimensions."""
    for rows in ROWS:
        model = Model(rows, 3)
        fully_shard(model, mesh=mesh)
        yield from parameters_of("fully_shard", model)
    columns = 2 * mesh.size(mesh.ndim - 1)
    model = Model(columns, columns)
    fully_shard(model.down, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    yield from parameters_of("fully_shard of columns", model.down)


def tensor_parallel(mesh: DeviceMesh) -> Cases:
    """Tensor parallelism, and FSDP2 over it on a mesh of two dimensions."""
    for rows in ROWS:
        model = Model(rows, 5)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if mesh.ndim > 1:
            fully_shard(model, mesh=mesh["dp"])
        yield from parameters_of("tensor parallel", model)


Program = Callable[[DeviceMesh], Cases]
# Number of ranks -> meshes, and what is placed on them.
WORLDS: dict[int, list[tuple[tuple[int, ...], list[Program]]]] = {
    2: [((2,), [distributed, fully_sharded, tensor_parallel])],
    3: [((3,), [distributed, fully_sharded, tensor_parallel])],
    4: [
        ((4,), [distributed, fully_sharded, tensor_parallel]),
        ((2, 2), [distributed_twice, fully_sharded, tensor_parallel]),
    ],
    # The fewest ranks on which it matters that FSDP2 cuts what tensor parallelism left.
    6: [((3, 2), [distributed_twice, tensor_parallel])],
}


def place() -> list[Placed]:
    """Return what this rank holds in all programs for a world of so many ranks."""
    placed = []
    for mesh_shape, programs in WORLDS[dist.get_world_size()]:
        names = ("dp", "tp")[-len(mesh_shape) :]
        mesh = cpu_mesh(*mesh_shape, names=names)
        placed += [_look(case, tensor) for program in programs for case, tensor in program(mesh)]
    return placed


def _look(case: str, tensor: DTensor) -> Placed:
    local = tensor.detach().to_local()
    world_size = dist.get_world_size()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return Placed(
        world_size=world_size,
        case=case,
        shape=tuple(tensor.shape),
        sharding=holding_of(tensor, range(world_size)).sharding,
        coordinate=tuple(coordinate),
        local_shape=tuple(local.shape),
        local_values=[int(value) for value in local.flatten().tolist()],
    )
