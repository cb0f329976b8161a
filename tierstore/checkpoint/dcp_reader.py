"""Reading of the entries of a checked DCP checkpoint: parts of tensors, other values, paths."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import File, Reader
from tierstore.inspection.slices import Slices
from tierstore.layout.chunks import Chunk
from tierstore.run import tagged_json
from tierstore.units import format_bytes

EntryPath = tuple[str | int, ...]
"""The keys and indices of a value in the nested state dict that was saved."""


class StoredEntries:
    """The entries that ``.metadata`` names.

    Args:
        path: the directory.
        metadata: what its ``.metadata`` holds.
        slices: the slices of files that it names, checked.
    """

    def __init__(self, path: Path, metadata: Metadata, slices: Slices) -> None:
        self.path = path
        self._metadata = metadata
        self._slices = slices
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    @property
    def keys(self) -> Sequence[str]:
        """All keys, in the order of ``.metadata``."""
        return list(self._metadata.state_dict_metadata)

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; None if the key is not that of a tensor."""
        found = self._metadata.state_dict_metadata.get(key)
        return found if isinstance(found, TensorStorageMetadata) else None

    def read_items(self, key: str, chunk: Chunk) -> list[ReadItem]:
        """Return what to read for a chunk: a part of each stored chunk that it overlaps."""
        wanted = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        stored = self.tensor(key)
        assert stored is not None
        return create_read_items_for_chunk_list(key, stored, [wanted])

    def read(self, items: list[ReadItem], targets: Mapping[int, torch.Tensor]) -> None:
        """Read parts of stored chunks.

        Only those parts are read, in pieces of at most PIECE_BYTES, if the elements are in
        row-major order in the file; else DCP reads whole stored chunks.

        Args:
            items: from read_items().
            targets: id of each item -> the tensor of the whole wanted chunk.

        Raises:
            CorruptionError: a file has changed since it was checked.
        """
        resolved = _Targets(targets)
        items_of_file: dict[str, list[ReadItem]] = {}
        for item in items:
            info = self._metadata.storage_data[item.storage_index]
            items_of_file.setdefault(info.relative_path, []).append(item)
        others: list[ReadItem] = []
        for name, file_items in items_of_file.items():
            try:
                with Reader(self.path).open(name) as file:
                    for item in file_items:
                        if not self._read_part(file, item, resolved.resolve_tensor(item)):
                            others.append(item)
            except CorruptionError as error:
                raise CorruptionError(f"{self.path}/{name}: {error}") from error
        if others:
            self._reader.read_data(LoadPlan(others), cast(LoadPlanner, resolved)).wait()

    def _read_part(self, file: File, item: ReadItem, target: torch.Tensor) -> bool:
        """Read a part of a stored chunk; return False if its elements are not in order."""
        stored = self.tensor(item.storage_index.fqn)
        assert stored is not None
        assert item.storage_index.index is not None
        sizes = stored.chunks[item.storage_index.index].sizes
        info = self._metadata.storage_data[item.storage_index]
        start = self._slices.elements_start(file, info, sizes, stored.properties.dtype)
        if start is not None:
            read_box(
                file, start, stored.properties.dtype, sizes, item.storage_offsets, target.detach()
            )
        return start is not None

    def value(self, key: str) -> Any:
        """Return a whole tensor, or another value, of at most LIMIT_BYTES of a commit.

        Raises:
            CheckpointError: there is none, it is larger, or it is of a class that only a full
                unpickling could make.
        """
        stored = self._metadata.state_dict_metadata.get(key)
        if stored is None:
            raise CheckpointError(f"{self.path} has no {key!r}")
        if isinstance(stored, TensorStorageMetadata):
            self._check_size(key, stored.size.numel() * stored.properties.dtype.itemsize)
            value = torch.empty(stored.size, dtype=stored.properties.dtype)
            items = self.read_items(key, Chunk((0,) * value.ndim, tuple(value.shape)))
            self.read(items, {id(item): value for item in items})
            return value
        info = self._metadata.storage_data[MetadataIndex(key)]
        self._check_size(key, info.length)
        with Reader(self.path).open(info.relative_path) as file:
            data = file.read(info.offset, info.length)
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:  # A pickle of unknown classes can make torch raise anything.
            raise CheckpointError(
                f"{self.path}: {key!r} is of a class that torch.load(weights_only=True) does not "
                "make: save it as plain numbers, text, lists or tensors (of a numpy scalar, its "
                "item())"
            ) from error

    def path_of(self, key: str) -> EntryPath:
        """Return the path of a value in the state dict; ``(key,)`` if ``.metadata`` has none.

        Raises:
            CheckpointError: the path is not that of the key.
        """
        paths = self._metadata.planner_data
        path = paths.get(key) if isinstance(paths, dict) else None
        if path is None:
            return (key,)
        if (
            type(path) is not tuple
            or not 0 < len(path) <= tagged_json.DEPTH_MAX
            or not all(type(part) in (str, int) for part in path)
            or ".".join(map(str, path)) != key
        ):
            raise CheckpointError(f"{self.path}: .metadata gives {key!r} the path of another key")
        return path

    def _check_size(self, key: str, nbytes: int) -> None:
        if nbytes > tagged_json.LIMIT_BYTES:
            raise CheckpointError(
                f"{self.path}: {key!r} has {format_bytes(nbytes)}, where a small value is expected"
            )


class _Targets:
    """Tells a DCP reader the target of each item."""

    def __init__(self, targets: Mapping[int, torch.Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        target = self._targets[id(item)]
        for dimension, (offset, size) in enumerate(
            zip(item.dest_offsets, item.lengths, strict=True)
        ):
            target = target.narrow(dimension, offset, size)
        return target

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the tensor is a view of the target."""


PIECE_BYTES = 8 * 2**20
"""Most bytes read at once."""


class Source(Protocol):
    """An open file."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on."""


def read_box(
    file: Source,
    start: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Fill a tensor with a box of a larger tensor, stored in a file in row-major order.

    Whole rows of the stored tensor are read, unless a row is longer than PIECE_BYTES.

    Args:
        file: the file.
        start: the byte at which the stored elements begin.
        dtype: dtype of the stored tensor.
        sizes: shape of the stored tensor.
        offsets: where in the stored tensor the box begins.
        target: of the shape of the box, and of any dtype.
    """
    if not target.numel():
        return
    if not sizes:
        sizes, offsets, target = (1,), (0,), target[None]
    row_numel = math.prod(sizes[1:])
    row_bytes = row_numel * dtype.itemsize
    first = start + offsets[0] * row_bytes
    inner = target[0].shape
    if row_bytes > PIECE_BYTES and len(sizes) > 1:
        for index, row in enumerate(target):
            read_box(file, first + index * row_bytes, dtype, sizes[1:], offsets[1:], row)
        return
    rows_max = PIECE_BYTES // row_bytes
    piece = torch.empty(min(rows_max, len(target)) * row_numel, dtype=dtype)
    for begin in range(0, len(target), rows_max):
        rows = target[begin : begin + rows_max]
        read = piece[: len(rows) * row_numel]
        file.read_into(read.view(torch.uint8).numpy().data, first + begin * row_bytes)
        box = read.view(len(rows), *sizes[1:])
        for dimension, (offset, size) in enumerate(zip(offsets[1:], inner, strict=True), start=1):
            box = box.narrow(dimension, offset, size)
        rows.copy_(box)
