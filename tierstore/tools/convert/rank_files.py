"""Values that each rank saved in a file of its own, with tensors put together from their parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tierstore.errors import CheckpointError, CorruptionError, TierstoreError
from tierstore.inspection.coverage import tiling_faults
from tierstore.inspection.safe_pickle import StoredTensor, Unread
from tierstore.layout.chunks import Chunk
from tierstore.layout.sharding import HeldChunk, Sharded, Sharding, held_chunks, local_shape
from tierstore.run.sealed import is_count, require
from tierstore.tools.convert.entries import StoredChunk, StoredFile
from tierstore.tools.convert.torch_files import ShardedTensor

_LOCAL_TENSOR, _SPEC = "_local_tensor", "_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types."


@dataclass(frozen=True, slots=True)
class Held:
    """A value in the file of a rank."""

    rank: int
    file: StoredFile
    value: Any


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a rank has."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    pieces: Sequence[HeldChunk]
    local_shape: tuple[int, ...] | None
    """Shape in the file of the rank; None if the file may have more than the pieces."""


@contextmanager
def fitting(where: str) -> Iterator[None]:
    """Turn errors of the block about values of other kinds into CorruptionError.

    Args:
        where: the file that describes the others.
    """
    try:
        yield
    except TierstoreError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{where}: does not describe the files beside it") from error


Path = tuple[Any, ...]
"""Keys and positions that lead to a value."""
Describe = Callable[[Path, Sequence[Held]], Mapping[int, Part]]
"""Return the part of a tensor on each rank, given its path and the values of the ranks."""


def whole(held: Sequence[Held], describe: Describe, path: Path = ()) -> Any:
    """Return a value, put together from the values of all ranks.

    Args:
        held: the value of each rank.
        describe: tells which parts of tensors these are.
        path: of the value.

    Raises:
        CheckpointError: the parts of a tensor are not known, or not consecutive in their files.
        CorruptionError: the parts do not tile a tensor.
        ValueError, LookupError, TypeError, AttributeError, RecursionError: the values of ranks do
            not fit each other, or a description has another form; see fitting().
    """
    first = held[0].value
    if isinstance(first, dict):
        keys = dict.fromkeys(key for one in held for key in one.value)
        return {
            key: whole(
                [Held(one.rank, one.file, one.value[key]) for one in held if key in one.value],
                describe,
                (*path, key),
            )
            for key in keys
        }
    if isinstance(first, list | tuple):
        require(*(type(one.value) is type(first) for one in held))
        columns = zip(*(one.value for one in held), strict=True)
        return type(first)(
            whole(
                [Held(one.rank, one.file, v) for one, v in zip(held, values, strict=True)],
                describe,
                (*path, index),
            )
            for index, values in enumerate(columns)
        )
    if _local(first) is None:
        return first
    return _tensor(held, describe(path, held), text_of(path, held))


def text_of(path: Path, held: Sequence[Held]) -> str:
    """Return a text for messages about a tensor."""
    return f"{held[0].file.reader.root}: the tensor {'.'.join(map(str, path))!r}"


def _local(value: Any) -> StoredTensor | None:
    """Return the part of a tensor that is in a file; None if the value is not a tensor."""
    if isinstance(value, Unread):
        value = value.get(_LOCAL_TENSOR)
    return value if isinstance(value, StoredTensor) else None


def _tensor(held: Sequence[Held], described: Mapping[int, Part], where: str) -> ShardedTensor:
    """Return a tensor, put together from the parts of ranks."""
    by_rank = {one.rank: one for one in held}
    parts: dict[Chunk, StoredChunk] = {}
    for rank, part in described.items():
        one = by_rank.get(rank)
        local = None if one is None else _local(one.value)
        if one is None or local is None:
            raise CorruptionError(f"{where} is not in the file of rank {rank}")
        if part.local_shape is not None and local.shape != part.local_shape:
            raise CorruptionError(
                f"{where} has shape {list(local.shape)} on rank {rank}, and its description says "
                f"{list(part.local_shape)}"
            )
        for piece in part.pieces:
            if piece.whole.numel and piece.whole not in parts:  # Else of a replica.
                parts[piece.whole] = _stored(one.file, local, piece, where)
    (shape,) = {part.shape for part in described.values()}
    (dtype,) = {local.dtype for one in held if (local := _local(one.value)) is not None}
    fault = next(tiling_faults(shape, list(parts)), None)
    if fault is not None:
        raise CorruptionError(f"{where}: {fault}")
    return ShardedTensor(0, dtype, shape, (), parts=tuple(parts.values()))


def _stored(file: StoredFile, local: StoredTensor, piece: HeldChunk, where: str) -> StoredChunk:
    """Return where a piece of a tensor in a file is."""
    offsets, sizes = piece.local.offsets, piece.local.sizes
    if not piece.local.lies_within(local.shape):
        raise CorruptionError(f"{where} has parts that do not lie in the file {file.name!r}")
    step = 1
    strides: list[int] = []
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    consecutive = all(
        size == 1 or stride == found
        for size, stride, found in zip(sizes, strides, local.strides, strict=True)
    )
    if not consecutive:
        raise CheckpointError(f"{where} is not contiguous in {file.path}: save it contiguous")
    start = sum(offset * stride for offset, stride in zip(offsets, local.strides, strict=True))
    return StoredChunk(piece.whole, file, local.offset + start * local.dtype.itemsize)


# ------------------------------------------------------------------------- descriptions


def whole_part(shape: tuple[int, ...]) -> Part:
    """Return the part that is a whole tensor."""
    chunk = Chunk((0,) * len(shape), shape)
    return Part(shape, [HeldChunk(whole=chunk, local=chunk)], shape)


def part_at(shape: tuple[int, ...], sharding: Sharding, coordinate: Sequence[int]) -> Part:
    """Return the part of the rank at a coordinate of a mesh."""
    held = held_chunks(shape, sharding, coordinate)
    return Part(shape, held, local_shape(shape, sharding, coordinate))


def placement_of(kind: str, fields: Mapping[str, Any], ranks: int) -> Sharded | None:
    """Return a placement, given its name, "dim" and "split_factor".

    Raises:
        ValueError, LookupError: it is neither Shard nor Replicate, or lacks a field.
    """
    require(kind in ("Replicate", "Shard", "StridedShard"))
    if kind == "Replicate":
        return None
    dim, factor = fields["dim"], fields.get("split_factor", 1)
    require(is_count(dim), is_count(factor), factor <= ranks)
    return Sharded(dim=dim, split_factor=factor)


def parts_of_dtensors(path: Path, held: Sequence[Held]) -> dict[int, Part]:
    """Return the part of a tensor on each rank, as DTensors in the files say.

    Raises:
        CheckpointError: several ranks have a plain tensor with dimensions, which may be whole or a
            part; or the form of a DTensor is not known.
    """
    found = {}
    for one in held:
        if isinstance(one.value, Unread):
            try:
                found[one.rank] = _part_of_dtensor(one.value)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{text_of(path, held)} is a DTensor of another form than torch 2.13 saves, "
                    "or is neither sharded nor replicated"
                ) from error
            continue
        local = _local(one.value)
        assert local is not None
        if len(held) > 1 and local.shape:
            raise CheckpointError(
                f"{text_of(path, held)} is not a DTensor, but is in the files of several ranks, "
                "and nothing says whether they hold the same"
            )
        found[one.rank] = whole_part(local.shape)
    return found


def _part_of_dtensor(value: Unread) -> Part:
    """Return the part that a DTensor of torch 2.13 says that it is."""
    spec = value.get(_SPEC)
    mesh = spec.get("mesh")
    shape = spec.get("tensor_meta").arguments[0]
    axes = mesh.get("_layout").get("axes")
    mesh_shape = tuple(math.prod(axis.get("shape")) for axis in axes)
    coordinate = mesh.get("_coordinate_on_dim")
    for entry in spec.get("shard_order") or ():
        require(list(entry.arguments[1]) == sorted(entry.arguments[1]))
    require(*map(is_count, (*shape, *mesh_shape, *coordinate)))
    placements = [
        placement_of(
            one.name.removeprefix(_PLACEMENTS).removeprefix("_"),
            one.state or {},
            math.prod(mesh_shape),
        )
        for one in spec.get("placements")
    ]
    return part_at(shape, Sharding(mesh_shape=mesh_shape, placements=tuple(placements)), coordinate)
