"""Partitions: the ranks that hold each parameter, for the ways in which a job shards a model."""

from __future__ import annotations

import functools

from tierstore.errors import PlanError
from tierstore.layout.sharding import Holding, Sharded, Sharding, whole_on

PARTITIONS = ("ddp", "fsdp", "hsdp")


@functools.lru_cache(maxsize=2**8)  # The layers of a model have the same shapes.
def holding_of(
    shape: tuple[int, ...],
    partition: str,
    world_size: int,
    node_size: int,
    expert_parallel: int = 1,
) -> Holding:
    """Return the ranks that hold a parameter, and its sharding over them.

    Args:
        shape: shape of the parameter.
        partition: "ddp": every rank holds the whole parameter. "fsdp": its rows are cut over all
            ranks, as by ``fully_shard()``. "hsdp": its rows are cut over the ranks of a node, and
            every node holds all of it.
        world_size: number of ranks.
        node_size: number of ranks of a node.
        expert_parallel: with "fsdp", the ranks that experts are dealt to: a parameter of three
            dimensions, whose first one is the expert, is cut at experts over neighbouring ranks,
            and each expert at rows over the others.

    Raises:
        PlanError: the partition is unknown, or nodes have no equal number of ranks, or experts
            cannot be dealt equally.
    """
    if partition not in PARTITIONS:
        names = ", ".join(map(repr, PARTITIONS))
        raise PlanError(f"a partition is one of {names}, got {partition!r}")
    if node_size < 1 or world_size < 1 or world_size % node_size:
        raise PlanError(
            f"{world_size} ranks cannot fill nodes of {node_size}: both numbers must be positive, "
            "and the first a multiple of the second"
        )
    if expert_parallel > 1 and (partition != "fsdp" or world_size % expert_parallel):
        raise PlanError(
            f"experts can be dealt to {expert_parallel} ranks only with the partition 'fsdp' on a "
            f"multiple of {expert_parallel} ranks, got {partition!r} on {world_size}"
        )
    if expert_parallel > 1 and len(shape) == 3 and shape[0] % expert_parallel:
        raise PlanError(
            f"{shape[0]} experts cannot be dealt equally to {expert_parallel} ranks: pass a divisor"
        )
    if partition == "ddp" or not shape:  # FSDP2 leaves parameters without dimensions whole.
        return whole_on(range(world_size))
    ranks = tuple(range(world_size))
    if expert_parallel > 1 and len(shape) == 3:
        mesh_shape = world_size // expert_parallel, expert_parallel
        experts = Sharding(mesh_shape=mesh_shape, placements=(Sharded(dim=1), Sharded(dim=0)))
        return Holding(ranks=ranks, sharding=experts)
    if partition == "fsdp":
        return Holding(
            ranks=ranks, sharding=Sharding(mesh_shape=(world_size,), placements=(Sharded(dim=0),))
        )
    mesh_shape = world_size // node_size, node_size
    return Holding(
        ranks=ranks, sharding=Sharding(mesh_shape=mesh_shape, placements=(None, Sharded(dim=0)))
    )
