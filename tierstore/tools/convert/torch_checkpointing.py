"""Format "torch_checkpointing", read: directories of torch_checkpointing 0.1.

Each rank has a file for each item, such as the model. ``metadata.pkl`` says which part of a tensor
each file has. Docs: docs/internals/foreign-formats.md.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader, wrong_name
from tierstore.layout.chunks import Chunk
from tierstore.layout.sharding import HeldChunk, Sharding
from tierstore.run.sealed import is_count, require
from tierstore.tools.convert import safetensors_files, torch_files
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.entries import StoredFile
from tierstore.tools.convert.options import Reading
from tierstore.tools.convert.rank_files import (
    Held,
    Part,
    fitting,
    part_at,
    parts_of_dtensors,
    placement_of,
    text_of,
    whole,
)
from tierstore.tools.convert.torch_archive import read_pickle, read_torch_file

_METADATA = "metadata.pkl"
_FILE = re.compile(r"(.+)_(\d+)\.pt")  # The name of a file without metadata.
_FIRST = "model_0.pt"
_STEP = "step"
_TORCH, _SAFETENSORS = ".pt", ".safetensors"


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory with metadata, or with a model of the first rank."""
    return (path / _METADATA).is_file() or (path / _FIRST).is_file()


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read directories.

    Raises:
        CorruptionError: a file is damaged or absent, or the parts of a tensor do not tile it.
        CheckpointError: no file tells which part of a tensor a rank has, or its elements are not
            consecutive.
    """
    return [
        replace(contents, source="torch_checkpointing")
        for path in paths
        for contents in _read(path, reading)
    ]


def _read(path: Path, reading: Reading) -> Iterator[Contents]:
    reader = reading.reader(path)
    items, lost = _items(reader)
    values = {item: _value(reader, item_, reading) for item, item_ in items.items()}
    step = values.pop(_STEP, None)
    # Files of safetensors are sorted by name.
    ordered = not any(
        name.endswith(_SAFETENSORS) for one in items.values() for name in one.files.values()
    )
    where = StoredFile(reader, _METADATA)  # Each tensor knows its own file.
    yield from torch_files.sorted_contents(where, values, reading, ordered=ordered)
    yield Contents(source="torch_checkpointing", step=step if is_count(step) else None, lost=lost)


@dataclass(frozen=True, slots=True)
class _Item:
    """The files of an item, such as the model."""

    files: Mapping[int, str]
    """Rank -> name."""
    geometry: Mapping[str, Any] | None
    """Path of a tensor in the item -> its metadata; None without metadata."""


def _items(reader: Reader) -> tuple[dict[str, _Item], list[str]]:
    """Return the items of a directory by name, and the values that are not carried."""
    items: dict[str, _Item] = {}
    where = f"{reader.root / _METADATA}"
    if _METADATA in reader.list():
        with fitting(where):
            metadata = read_pickle(reader.get(_METADATA), where)
            for item, described in metadata["metadata"].items():
                layouts = described["rank_to_layout_info"]
                require(sorted(layouts) == list(range(metadata["world_size"])) != [])
                names = {
                    rank: f"{item}_{rank}.pt" if layout is None else layout["file_path"]
                    for rank, layout in sorted(layouts.items())
                }
                require(all(type(name) is str for name in names.values()))
                items[item] = _Item(names, dict(described["nested_path_to_metadata"]))
    for item, files in _default_files(reader).items():
        # All ranks have the same step.
        first = {min(files): files[min(files)]}
        items.setdefault(item, _Item(first if item == _STEP else dict(sorted(files.items())), None))
    lost: list[str] = []
    for item, one in list(items.items()):
        wrong = next((name for name in one.files.values() if wrong_name(name)), None)
        if wrong is not None:
            raise CorruptionError(f"{where}: names the file {wrong!r}, which {wrong_name(wrong)}")
        if not all(name.endswith((_TORCH, _SAFETENSORS)) for name in one.files.values()):
            lost.append(f"{item!r}: neither the model nor an optimizer")
            del items[item]
    read = {name for item in items.values() for name in item.files.values()}
    for name in reader.list():
        is_step = name.startswith(f"{_STEP}_")
        if name not in read and name != _METADATA and not is_step:
            lost.append(f"{name!r}: neither the model nor an optimizer")
    return items, lost


def _default_files(reader: Reader) -> dict[str, dict[int, str]]:
    """Return item -> rank -> name of its file, of files with the usual names."""
    files: dict[str, dict[int, str]] = defaultdict(dict)
    for name in reader.list():
        match = _FILE.fullmatch(name)
        if match is not None:
            files[match[1]][int(match[2])] = name
    return files


# ----------------------------------------------------------------------------------- one item


def _value(reader: Reader, item: _Item, reading: Reading) -> Any:
    """Return the value of an item, with the parts of tensors of all ranks put together."""
    held: list[Held] = []
    for rank, name in item.files.items():
        if name.endswith(_SAFETENSORS):
            value: Any = safetensors_files.stored_tensors(reader, name)
        else:
            value = read_torch_file(reader, name)
        held.append(Held(rank, StoredFile(reader, name), value))
    with fitting(f"{reader.root / _METADATA}"):
        if item.geometry is None:
            return whole(held, parts_of_dtensors)
        geometry = dict(item.geometry)
        if item.files[0].endswith(_SAFETENSORS):  # Where paths are joined to names.
            geometry = {
                _text((".".join(map(str, json.loads(path))),)): one
                for path, one in geometry.items()
            }
        return whole(held, partial(_described, geometry))


def _text(path: Sequence[Any]) -> str:
    return json.dumps(list(path), separators=(",", ":"))


def _described(
    geometry: Mapping[str, Any], path: tuple[Any, ...], held: Sequence[Held]
) -> dict[int, Part]:
    """Return the part of a tensor on each rank, as metadata says."""
    groups = geometry.get(_text(path))
    if groups is None:
        raise CheckpointError(f"{text_of(path, held)} is not in {_METADATA}")
    found: dict[int, Part] = {}
    for group in groups:
        kind, data = group["sharding_metadata"]["type"], group["sharding_metadata"]["data"]
        shape = tuple(data["global_shape"])
        require(all(map(is_count, shape)))
        if kind not in _GEOMETRIES:
            raise CheckpointError(
                f"{text_of(path, held)} is sharded as {kind!r}, which is not read"
            )
        found |= _GEOMETRIES[kind](shape, data, group["ranks"])
    return found


def _of_dtensor(
    shape: tuple[int, ...], data: Mapping[str, Any], ranks: Sequence[int]
) -> dict[int, Part]:
    """Return the parts of a DTensor by rank."""
    mesh = data["mesh_spec"]
    mesh_shape, members = tuple(mesh["mesh_shape"]), tuple(mesh["mesh_data"])
    require(all(map(is_count, mesh_shape)), len(members) == math.prod(mesh_shape))
    require(set(ranks) == set(members))
    placements = tuple(placement_of(one["type"], one, len(members)) for one in data["placements"])
    sharding = Sharding(mesh_shape=mesh_shape, placements=placements)
    coordinates = itertools.product(*map(range, mesh_shape))
    return {
        rank: part_at(shape, sharding, coordinate)
        for rank, coordinate in zip(members, coordinates, strict=True)
    }


def _of_offsets(
    shape: tuple[int, ...], data: Mapping[str, Any], ranks: Sequence[int]
) -> dict[int, Part]:
    """Return the parts that ranks state themselves."""
    keys = ("global_offsets", "local_offsets", "local_sizes")
    columns = [[tuple(numbers) for numbers in data[key]] for key in keys]
    require(all(len(numbers) == len(shape) for column in columns for numbers in column))
    require(all(is_count(number) for column in columns for one in column for number in one))
    pieces = [
        HeldChunk(whole=Chunk(start, sizes), local=Chunk(local, sizes))
        for start, local, sizes in zip(*columns, strict=True)
    ]
    return {rank: Part(shape, pieces, None) for rank in ranks}


_GEOMETRIES = {"DTensorShardingMetadata": _of_dtensor, "default_tensor_v1": _of_offsets}
