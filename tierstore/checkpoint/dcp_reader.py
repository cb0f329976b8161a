"""Reader of the entries of a checked DCP checkpoint: parts of tensors, other values, paths."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import mmap
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import File
from tierstore.inspection.slices import Slices
from tierstore.layout.chunks import Chunk
from tierstore.run import tagged_json
from tierstore.storage.paths import storage_errors
from tierstore.units import format_bytes

EntryPath = tuple[str | int, ...]
"""The keys and indices that lead to a value in the saved, nested state dict."""

Part = tuple[ReadItem, torch.Tensor]
"""A part of a stored chunk, and the tensor to fill with it."""


class _Rows:
    """The chunks of one tensor, indexed by their rows.

    Args:
        chunks: of the tensor.
    """

    def __init__(self, chunks: Sequence[ChunkStorageMetadata]) -> None:
        by_rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, chunk in enumerate(chunks):
            start, size = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
            by_rows[start, start + size].append(number)
        self._rows = sorted(by_rows.items())

    def overlapping(self, chunk: Chunk) -> list[int]:
        """Return the numbers of the chunks that share rows with ``chunk``."""
        start, size = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
        count = bisect_left(self._rows, start + size, key=lambda rows: rows[0][0])
        return [
            number for (_, end), numbers in self._rows[:count] if end > start for number in numbers
        ]


class StoredEntries:
    """The entries that ``.metadata`` names.

    Args:
        path: the directory.
        slices: the metadata and the slices of files that it names. They were checked.
    """

    def __init__(self, path: Path, slices: Slices) -> None:
        self.path = path
        self._metadata = slices.metadata
        self._stored_keys = {key: key for key in slices.metadata.state_dict_metadata}
        self._paths: Mapping[str, EntryPath] = {}
        self._slices = slices
        self._rows_of: dict[str, _Rows] = {}
        self._whole_chunk = threading.Lock()  # One at a time: a whole chunk may be large.
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(slices.metadata, is_coordinator=True)

    @property
    def keys(self) -> Collection[str]:
        """All keys, in the order of ``.metadata``."""
        return self._stored_keys.keys()

    def at(self, paths: Mapping[str, EntryPath]) -> StoredEntries:
        """Return the same entries under new paths. The keys follow from the paths.

        Args:
            paths: key -> new path, for all keys.
        """
        moved = copy.copy(self)
        keys = {".".join(map(str, path)): key for key, path in paths.items()}
        moved._stored_keys = {new: self._stored_keys[key] for new, key in keys.items()}
        moved._paths = {new: paths[key] for new, key in keys.items()}
        return moved

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Return the metadata of a tensor; None if the key does not name a tensor."""
        found = self._metadata.state_dict_metadata.get(self._stored_keys.get(key, ""))
        return found if isinstance(found, TensorStorageMetadata) else None

    def parts(self, key: str, chunk: Chunk, target: torch.Tensor) -> list[Part]:
        """Return the parts of a tensor to read for a chunk.

        Args:
            key: key of the tensor.
            chunk: the rectangle of the tensor.
            target: a tensor with the shape of the chunk, of any dtype. read() fills it.
        """
        wanted = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        key = self._stored_keys[key]
        stored = self._metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        # DCP compares each chunk. Stacked layers and experts have tens of thousands of chunks.
        numbers = self._rows(key).overlapping(chunk)
        near = dataclasses.replace(stored, chunks=[stored.chunks[number] for number in numbers])
        parts = []
        for item in create_read_items_for_chunk_list(key, near, [wanted]):
            assert item.storage_index.index is not None
            index = dataclasses.replace(item.storage_index, index=numbers[item.storage_index.index])
            part = Chunk(tuple(item.dest_offsets), tuple(item.lengths)).select(target)
            parts.append((dataclasses.replace(item, storage_index=index), part))
        return parts

    def _rows(self, key: str) -> _Rows:
        if key not in self._rows_of:
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            self._rows_of[key] = _Rows(stored.chunks)
        return self._rows_of[key]

    def read(self, parts: Sequence[Part]) -> None:
        """Read parts of stored chunks.

        If the elements are in the file as in memory, in any order of dimensions, only these parts
        are read, in pieces of at most PIECE_BYTES. Otherwise, for example if a chunk is compressed,
        DCP reads whole stored chunks, for one thread at a time.

        Args:
            parts: from parts().

        Raises:
            CorruptionError: a file has changed since it was checked.
            StorageError: a file cannot be read.
        """
        parts_of_file: dict[str, list[Part]] = defaultdict(list)
        for part in parts:
            info = self._metadata.storage_data[part[0].storage_index]
            parts_of_file[info.relative_path].append(part)
        others: list[Part] = []
        for name, file_parts in parts_of_file.items():
            with self._open(name) as file:
                others += [part for part in file_parts if not self._read_part(file, *part)]
        if others:
            targets = {id(item): target for item, target in others}
            # DCP asks the planner for the target of an item, and reports when the target is filled.
            planner: Any = SimpleNamespace(
                resolve_tensor=lambda item: targets[id(item)],
                commit_tensor=lambda item, tensor: None,
            )
            with storage_errors("read", self.path), self._whole_chunk:
                self._reader.read_data(LoadPlan([item for item, _ in others]), planner).wait()

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[File]:
        """Open a file of the checkpoint. Errors of the block name the file."""
        try:
            with storage_errors("read", self.path / name), self._slices.reader.open(name) as file:
                yield file
        except CorruptionError as error:
            raise CorruptionError(f"{self.path}/{name}: {error}") from error

    def _read_part(self, file: File, item: ReadItem, target: torch.Tensor) -> bool:
        """Read a part of a stored chunk. Return False if the file has its elements transformed."""
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        assert item.storage_index.index is not None
        sizes, dtype = stored.chunks[item.storage_index.index].sizes, stored.properties.dtype
        info = self._metadata.storage_data[item.storage_index]
        elements = self._slices.elements(file, info, sizes, dtype)
        if elements is not None:
            order = elements.order
            read_box(
                file.read_data_into,
                elements.start,
                dtype,
                [sizes[dim] for dim in order],
                [item.storage_offsets[dim] for dim in order],
                target.detach().permute(order),
            )
        elif (checksums := file.reader.checksums.get(file.name)) is not None:
            checksums.need(info.offset, info.length)
        return elements is not None

    def value(self, key: str) -> Any:
        """Return a whole tensor, or another value, of at most tagged_json.LIMIT_BYTES.

        Raises:
            CheckpointError: the key is absent, the value is larger, or only a full unpickling
                could make its class.
            CorruptionError: its file has changed since it was checked.
            StorageError: its file cannot be read.
        """
        stored = self._metadata.state_dict_metadata.get(self._stored_keys.get(key, ""))
        if stored is None:
            raise CheckpointError(f"{self.path} has no {key!r}")
        if isinstance(stored, TensorStorageMetadata):
            self._check_size(key, stored.size.numel() * stored.properties.dtype.itemsize)
            value = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            self.read(self.parts(key, Chunk((0,) * value.ndim, tuple(value.shape)), value))
            return value
        data = self.raw(key)
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:  # For a pickle of unknown classes torch may raise any error.
            raise CheckpointError(
                f"{self.path}: {key!r} is of a class that torch.load(weights_only=True) does not "
                "make: save it as plain numbers, text, lists or tensors (of a numpy scalar, its "
                "item())"
            ) from error

    def raw(self, key: str) -> bytes:
        """Return the bytes of a value that is not a tensor; errors as in value()."""
        info = self._metadata.storage_data[MetadataIndex(self._stored_keys[key])]
        self._check_size(key, info.length)
        with self._open(info.relative_path) as file:
            data = bytearray(info.length)
            file.read_data_into(memoryview(data), info.offset)
            return bytes(data)

    def path_of(self, key: str) -> EntryPath:
        """Return the path of a value in the state dict; ``(key,)`` if ``.metadata`` has none.

        Raises:
            CheckpointError: the path belongs to another key.
        """
        if key in self._paths:
            return self._paths[key]
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
                f"{self.path}: {key!r} has {format_bytes(nbytes)}, but a small value is expected"
            )


