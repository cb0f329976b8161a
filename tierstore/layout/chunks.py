"""Chunks: rectangles of a tensor, and flat ranges of elements as rectangles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rectangle [offsets[d], offsets[d] + sizes[d]) of an N-d tensor, in elements.

    A 0-d tensor has one chunk, ``Chunk((), ())``, of one element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"offsets and sizes must have the same length, got {self}")
        if min((*self.offsets, *self.sizes), default=0) < 0:
            raise ValueError(f"offsets and sizes must not be negative, got {self}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def lies_within(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape has the rectangle."""
        return len(shape) == len(self.sizes) and all(
            offset + size <= extent
            for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def within(self, outer: Chunk) -> Chunk:
        """Return the same rectangle with offsets relative to a chunk that contains it."""
        pairs = zip(self.offsets, outer.offsets, strict=True)
        return Chunk(tuple(own - begin for own, begin in pairs), self.sizes)

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this rectangle of ``tensor``, of shape ``sizes``.

        Raises:
            ValueError: the rectangle does not lie within the tensor.
        """
        if self.sizes == tensor.shape and not any(self.offsets):
            return tensor
        if not self.lies_within(tensor.shape):
            raise ValueError(f"{self} does not lie within a tensor of shape {list(tensor.shape)}")
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor


def storage_order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the dimensions of a strided tensor from outermost to innermost in memory."""
    return sorted(range(len(shape)), key=lambda dim: -strides[dim])


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a strided tensor is row-major without gaps in its storage order."""
    order = storage_order(shape, strides)
    sizes = [shape[dim] for dim in order]
    return not math.prod(sizes) or all(
        size <= 1 or strides[dim] == math.prod(sizes[at + 1 :])
        for at, (dim, size) in enumerate(zip(order, sizes, strict=True))
    )


def flat_range_chunks(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """Return the elements [start, stop) of the row-major order as chunks, in that order.

    Each chunk is contiguous in the flat order. A range of an N-d tensor has at most 2N - 1 chunks:
    from ``start`` on, sub-tensors grow; then they shrink up to ``stop``.

    Raises:
        ValueError: a size is negative, or the range does not lie within the tensor.
    """
    numel = math.prod(shape)
    if min(shape, default=0) < 0:
        raise ValueError(f"sizes must not be negative, got shape {list(shape)}")
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"the range [{start}, {stop}) does not lie within the {numel} elements of "
            f"shape {list(shape)}"
        )
    if start == stop:
        return []
    if start == 0 and stop == numel:
        return [Chunk((0,) * len(shape), tuple(shape))]
    # Elements from one index of a dimension to the next. No size is 0 from here on.
    row = math.prod(shape[1:])
    if start % row == stop % row == 0:  # The most common case.
        first = start // row, *[0] * (len(shape) - 1)
        return [Chunk(first, (stop // row - start // row, *shape[1:]))]
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    chunks = []
    while start < stop:
        # The outermost dimension in which a complete row starts at this position and fits.
        dimension = next(
            d for d, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop
        )
        stride = strides[dimension]
        index = [start // strides[d] % shape[d] for d in range(len(shape))]
        rows = min(shape[dimension] - index[dimension], (stop - start) // stride)
        sizes = (*[1] * dimension, rows, *shape[dimension + 1 :])
        chunks.append(Chunk(tuple(index), sizes))
        start += rows * stride
    return chunks
