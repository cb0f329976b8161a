from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.layout.chunks import Chunk, flat_range_chunks


def positions(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that holds the flat position of each of its elements."""
    return torch.arange(math.prod(shape)).reshape(shape)


def assert_covers(shape: tuple[int, ...], start: int, stop: int) -> None:
    tensor = positions(shape)
    chunks = flat_range_chunks(shape, start, stop)
    found = [chunk.select(tensor).flatten().tolist() for chunk in chunks]
    # In order, once each, nothing else; and no chunk has a gap in it.
    assert list(itertools.chain.from_iterable(found)) == list(range(start, stop))
    assert all(part == list(range(part[0], part[-1] + 1)) for part in found)
    assert len(chunks) <= max(1, 2 * len(shape) - 1)
    assert [chunk.numel for chunk in chunks] == [len(part) for part in found]


SMALL_SHAPES = [
    shape
    for ndim in range(5)
    for shape in itertools.product(range(4 if ndim < 4 else 3), repeat=ndim)
]


def test_every_range_of_every_small_shape() -> None:
    for shape in SMALL_SHAPES:
        for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
            assert_covers(shape, start, stop)


@given(st.lists(st.integers(1, 9), max_size=5), st.data())
def test_any_range(sizes: list[int], data: st.DataObject) -> None:
    numel = math.prod(sizes)
    start = data.draw(st.integers(0, numel))
    assert_covers(tuple(sizes), start, data.draw(st.integers(start, numel)))


def test_worst_case_has_2n_minus_1_chunks() -> None:
    assert flat_range_chunks((4, 4, 4), 7, 53) == [
        Chunk((0, 1, 3), (1, 1, 1)),
        Chunk((0, 2, 0), (1, 2, 4)),
        Chunk((1, 0, 0), (2, 4, 4)),
        Chunk((3, 0, 0), (1, 1, 4)),
        Chunk((3, 1, 0), (1, 1, 1)),
    ]


def test_whole_tensor_is_one_chunk() -> None:
    for shape in [(), (5,), (1, 1), (2, 3, 4)]:
        expected = [Chunk((0,) * len(shape), shape)]
        assert flat_range_chunks(shape, 0, math.prod(shape)) == expected


def test_sizes_beyond_32_bits() -> None:
    shape = (2**20, 2**20)
    first, middle, last = flat_range_chunks(shape, 2**39 + 5, 2**40 - 5)
    assert first == Chunk((2**19, 5), (1, 2**20 - 5))
    assert middle == Chunk((2**19 + 1, 0), (2**19 - 2, 2**20))
    assert last == Chunk((2**20 - 1, 0), (1, 2**20 - 5))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 2)])
def test_empty_range_has_no_chunks(shape: tuple[int, ...]) -> None:
    assert flat_range_chunks(shape, 0, 0) == []


@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [((2, 3), -1, 2), ((2, 3), 0, 7), ((2, 3), 4, 3), ((), 0, 2), ((0, 3), 0, 1), ((-2, -3), 0, 6)],
)
def test_range_outside_is_refused(shape: tuple[int, ...], start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"shape \["):
        flat_range_chunks(shape, start, stop)


def test_select_is_a_view() -> None:
    tensor = positions((3, 4))
    Chunk((1, 2), (2, 2)).select(tensor).fill_(-1)
    assert tensor.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, 9, -1, -1]]
    scalar = torch.tensor(1.0)
    Chunk((), ()).select(scalar).fill_(2.0)
    assert scalar.item() == 2.0


@pytest.mark.parametrize(
    "chunk", [Chunk((0,), (3,)), Chunk((0, 0, 0), (1, 1, 1)), Chunk((2, 0), (2, 4)), Chunk((), ())]
)
def test_select_outside_is_refused(chunk: Chunk) -> None:
    with pytest.raises(ValueError, match="does not lie within a tensor of shape"):
        chunk.select(positions((3, 4)))


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((0,), (1, 1)), ((), (1,)), ((-1, 0), (1, 1)), ((0, 0), (1, -1))]
)
def test_impossible_chunk_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="offsets and sizes must"):
        Chunk(offsets, sizes)


def test_chunks_are_values() -> None:
    assert len({Chunk((0,), (2,)), Chunk((0,), (2,)), Chunk((0,), torch.Size([2]))}) == 1
