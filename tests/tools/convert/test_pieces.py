"""Pieces tile a tensor in order, and come through the pipeline in order, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.held import Held
from tierstore import BudgetError, CorruptionError
from tierstore.pages import Chunk
from tierstore.tools.convert.entries import Entry, flat_start, pieces
from tierstore.tools.convert.pipeline import MEMORY_MIN, Piece, stream

SHAPES = st.lists(st.integers(0, 7), max_size=5).map(tuple)


@given(shape=SHAPES, itemsize=st.sampled_from([1, 2, 4, 8]), limit=st.integers(1, 300))
def test_pieces_tile_the_tensor_in_order(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    flat = torch.arange(math.prod(shape))
    found = list(pieces(shape, itemsize, limit))
    assert all(chunk.numel * itemsize <= max(limit, itemsize) for chunk in found)
    taken = [chunk.select(flat.view(shape)).reshape(-1) for chunk in found]
    assert torch.equal(torch.cat([flat[:0], *taken]), flat)
    starts = [flat_start(shape, chunk) for chunk in found]
    assert starts == [int(elements[0]) for elements in taken]


def entry(name: str, tensor: torch.Tensor) -> Entry:
    def read(chunk: Chunk, target: torch.Tensor) -> None:
        target.copy_(chunk.select(tensor))

    return Entry(
        parameter=name, state="master", dtype=tensor.dtype, shape=tuple(tensor.shape), read=read
    )


def ignore(piece: Piece) -> None:
    pass


def test_stream_yields_all_elements_in_order() -> None:
    tensors = [torch.randn(3, 2**21), torch.zeros(0, 4), torch.tensor(7.0), torch.randn(5, 6)]
    entries = [entry(str(index), tensor) for index, tensor in enumerate(tensors)]
    found: dict[str, list[torch.Tensor]] = {item.parameter: [] for item in entries}
    order = []
    written: list[tuple[str, Chunk, torch.Tensor]] = []

    def put(piece: Piece) -> None:
        written.append((piece.entry.parameter, piece.chunk, piece.tensor.clone()))

    for piece in stream(entries, MEMORY_MIN, put):
        assert piece.tensor.is_contiguous()
        assert piece.tensor.shape == piece.chunk.sizes
        found[piece.entry.parameter].append(piece.tensor.reshape(-1).clone())
        order.append(piece.entry.parameter)
    assert order == sorted(order)
    assert len(found["0"]) > 1
    for index, tensor in enumerate(tensors):
        elements = torch.cat([tensor.reshape(-1)[:0], *found[str(index)]])
        assert torch.equal(elements, tensor.reshape(-1))
    assert [name for name, _, _ in written] == order
    for name, chunk, elements in written:
        assert torch.equal(elements, chunk.select(tensors[int(name)]))


def test_stream_casts_as_it_reads() -> None:
    values = torch.randn(100)
    (piece,) = stream([entry("a", values).cast(torch.bfloat16)], MEMORY_MIN, ignore)
    assert torch.equal(piece.tensor, values.to(torch.bfloat16))


def test_stream_ends_with_the_first_error_and_leaves_no_thread() -> None:
    def fail(chunk: Chunk, target: torch.Tensor) -> None:
        raise CorruptionError("the disk fails")

    bad = Entry(parameter="b", state="master", dtype=torch.float32, shape=(2,), read=fail)
    before = Held()
    with pytest.raises(CorruptionError, match="the disk fails"):
        list(stream([entry("a", torch.ones(2)), bad, bad], MEMORY_MIN, ignore))
    before.assert_nothing_new()


def test_stream_ends_with_the_error_of_a_write_and_leaves_no_thread() -> None:
    seen = []

    def fail(piece: Piece) -> None:
        seen.append(piece.entry.parameter)
        if piece.entry.parameter == "b":
            raise OSError("the disk is full")

    before = Held()
    entries = [entry(name, torch.ones(2)) for name in "abcde" * 20]
    with pytest.raises(OSError, match="the disk is full"):
        list(stream(entries, MEMORY_MIN, fail))
    before.assert_nothing_new()
    assert seen[:2] == ["a", "b"]
    assert len(seen) < len(entries)


def test_the_error_of_the_last_write_is_raised() -> None:
    def fail(piece: Piece) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        list(stream([entry("a", torch.ones(2))], MEMORY_MIN, fail))


def test_stream_that_is_left_early_leaves_no_thread() -> None:
    before = Held()
    pieces_ = stream([entry("a", torch.ones(2))] * 100, MEMORY_MIN, ignore)
    next(pieces_)
    pieces_.close()  # type: ignore[attr-defined]
    before.assert_nothing_new()


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"at least 64\.0 MiB of memory, got 1\.0 MiB"):
        next(stream([], 2**20, ignore))
