"""Stochastic rounding: up or down at random, so that the mean is the value.

The random bits of an element are a function of the name of its parameter, the state, the step and
the place of the element. They do not depend on tiers and partitions, and a resumed run repeats
them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch

import tierstore
from muon.kernels.rules import AnyState, kernels_for

_BITS = 16


class Chances:
    """Random numbers of the elements of a chunk.

    Args:
        key: names the parameter, the state and the step.
        shape: shape of the parameter.
        chunk: the elements.
    """

    def __init__(self, key: str, shape: Sequence[int], chunk: tierstore.pages.Chunk) -> None:
        self._key = key
        self._shape = shape
        self._chunk = chunk

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Chances:
        offsets, sizes = list(self._chunk.offsets), list(self._chunk.sizes)
        for dimension, part in enumerate(index if isinstance(index, tuple) else (index,)):
            start, stop, _ = part.indices(sizes[dimension])
            offsets[dimension] += start
            sizes[dimension] = stop - start
        return Chances(self._key, self._shape, tierstore.pages.Chunk(tuple(offsets), tuple(sizes)))

    @property
    def digest(self) -> int:
        """64 bits of the key, with a sign."""
        digest = hashlib.blake2b(self._key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    @property
    def first(self) -> tuple[int, int] | None:
        """The row-major index of the first row in the parameter, and the first column.

        None if rows of the chunk are not consecutive there, or the parameter has no dimensions.
        Example: in shape (3, 5, columns), a chunk of sizes (2, 5, columns) has rows 5 to 14 or 0 to
        9; the rows of a chunk of sizes (2, 3, columns) are not consecutive.
        """
        if not self._shape:
            return None
        chunk = self._chunk
        row, is_begun = 0, False
        of_rows = zip(self._shape[:-1], chunk.offsets[:-1], chunk.sizes[:-1], strict=True)
        for length, offset, size in of_rows:
            if is_begun and size != length:
                return None
            row = row * length + offset
            is_begun = is_begun or size > 1
        return row, chunk.offsets[-1]

    def bits(self, device: torch.device) -> torch.Tensor:
        """Return 16 random bits for each element: int32, of the shape of the chunk."""
        shape, chunk = self._shape, self._chunk
        rows = torch.zeros((), dtype=torch.int64, device=device)
        for dimension in range(len(shape) - 1):  # The row-major index of all but the last.
            offset, size = chunk.offsets[dimension], chunk.sizes[dimension]
            indices = torch.arange(offset, offset + size, device=device)
            stride = math.prod(shape[dimension + 1 : -1])
            rows = rows[..., None] + indices * stride
        x = rows.mul(GOLDEN_64).add_(self.digest)
        x = x.bitwise_xor_(x >> 29).mul_(MIX_64).bitwise_right_shift_(32).to(torch.int32)
        if shape:
            begin, size = chunk.offsets[-1], chunk.sizes[-1]
            kernels = kernels_for(device) if device.type == "cpu" else None
            if kernels is not None:
                bits: torch.Tensor = kernels.random_bits(x, begin, size)
                return bits
            columns = torch.arange(begin, begin + size, device=device)
            x = x[..., None] ^ columns.mul_(GOLDEN_32).to(torch.int32)
        # The finalizer of a 32-bit hash: https://nullprogram.com/blog/2018/07/31/.
        for shift, factor in ((16, MIX_32), (15, LAST_MIX_32)):
            shifted = (x >> shift).bitwise_and_((1 << 32 - shift) - 1)
            x = shifted.bitwise_xor_(x).mul_(factor)
        return x.bitwise_right_shift_(16).bitwise_and_((1 << _BITS) - 1)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> bits - 1 else value


GOLDEN_32 = _signed(0x9E3779B1, 32)
GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
MIX_64 = _signed(0xBF58476D1CE4E5B9, 64)
MIX_32 = 0x7FEB352D
LAST_MIX_32 = _signed(0x846CA68B, 32)


class Rounded:
    """A state that is written with stochastic rounding, for ``opened()``.

    Args:
        state: bfloat16, or encoded.
        chances: the random numbers of its elements.
    """

    __slots__ = ("chances", "state")

    def __init__(
        self, state: torch.Tensor | tierstore.pages.EncodedState, chances: Chances
    ) -> None:
        self.state = state
        self.chances = chances

    def read(self) -> torch.Tensor:
        """Return the values: float32, in memory of their own."""
        if isinstance(self.state, tierstore.pages.EncodedState):
            return self.state.read()
        return self.state.to(torch.float32)

    def write(self, values: torch.Tensor) -> None:
        """Round and keep float32 values."""
        bits = self.chances.bits(values.device)
        if isinstance(self.state, tierstore.pages.EncodedState):
            self.state.write(values, bits.to(torch.float32).mul_(2.0**-_BITS))
            return
        # The upper half of float32 is bfloat16. A sum in the lower half carries into it.
        rounded = (values.view(torch.int32) + bits).bitwise_and_(-1 << _BITS).view(torch.float32)
        self.state.copy_(torch.where(values.isnan(), values, rounded))

    def __getitem__(self, index: Any) -> Rounded:
        return Rounded(self.state[index], self.chances[index])


def rounded(state: Any, key: str, shape: Sequence[int], chunk: tierstore.pages.Chunk) -> AnyState:
    """Return a state for a step. In fewer bits than float32 it has stochastic rounding.

    Args:
        state: of the chunk.
        key: names the parameter, the state and the step.
        shape: of the parameter.
        chunk: the elements.
    """
    if isinstance(state, torch.Tensor) and state.dtype != torch.bfloat16:
        return state
    return Rounded(state, Chances(key, shape, chunk))
