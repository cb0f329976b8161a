"""Boxes of stored tensors, read in small pieces, compared with narrow() of torch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tierstore.checkpoint import dcp_reader
from tierstore.checkpoint.dcp_reader import StoredEntries, read_box
from tierstore.layout.chunks import Chunk


class Bytes:
    """A file in memory that records reads."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.reads: list[tuple[int, int]] = []

    def read_into(self, buffer: memoryview, offset: int) -> None:
        assert offset + len(buffer) <= len(self._data)
        buffer[:] = self._data[offset : offset + len(buffer)]
        self.reads.append((offset, len(buffer)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Sizes of a tensor; offsets and sizes of a box of it."""
    sizes = draw(st.lists(st.integers(0, 7), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, n - o)) for n, o in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


@given(
    cases(),
    st.integers(4, 200),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_box_equals_narrow(
    case: tuple[list[int], list[int], list[int]],
    piece_bytes: int,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
) -> None:
    sizes, offsets, lengths = case
    stored = torch.arange(math.prod(sizes)).remainder(251).to(dtype).view(sizes)
    file = Bytes(b"12345" + stored.reshape(-1).view(torch.uint8).numpy().tobytes())
    target = torch.full(lengths, 77, dtype=target_dtype)
    with mock.patch.object(dcp_reader, "PIECE_BYTES", piece_bytes):
        read_box(file.read_into, 5, dtype, sizes, offsets, target)
    expected = stored
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        expected = expected.narrow(dimension, offset, length)
    assert torch.equal(target, expected.to(target_dtype))
    assert all(nbytes <= piece_bytes for _, nbytes in file.reads)


@pytest.mark.parametrize(("rows", "expected"), [((10, 5), 5 * 12), ((0, 100), 1200)])
def test_only_the_rows_of_the_box_are_read(rows: tuple[int, int], expected: int) -> None:
    stored = torch.arange(300.0).view(100, 3)
    file = Bytes(stored.view(torch.uint8).numpy().tobytes())
    target = torch.empty(rows[1], 3)
    read_box(file.read_into, 0, torch.float32, (100, 3), (rows[0], 0), target)
    assert sum(nbytes for _, nbytes in file.reads) == expected
    assert torch.equal(target, stored[rows[0] : rows[0] + rows[1]])


def test_a_column_of_long_rows_is_read_alone() -> None:
    stored = torch.arange(4000.0).view(4, 1000)
    file = Bytes(stored.view(torch.uint8).numpy().tobytes())
    target: Any = torch.empty(4, 2)
    with mock.patch.object(dcp_reader, "PIECE_BYTES", 400):
        read_box(file.read_into, 0, torch.float32, (4, 1000), (0, 500), target)
    assert torch.equal(target, stored[:, 500:502])
    assert sum(nbytes for _, nbytes in file.reads) == 4 * 8


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """Shape of a tensor, and chunks that tile it, of other rows in each column."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    chunks = [Chunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        number = draw(st.integers(0, len(chunks) - 1))
        offsets, sizes = list(chunks[number].offsets), list(chunks[number].sizes)
        dimension = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dimension]))
        first = [*sizes]
        first[dimension] = cut
        chunks[number] = Chunk(tuple(offsets), tuple(first))
        offsets[dimension] += cut
        sizes[dimension] -= cut
        chunks.append(Chunk(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(chunks))


@given(tilings(), st.data())
def test_parts_are_those_that_dcp_finds_among_all_chunks(
    case: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject
) -> None:
    shape, chunks = case
    stored = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in chunks],
    )
    metadata = Metadata(state_dict_metadata={"key": stored}, storage_data={})
    slices: Any = SimpleNamespace(metadata=metadata)
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(
        data.draw(st.integers(0, size - offset))
        for size, offset in zip(shape, offsets, strict=True)
    )
    target = torch.empty(sizes)
    found = StoredEntries(Path(), slices).parts("key", Chunk(offsets, sizes), target)
    wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    expected = create_read_items_for_chunk_list("key", stored, [wanted])
    assert sorted((item for item, _ in found), key=repr) == sorted(expected, key=repr)
    for item, part in found:
        assert tuple(part.shape) == tuple(item.lengths)