PIECE_BYTES = 8 * 2**20
"""Most bytes read at once."""


def read_box(
    read_into: Callable[[memoryview, int], None],
    start: int,
    dtype: torch.dtype,
    sizes: Sequence[int],
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Fill a tensor with a box of a larger tensor that a file stores in row-major order.

    Reads whole rows of the stored tensor, unless a row is longer than PIECE_BYTES. Reads directly
    into the target where target and file have the same bytes.

    Args:
        read_into: fills a buffer with the bytes of the file from an offset on.
        start: the byte at which the stored elements begin.
        dtype: dtype of the stored tensor.
        sizes: shape of the stored tensor.
        offsets: where in the stored tensor the box begins.
        target: a tensor with the shape of the box, of any dtype.
    """
    if not target.numel():
        return
    if not sizes:
        sizes, offsets, target = (1,), (0,), target[None]
    row_numel = math.prod(sizes[1:])
    row_bytes = row_numel * dtype.itemsize
    first = start + offsets[0] * row_bytes
    if _is_run(target, dtype, sizes):
        data = target.view(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), PIECE_BYTES):
            read_into(data[begin : begin + PIECE_BYTES], first + begin)
        return
    if row_bytes > PIECE_BYTES and len(sizes) > 1:
        for index, row in enumerate(target):
            read_box(read_into, first + index * row_bytes, dtype, sizes[1:], offsets[1:], row)
        return
    rows_max = PIECE_BYTES // row_bytes
    piece = mapped_tensor(min(rows_max, len(target)) * row_numel, dtype)
    for begin in range(0, len(target), rows_max):
        rows = target[begin : begin + rows_max]
        read = piece[: len(rows) * row_numel]
        read_into(read.view(torch.uint8).numpy().data, first + begin * row_bytes)
        box = Chunk((0, *offsets[1:]), tuple(rows.shape))
        rows.copy_(box.select(read.view(len(rows), *sizes[1:])))


def mapped_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of one dimension and at least one element, in a separate mapping.

    Its memory returns to the system when it is freed. malloc keeps memory that threads free.
    """
    buffer = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(buffer, dtype=dtype)


def _is_run(target: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """Return whether the bytes of a box in a CPU tensor are consecutive bytes of the file."""
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and target.is_contiguous()
        and tuple(target.shape[1:]) == tuple(sizes[1:])
    )
