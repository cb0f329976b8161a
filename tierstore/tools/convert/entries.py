"""Entries: the tensors of a checkpoint, read in pieces whatever file they are in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tierstore.checkpoint.dcp_reader import read_box
from tierstore.errors import CorruptionError
from tierstore.inspection.reader import Reader
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.storage.paths import storage_errors

BUFFER = "(buffer)"
"""State of a tensor of the model that no param group has. No optimizer state has this name."""

Read = Callable[[Chunk, torch.Tensor], None]
"""Fill a contiguous CPU tensor of the chunk's shape, and of any dtype, with a chunk of a tensor
whose elements are consecutive in row-major order. Called by several threads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint."""

    parameter: str
    """Name of the parameter or buffer in the model."""
    state: str
    """MASTER for the weight, BUFFER, or the name of an optimizer state, such as "exp_avg"."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Read

    @property
    def key(self) -> tuple[str, str]:
        """The parameter and the state: no other entry has both."""
        return self.parameter, self.state

    @property
    def place(self) -> tuple[str, str]:
        """The key, with MASTER for BUFFER: without param groups the two look the same."""
        return self.parameter, MASTER if self.state == BUFFER else self.state

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> Entry:
        """Return the entry with elements that are rounded to another dtype as they are read."""
        return replace(self, dtype=dtype)


def pieces(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Chunk]:
    """Yield chunks that tile a tensor, in row-major order; each is consecutive in that order.

    Args:
        shape: of the tensor. A tensor without elements has no piece.
        itemsize: bytes of an element.
        limit: most bytes of a piece, unless one element has more.
    """
    nbytes = math.prod(shape) * itemsize
    if nbytes == 0:
        return
    if nbytes <= limit or not shape:
        yield Chunk((0,) * len(shape), tuple(shape))
        return
    row_bytes = nbytes // shape[0]
    if row_bytes <= limit or len(shape) == 1:
        rows_max = max(limit // row_bytes, 1)
        for row in range(0, shape[0], rows_max):
            sizes = (min(rows_max, shape[0] - row), *shape[1:])
            yield Chunk((row, *[0] * (len(shape) - 1)), sizes)
        return
    for row in range(shape[0]):
        for inner in pieces(shape[1:], itemsize, limit):
            yield Chunk((row, *inner.offsets), (1, *inner.sizes))


def flat_start(shape: Sequence[int], chunk: Chunk) -> int:
    """Return the position of the first element of a chunk in the flattened tensor."""
    start = 0
    for size, offset in zip(shape, chunk.offsets, strict=True):
        start = start * size + offset
    return start


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a source, opened for each read: a source may have more files than descriptors."""

    reader: Reader
    name: str

    @property
    def path(self) -> Path:
        """The path, for messages."""
        return self.reader.root / self.name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on.

        Raises:
            CorruptionError: the file is absent, a link or too short, or the disk fails.
            StorageError: the file cannot be opened.
        """
        try:
            with storage_errors("read", self.path), self.reader.open(self.name) as file:
                file.read_data_into(buffer, offset)
        except CorruptionError as error:
            raise CorruptionError(f"{self.path}: {error}") from error


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of a tensor whose raw elements are in a file, in row-major order."""

    chunk: Chunk
    file: StoredFile
    offset: int
    """The byte at which the elements begin."""


def read_stored(dtype: torch.dtype, stored: Sequence[StoredChunk]) -> Read:
    """Return the function that reads a tensor from chunks of this dtype that tile it."""

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        for part in stored:
            box = _intersection(chunk, part.chunk)
            if box is not None:
                read_box(
                    part.file.read_into,
                    part.offset,
                    dtype,
                    part.chunk.sizes,
                    box.within(part.chunk).offsets,
                    box.within(chunk).select(target),
                )

    return read


def _intersection(one: Chunk, other: Chunk) -> Chunk | None:
    starts = tuple(map(max, one.offsets, other.offsets))
    ends = [
        min(a + a_size, b + b_size)
        for a, a_size, b, b_size in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    ]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    return Chunk(starts, tuple(sizes)) if all(size > 0 for size in sizes) else None
