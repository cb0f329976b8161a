"""A part of a stored tensor, read without the rest of it and through little memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

PIECE_BYTES = 8 * 2**20
"""Most that is read at once."""


class Source(Protocol):
    """A file that is open."""

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
    """Fill a tensor with a box of a larger one, whose elements lie in a file in row-major order.

    Where the box has whole rows, just these are read; else what lies between its parts, too.

    Args:
        file: the file.
        start: the byte of it at which the elements begin.
        dtype: theirs.
        sizes: shape of the whole tensor.
        offsets: where in it the box begins.
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
