"""Format "torch_checkpointing", read: directories of torch_checkpointing 0.1.

Each rank has a file of each item, such as the model, and ``metadata.pkl`` says which part of a
tensor is in the file of which rank. Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierstore.convert import safetensors_files, torch_files
from tierstore.convert.contents import Contents
from tierstore.convert.entries import StoredChunk, StoredFile
from tierstore.convert.options import Reading
from tierstore.convert.torch_files import ShardedTensor
from tierstore.errors import CheckpointError, CorruptionError, TierstoreError
from tierstore.inspection.coverage import tiling_faults
from tierstore.inspection.reader import Reader, wrong_name
from tierstore.inspection.torch_archive import StoredTensor, Unread, read_pickle, read_torch_file
from tierstore.layout.chunks import Chunk
from tierstore.layout.sharding import HeldChunk, Sharded, Sharding, held_chunks, local_shape
from tierstore.run.sealed import is_count, require

_METADATA = "metadata.pkl"
_FILE = re.compile(r"(.+)_(\d+)\.pt")  # As files are called where no metadata says otherwise.
_FIRST = "model_0.pt"
_STEP = "step"
_LOCAL_TENSOR = "_local_tensor"
_TORCH, _SAFETENSORS = ".pt", ".safetensors"
_RANKS_MAX = 2**20


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory with metadata, or with a model of the first rank."""
    return (path / _METADATA).is_file() or (path / _FIRST).is_file()


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read directories.

    Raises:
        CorruptionError: a file is damaged or absent, or the parts of a tensor do not tile it.
        CheckpointError: no file tells which part of a tensor a rank has.
    """
    return [
        replace(contents, source="torch_checkpointing")
        for path in paths
        for contents in _read(path, reading)
    ]


def _read(path: Path, reading: Reading) -> Iterator[Contents]:
    reader = Reader(path, reading.on_progress)
    items, lost = _items(reader)
    values = {item: _value(reader, item_, reading) for item, item_ in items.items()}
    step = values.pop(_STEP, None)
    # Files of safetensors are sorted by name.
    ordered = not any(name.endswith(_SAFETENSORS) for one in items.values() for name in one.files)
    where = StoredFile(reader, _METADATA)  # Each tensor knows its own file.
    yield from torch_files.sorted_contents(where, values, reading, ordered=ordered)
    yield Contents(source="torch_checkpointing", step=step if is_count(step) else None, lost=lost)


@dataclass(frozen=True, slots=True)
class _Item:
    """The files of an item, such as the model."""

    files: Sequence[str]
    """By rank."""
    geometry: Mapping[str, Any]
    """Path of a tensor in the item -> what the metadata says of it."""


def _items(reader: Reader) -> tuple[dict[str, _Item], list[str]]:
    """Return the items of a directory by name, and what is not carried."""
    items: dict[str, _Item] = {}
    lost: list[str] = []
    where = f"{reader.root / _METADATA}"
    files = _default_files(reader)
    has_metadata = _METADATA in reader.list()
    if not has_metadata and any(len(ranks) > 1 for ranks in files.values()):
        raise CheckpointError(
            f"{reader.root} was saved by several ranks without {_METADATA}, which says which part "
            "of a tensor a rank has: save with ItemSpec(resharder=DefaultResharder())"
        )
    if has_metadata:
        with _fitting(where):
            metadata = read_pickle(reader.get(_METADATA), where)
            for item, described in metadata["metadata"].items():
                geometry, layouts = (
                    described[key] for key in ("nested_path_to_metadata", "rank_to_layout_info")
                )
                require(type(geometry) is dict, sorted(layouts) == list(range(len(layouts))))
                require(metadata["world_size"] == len(layouts) > 0)
                names = []
                for rank, layout in sorted(layouts.items()):
                    names.append(f"{item}_{rank}.pt" if layout is None else layout["file_path"])
                    require(type(names[-1]) is str)
                items[item] = _Item(names, geometry)
    for item, ranks in files.items():
        if item not in items and (len(ranks) == 1 or item == _STEP):
            items[item] = _Item([ranks[min(ranks)]], {})
        elif item not in items:
            lost.append(f"{item!r} is not carried: {_METADATA} does not describe it")
    read = {name for item in items.values() for name in item.files}
    usual = {name for ranks in files.values() for name in ranks.values()}
    for name in reader.list():
        if name not in read | usual | {_METADATA}:
            lost.append(f"{name!r} is not carried: neither the model nor an optimizer")
    for item, one in list(items.items()):
        wrong = next((name for name in one.files if wrong_name(name)), None)
        if wrong is not None:
            raise CorruptionError(f"{where}: names the file {wrong!r}, which {wrong_name(wrong)}")
        if not all(name.endswith((_TORCH, _SAFETENSORS)) for name in one.files):
            lost.append(f"{item!r} is not carried: neither the model nor an optimizer")
            del items[item]
    return items, lost


@contextmanager
def _fitting(where: str) -> Iterator[None]:
    """Turn errors of the block about values of other kinds into CorruptionError."""
    try:
        yield
    except TierstoreError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{where}: does not describe the files beside it") from error


def _default_files(reader: Reader) -> dict[str, dict[int, str]]:
    """Return item -> rank -> name of its file, of files with the usual names."""
    files: dict[str, dict[int, str]] = defaultdict(dict)
    for name in reader.list():
        match = _FILE.fullmatch(name)
        if match is not None:
            files[match[1]][int(match[2])] = name
    return files


# ----------------------------------------------------------------------------------- one item

_Held = tuple[int, StoredFile, Any]
"""A rank, its file, and a value in it."""


def _value(reader: Reader, item: _Item, reading: Reading) -> Any:
    """Return the value of an item, with the parts of tensors of all ranks put together."""
    held: list[_Held] = []
    geometry = dict(item.geometry)
    for rank, name in enumerate(item.files):
        if name.endswith(_SAFETENSORS):
            value: Any = safetensors_files.stored_tensors(reader, name)
        else:
            value = read_torch_file(reader, name, check=reading.check)
        held.append((rank, StoredFile(reader, name), value))
    with _fitting(f"{reader.root / _METADATA}"):
        if item.files[0].endswith(_SAFETENSORS):  # Where paths are joined to names.
            geometry = {
                _path((".".join(map(str, json.loads(path))),)): one
                for path, one in geometry.items()
            }
        return _whole(held, (), geometry)


def _path(path: Sequence[Any]) -> str:
    return json.dumps(list(path), separators=(",", ":"))


def _whole(held: Sequence[_Held], path: tuple[Any, ...], geometry: Mapping[str, Any]) -> Any:
    """Return a value of one path, with tensors put together."""
    _, _, first = held[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for _, _, value in held for key in value)
        return {
            key: _whole(
                [(rank, file, value[key]) for rank, file, value in held if key in value],
                (*path, key),
                geometry,
            )
            for key in keys
        }
    if isinstance(first, list | tuple):
        require(
            all(type(value) is type(first) and len(value) == len(first) for _, _, value in held)
        )
        return type(first)(
            _whole(
                [(rank, file, value[index]) for rank, file, value in held], (*path, index), geometry
            )
            for index in range(len(first))
        )
    if _local(first) is None:
        return first
    return _tensor(held, path, geometry)


def _local(value: Any) -> StoredTensor | None:
    """Return the part of a tensor that is in a file; None if the value is no tensor."""
    if isinstance(value, Unread):
        value = value.get(_LOCAL_TENSOR)
    return value if isinstance(value, StoredTensor) else None


def _tensor(
    held: Sequence[_Held], path: tuple[Any, ...], geometry: Mapping[str, Any]
) -> ShardedTensor:
    """Return a tensor, put together from the parts of ranks.

    Args:
        held: the rank, its file and the value of each.
        path: of the tensor.
        geometry: what the metadata says of the tensors of the item.
    """
    where = f"{held[0][1].reader.root}: the tensor {'.'.join(map(str, path))!r}"
    groups = geometry.get(_path(path))
    if groups is None:
        if geometry or len(held) > 1:
            raise CheckpointError(f"{where} is of several ranks, and {_METADATA} lacks it")
        return _lone(held[0], where)
    by_rank = {rank: (file, _local(value)) for rank, file, value in held}
    shapes: set[tuple[int, ...]] = set()
    parts: dict[Chunk, StoredChunk] = {}
    for group in groups:
        kind, data = group["sharding_metadata"]["type"], group["sharding_metadata"]["data"]
        shape = tuple(data["global_shape"])
        require(all(map(is_count, shape)))
        shapes.add(shape)
        if kind not in _GEOMETRIES:
            raise CheckpointError(f"{where} is sharded as {kind!r}, which is not read")
        for rank, pieces, expected in _GEOMETRIES[kind](shape, data, group["ranks"]):
            file, local = by_rank.get(rank, (None, None))
            if file is None or local is None:
                raise CorruptionError(f"{where} is not in the file of rank {rank}")
            if expected is not None and local.shape != expected:
                raise CorruptionError(
                    f"{where} has shape {list(local.shape)} on rank {rank}, and {_METADATA} says "
                    f"{list(expected)}"
                )
            for piece in pieces:
                if piece.whole.numel and piece.whole not in parts:  # Else of a replica.
                    parts[piece.whole] = _stored(file, local, piece, where)
    (shape,) = shapes
    (dtype,) = {local.dtype for _, local in by_rank.values() if local is not None}
    fault = next(tiling_faults(shape, list(parts)), None)
    if fault is not None:
        raise CorruptionError(f"{where}: {fault}")
    return ShardedTensor(0, dtype, shape, (), parts=tuple(parts.values()))


def _lone(held: _Held, where: str) -> ShardedTensor:
    """Return a tensor that one rank has as a whole."""
    _, file, value = held
    local = _local(value)
    assert local is not None
    # The arguments of a DTensor: its class, dtype, shape, strides and others.
    if isinstance(value, Unread) and value.arguments[2] != local.shape:
        raise CheckpointError(f"{where} is a part, and no {_METADATA} says which one")
    whole = Chunk((0,) * len(local.shape), local.shape)
    part = _stored(file, local, HeldChunk(whole=whole, local=whole), where)
    return ShardedTensor(0, local.dtype, local.shape, (), parts=(part,))


def _stored(file: StoredFile, local: StoredTensor, piece: HeldChunk, where: str) -> StoredChunk:
    """Return where a piece of a tensor in a file is.

    Args:
        file: the file.
        local: the tensor in it.
        piece: a chunk of this tensor, and the same elements in the whole tensor.
        where: for messages.

    Raises:
        CheckpointError: the elements of the piece are not consecutive in the file.
        CorruptionError: the piece does not lie in the tensor.
    """
    offsets, sizes = piece.local.offsets, piece.local.sizes
    if not piece.local.lies_within(local.shape):
        raise CorruptionError(f"{where} has parts that do not lie in the file {file.name!r}")
    step = 1
    strides: list[int] = []
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    consecutive = piece.local.numel == 0 or all(
        size == 1 or stride == found
        for size, stride, found in zip(sizes, strides, local.strides, strict=True)
    )
    if not consecutive:
        raise CheckpointError(f"{where} is not contiguous in {file.path}: save it contiguous")
    start = sum(offset * stride for offset, stride in zip(offsets, local.strides, strict=True))
    return StoredChunk(piece.whole, file, local.offset + start * local.dtype.itemsize)


_Pieces = Iterator[tuple[int, Sequence[HeldChunk], tuple[int, ...] | None]]
"""A rank, what it has of a tensor, and the shape of its local tensor, if that follows."""


def _of_dtensor(shape: tuple[int, ...], data: Mapping[str, Any], ranks: Sequence[int]) -> _Pieces:
    """Yield the pieces of a DTensor by rank."""
    mesh = data["mesh_spec"]
    mesh_shape, members = tuple(mesh["mesh_shape"]), tuple(mesh["mesh_data"])
    require(all(map(is_count, mesh_shape)), len(members) == math.prod(mesh_shape))
    require(set(ranks) == set(members), len(members) <= _RANKS_MAX)
    placements = tuple(_placement(one, len(members)) for one in data["placements"])
    sharding = Sharding(mesh_shape=mesh_shape, placements=placements)
    coordinates = itertools.product(*map(range, mesh_shape))
    for rank, coordinate in zip(members, coordinates, strict=True):
        pieces = held_chunks(shape, sharding, coordinate)
        yield rank, pieces, local_shape(shape, sharding, coordinate)


def _placement(placement: Mapping[str, Any], ranks: int) -> Sharded | None:
    kind = placement["type"]
    require(kind in ("Replicate", "Shard", "StridedShard"))
    if kind == "Replicate":
        return None
    dim, factor = placement["dim"], placement.get("split_factor", 1)
    require(is_count(dim), is_count(factor), factor <= ranks)
    return Sharded(dim=dim, split_factor=factor)


def _of_offsets(shape: tuple[int, ...], data: Mapping[str, Any], ranks: Sequence[int]) -> _Pieces:
    """Yield the pieces that a rank states itself."""
    keys = ("global_offsets", "local_offsets", "local_sizes")
    columns = [[tuple(numbers) for numbers in data[key]] for key in keys]
    require(all(len(numbers) == len(shape) for column in columns for numbers in column))
    require(all(is_count(number) for column in columns for one in column for number in one))
    for rank in ranks:
        yield (
            rank,
            [
                HeldChunk(whole=Chunk(start, sizes), local=Chunk(local, sizes))
                for start, local, sizes in zip(*columns, strict=True)
            ],
            None,
        )


_GEOMETRIES = {"DTensorShardingMetadata": _of_dtensor, "default_tensor_v1": _of_offsets}
