"""DTensors: their mesh, their placements and the local tensor of this rank.

A plain tensor is held whole by all ranks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tierstore.layout.chunks import Chunk
from tierstore.layout.sharding import Holding, Sharded, Sharding, local_shape, whole_on

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


# The usual classes of plain tensors, to distinguish them quickly from a DTensor in a step.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    if type(tensor) in _PLAIN:
        return False
    # A process that has a DTensor has imported its module; other processes skip the import.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of this rank: a plain tensor over the same memory."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return cast("DTensor", tensor).to_local().detach()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor, as counted by autograd.

    Changes through ``.data`` or numpy, and changes of inference tensors, are not counted.
    """
    local = local_tensor(tensor)
    return 0 if local.is_inference() else local._version


def placed_as(
    parameter: torch.Tensor,
    local: torch.Tensor,
    shape: Sequence[int] | None = None,
    part: Chunk | None = None,
) -> torch.Tensor:
    """Return a tensor with the mesh and placements of a parameter.

    Args:
        parameter: plain, or a DTensor.
        local: the local tensor of this rank, of any dtype and on any device.
        shape: shape of the whole tensor; None: shape of the parameter. Along a dimension whose size
            differs from the parameter, ranks that cut the parameter hold copies.
        part: this rank's part of the parameter, if ranks hold uneven parts. The result then
            reports it to ``torch.distributed.checkpoint``.

    Returns:
        A DTensor of the parameter's mesh and placements, or ``local`` itself.
    """
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor, Replicate

    spec = cast("DTensor", parameter)._spec
    assert spec.tensor_meta is not None
    whole = torch.empty(shape or parameter.shape, dtype=local.dtype, device="meta")
    meta = spec.tensor_meta._replace(shape=whole.shape, stride=whole.stride(), dtype=whole.dtype)
    padded = (*whole.shape, *(0,) * parameter.ndim)  # A free state may have fewer dimensions.
    copied = {d for d, size in enumerate(parameter.shape) if size != padded[d]}
    placements = tuple(
        Replicate() if getattr(placement, "dim", None) in copied else placement
        for placement in spec.placements
    )
    if placements == spec.placements:
        spec = dataclasses.replace(spec, tensor_meta=meta)
    else:  # The other fields of a spec follow from its placements.
        spec = type(spec)(spec.mesh, placements, tensor_meta=meta)
    # from_local() would copy to the device of the mesh.
    make = cast("Callable[..., DTensor]", DTensor)
    placed = make(local, spec, requires_grad=False)
    if part is not None:
        offsets = (0 if d in copied else offset for d, offset in enumerate(part.offsets))
        sizes = (whole.shape[d] if d in copied else size for d, size in enumerate(part.sizes))
        _list_chunk(placed, Chunk(tuple(offsets), tuple(sizes)))
    return placed


def _list_chunk(tensor: DTensor, chunk: Chunk) -> None:
    """Make a DTensor report this rank's chunk to ``torch.distributed.checkpoint``.

    DTensor asks its local tensor for these functions.
    """
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    place = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))

    def write_items(name: str, written: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(written.to_local())
        data = TensorWriteData(place, properties, written.size())
        index = MetadataIndex(name, place.offsets)
        # An empty part would be mistaken for another rank's part that begins at the same place.
        is_written = chunk.numel > 0 or written.numel() == 0
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)] if is_written else []

    local: Any = tensor._local_tensor
    local.__create_chunk_list__ = lambda: [place]
    local.__create_write_items__ = write_items
    local.__getstate__ = dict  # torch.save() leaves out the functions: they cannot be pickled.


def same_placement(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same mesh and placements."""
    if type(tensor) in _PLAIN and type(other) in _PLAIN:
        return True
    return _placement(tensor) == _placement(other)


def describe_placement(tensor: torch.Tensor) -> str:
    """Return text for the placements of a tensor."""
    placement = _placement(tensor)
    return "a plain tensor" if placement is None else f"{placement[0]} on {placement[1]}"


def _placement(tensor: torch.Tensor) -> tuple[Sequence[Placement], object] | None:
    if not is_dtensor(tensor):
        return None
    dtensor = cast("DTensor", tensor)
    return dtensor.placements, dtensor.device_mesh


def listed_chunks(tensor: torch.Tensor) -> list[Chunk] | None:
    """Return this rank's chunks of a DTensor by its own chunk list; None if it has no list.

    The list comes from a function ``__create_chunk_list__`` of the local tensor. Megatron-FSDP
    adds it, and ``torch.distributed.checkpoint`` calls it.

    Raises:
        ValueError: the function fails.
    """
    if not is_dtensor(tensor):
        return None
    local = cast("DTensor", tensor)._local_tensor
    create = getattr(local, "__create_chunk_list__", None)
    if create is None:
        return None
    try:
        chunks = [Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in create()]
    except Exception as error:  # A function of another library.
        raise ValueError(f"its function __create_chunk_list__ fails: {error}") from error
    return [chunk for chunk in chunks if chunk.numel]


def is_uneven(tensor: torch.Tensor) -> bool:
    """Return whether this rank's part of a DTensor differs from its placements.

    PyTorch cannot gather such a DTensor.
    """
    if not is_dtensor(tensor):
        return False
    dtensor = cast("DTensor", tensor)
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    try:
        expected = local_shape(tensor.shape, _sharding_of(dtensor), coordinate)
    except ValueError:  # PyTorch can gather placements that cannot be paged.
        return False
    return not same_shape(dtensor._local_tensor.shape, expected)


def same_shape(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether two shapes are equal, or both have no elements.

    FSDP leaves empty shards in any shape.
    """
    return tuple(found) == tuple(expected) or math.prod(found) == math.prod(expected) == 0


def holding_of(tensor: torch.Tensor, global_ranks: Sequence[int]) -> Holding:
    """Return the ranks that hold a tensor, and its sharding over these ranks by its placements.

    Args:
        tensor: plain, or a DTensor.
        global_ranks: rank of the job -> its global rank. A mesh has global ranks. The returned
            ranks are ranks of the job.

    Raises:
        ValueError: a placement is neither Shard nor Replicate, or the mesh has a rank outside
            the job.
    """
    if not is_dtensor(tensor):
        return whole_on(range(len(global_ranks)))
    dtensor = cast("DTensor", tensor)
    ranks = {number: rank for rank, number in enumerate(global_ranks)}
    numbers = dtensor.device_mesh.mesh.flatten().tolist()
    for number in numbers:
        if number not in ranks:
            raise ValueError(f"its mesh has rank {number}, which is not in the process group")
    held = tuple(ranks[number] for number in numbers)
    return Holding(ranks=held, sharding=_sharding_of(dtensor))


def _sharding_of(dtensor: DTensor) -> Sharding:
    return Sharding(
        mesh_shape=tuple(dtensor.device_mesh.shape),
        placements=tuple(map(_placement_of, dtensor.placements)),
    )


def _placement_of(placement: Placement) -> Sharded | None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match placement:
        case Replicate():
            return None
        case _StridedShard():  # Earlier releases of torch derive it from Shard.
            return Sharded(dim=placement.dim, split_factor=int(placement.split_factor))
        case Shard():
            return Sharded(dim=placement.dim)
    raise ValueError(f"it is placed as {placement}: redistribute it to Shard or Replicate")
