"""tiling_faults(), compared with counting in an array."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.inspection.coverage import tiling_faults
from tierstore.layout.chunks import Chunk, flat_range_chunks

SHAPES = st.lists(st.integers(0, 5), max_size=3)


def faults_of(shape: list[int], chunks: list[Chunk]) -> list[str]:
    return list(tiling_faults(shape, chunks))


def counts(shape: list[int], chunks: list[Chunk]) -> np.ndarray[tuple[int, ...], np.dtype[np.int_]]:
    """Count how often each element is covered, with a margin for elements outside."""
    array = np.zeros([extent + 8 for extent in shape], dtype=np.int_)
    for chunk in chunks:
        array[
            tuple(
                slice(offset, offset + size)
                for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
        ] += 1
    return array


@st.composite
def tensors_with_chunks(draw: st.DrawFn) -> tuple[list[int], list[Chunk]]:
    """Draw an exact tiling, or one with a chunk moved, added or left out."""
    shape = draw(SHAPES)
    numel = int(np.prod(shape, dtype=int))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=4))), numel]
    chunks = [chunk for a, b in pairwise(cuts) for chunk in flat_range_chunks(shape, a, b)]
    for _ in range(draw(st.integers(0, 2))):
        offsets = tuple(draw(st.integers(0, 5)) for _ in shape)
        sizes = tuple(draw(st.integers(0, 3)) for _ in shape)
        position = draw(st.integers(0, len(chunks)))
        chunks[position : position + draw(st.integers(0, 1))] = [Chunk(offsets, sizes)]
    return shape, draw(st.permutations(chunks))


@given(tensors_with_chunks())
def test_against_counting(tensor: tuple[list[int], list[Chunk]]) -> None:
    shape, chunks = tensor
    count = counts(shape, chunks)
    inside = tuple(slice(0, extent) for extent in shape)
    outside = count.sum() - count[inside].sum()
    exactly_once = outside == 0 and bool((count[inside] == 1).all())
    assert (faults_of(shape, chunks) == []) == exactly_once


@pytest.mark.parametrize(
    ("shape", "chunks", "expected"),
    [
        ([4], [], "4 of 4 elements of the tensor [4] are in no chunk"),
        ([4], [Chunk((1,), (3,))], "1 of 4 elements"),
        ([4], [Chunk((0,), (5,))], "does not lie within"),
        ([4], [Chunk((0,), (4,)), Chunk((4,), (1,))], "[4] of size [1] does not lie within"),
        ([4], [Chunk((0,), (3,)), Chunk((2,), (2,))], "[0] of size [3] and the chunk at [2]"),
        ([2, 2], [Chunk((0, 0), (2, 2)), Chunk((1, 1), (1, 1))], "overlap"),
        ([], [], "1 of 1 elements"),
        ([], [Chunk((), ()), Chunk((), ())], "overlap"),
    ],
)
def test_messages_of_faults(shape: list[int], chunks: list[Chunk], expected: str) -> None:
    (found,) = faults_of(shape, chunks)
    assert expected in found


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ([], [Chunk((), ())]),
        ([0, 4], []),
        ([0, 4], [Chunk((0, 0), (0, 4))]),
        ([3], [Chunk((0,), (3,)), Chunk((3,), (0,)), Chunk((3,), (0,))]),
    ],
)
def test_without_elements(shape: list[int], chunks: list[Chunk]) -> None:
    assert faults_of(shape, chunks) == []


def calls_of(function: Callable[[], object]) -> int:
    """Return how many Python functions a call enters."""
    entered = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("grid", [(2000, 1), (1, 2000), (44, 44)])
def test_many_chunks(grid: tuple[int, int]) -> None:
    """Sharded along either dimension or both, as by many ranks, in much less than n * n steps."""
    chunks = [Chunk((row * 3, column * 5), (3, 5)) for row, column in product(*map(range, grid))]
    random.Random(0).shuffle(chunks)
    shape = [3 * grid[0], 5 * grid[1]]
    assert calls_of(lambda: faults_of(shape, chunks)) < 10 * len(chunks) * (min(grid) + 2)
    assert faults_of(shape, chunks) == []
    (found,) = faults_of(shape, chunks[1:])
    assert "15 of" in found
    (found,) = faults_of(shape, [*chunks, chunks[0]])
    assert "overlap" in found
