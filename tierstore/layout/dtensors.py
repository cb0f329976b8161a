"""What a DTensor says of itself: where it lies, and what this rank has of it.

Plain tensors may be given as well: all ranks hold them whole.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from tierstore.layout.sharding import Holding, Replicated, Sharded, Sharding, whole_on

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    # Who has one has imported its module; the others shall not have to wait for that.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, as a plain tensor of the same memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return cast("DTensor", tensor).to_local().detach()


def placed_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies on the ranks as a parameter does.

    Args:
        parameter: plain, or a DTensor.
        local: what this rank has of the tensor, of any dtype and on any device.

    Returns:
        A DTensor of the parameter's mesh, placements and shape, or ``local`` itself.
    """
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    spec = cast("DTensor", parameter)._spec
    assert spec.tensor_meta is not None
    whole = torch.empty(parameter.shape, dtype=local.dtype, device="meta")
    meta = spec.tensor_meta._replace(stride=whole.stride(), dtype=whole.dtype)
    # Not by from_local(), which copies to the device of the mesh.
    make = cast("Callable[..., DTensor]", DTensor)
    return make(local, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def same_placement(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors lie on the ranks in the same way."""
    return _placement(tensor) == _placement(other)


def describe_placement(tensor: torch.Tensor) -> str:
    """Return how a tensor lies on the ranks, in words for messages."""
    placement = _placement(tensor)
    return "a plain tensor" if placement is None else f"{placement[0]} on {placement[1]}"


def _placement(tensor: torch.Tensor) -> tuple[Sequence[Placement], object] | None:
    if not is_dtensor(tensor):
        return None
    dtensor = cast("DTensor", tensor)
    return dtensor.placements, dtensor.device_mesh


def holding_of(tensor: torch.Tensor, global_ranks: Sequence[int]) -> Holding:
    """Return which ranks hold a tensor, and how.

    Args:
        tensor: plain, or a DTensor.
        global_ranks: the ranks of the job, by the numbers that a mesh has for them; those of
            the answer count them from 0.

    Raises:
        ValueError: its placements are none that elements can be held in, or its mesh has
            ranks that are not of the job.
    """
    if not is_dtensor(tensor):
        return whole_on(range(len(global_ranks)))
    dtensor = cast("DTensor", tensor)
    numbers = {number: rank for rank, number in enumerate(global_ranks)}
    mesh = dtensor.device_mesh
    strangers = [number for number in mesh.mesh.flatten().tolist() if number not in numbers]
    if strangers:
        raise ValueError(f"its mesh has rank {strangers[0]}, which is not in the process group")
    return Holding(
        ranks=tuple(numbers[number] for number in mesh.mesh.flatten().tolist()),
        sharding=Sharding(
            mesh_shape=tuple(mesh.shape),
            placements=tuple(_placement_of(each) for each in dtensor.placements),
        ),
    )


def _placement_of(placement: Placement) -> Replicated | Sharded:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match placement:
        case Replicate():
            return Replicated()
        case _StridedShard():  # A Shard too, in earlier releases of torch.
            return Sharded(dim=placement.dim, split_factor=int(placement.split_factor))
        case Shard():
            return Sharded(dim=placement.dim)
    raise ValueError(f"it is placed as {placement}: redistribute it to Shard or Replicate")
