"""Encodings of ``tierstore`` and random bits of ``muon.kernels.rounding`` as functions of Triton.

Results have the same bits as the torch operations there, in kernels that are compiled with
``enable_fp_fusion=False``. Otherwise a product and a sum would be rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muon.kernels import rounding
from muon.kernels.gpu import divided, square_root

_GOLDEN_32 = tl.constexpr(rounding.GOLDEN_32)
_GOLDEN_64 = tl.constexpr(rounding.GOLDEN_64)
_MIX_64 = tl.constexpr(rounding.MIX_64)
_MIX_32 = tl.constexpr(rounding.MIX_32)
_LAST_MIX_32 = tl.constexpr(rounding.LAST_MIX_32)


@triton.jit
def tile(rows, columns, height: tl.constexpr, width: tl.constexpr):
    """Return rows, columns, places, a mask of places, places of scales, and a mask of rows."""
    blocks = tl.cdiv(columns, width)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64) * height + tl.arange(0, height)[:, None]
    column = block.to(tl.int64) * width + tl.arange(0, width)[None, :]
    has_row = row < rows
    return (
        row,
        column,
        row * columns + column,
        has_row & (column < columns),
        row * blocks + block,
        has_row,
    )


@triton.jit
def _float(bits):
    return tl.cast(bits, tl.float32, bitcast=True)


@triton.jit
def _magnitude(value):
    """Return the bits of magnitudes, in the same order: 0x7F800000 is infinity, NaNs are larger."""
    return tl.cast(value, tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def random_bits(row, column, digest):
    """Return the same bits as ``muon.kernels.rounding.Chances``."""
    x = row * _GOLDEN_64 + digest
    x = (x ^ (x >> 29)) * _MIX_64
    x = (x >> 32).to(tl.int32) ^ (column.to(tl.int32) * _GOLDEN_32)
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_32
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _LAST_MIX_32
    return (x >> 16) & 0xFFFF


@triton.jit
def joined(parameter_at, remainder_at, places, inside):
    """Return the masters of parameters and remainders."""
    high = tl.load(parameter_at + places, mask=inside).to(tl.int32) << 16
    low = tl.load(remainder_at + places, mask=inside).to(tl.int32)
    if remainder_at.dtype.element_ty == tl.int8:
        low = low << 8
    is_number = ((high + low) & 0x7FFFFFFF) <= 0x7F800000
    return _float(high + tl.where(is_number, low, 0))


@triton.jit
def store_split(master, parameter_at, remainder_at, places, inside):
    """Store masters as parameters and remainders."""
    bits = tl.cast(master, tl.int32, bitcast=True)
    # A NaN may have only low bits set. Rounding could make it a number.
    bits = tl.where(_magnitude(master) > 0x7F800000, (bits & -0x80000000) | 0x7FC00000, bits)
    remainder = bits
    if remainder_at.dtype.element_ty == tl.int8:
        bits = bits + 0x80
        remainder = bits >> 8
    # Narrowing drops the upper bits.
    tl.store(remainder_at + places, remainder.to(remainder_at.dtype.element_ty), mask=inside)
    tl.store(parameter_at + places, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)


@triton.jit
def _power(number):
    square = number * number
    return square * square


@triton.jit
def roots(numbers_at, scale_at, places, inside, scale_places, has_row):
    """Return the values of fourth roots with a scale for each row."""
    number = tl.load(numbers_at + places, mask=inside).to(tl.float32)
    scale = tl.load(scale_at + scale_places, mask=has_row)
    power = _power(number)
    return tl.where(number < 0, -power, power) * scale


@triton.jit
def store_roots(
    value,
    chance,
    numbers_at,
    scale_at,
    places,
    inside,
    scale_places,
    has_row,
    last: tl.constexpr,
):
    """Encode values. A chance of 0.5 rounds to the nearest number."""
    largest = tl.max(tl.where(inside, _magnitude(value), 0), axis=1)[:, None]
    top = tl.full(largest.shape, 1.0 * last * last * last * last, tl.float32)
    scale = divided(_float(largest), top)
    scale = tl.where(largest < 0x7F800000, scale, float("nan"))
    tl.store(scale_at + scale_places, scale, mask=has_row)
    # Blocks of zeros, and of numbers too small for a scale, have the scale 0.
    ratio = divided(value, tl.where(scale > 0, scale, 1.0))
    ratio = tl.where(_magnitude(ratio) < 0x7F800000, ratio, 0.0)
    size = tl.abs(ratio)
    below = tl.minimum(tl.floor(square_root(square_root(size))), 1.0 * last - 1.0)
    low = _power(below)
    part = divided(size - low, _power(below + 1.0) - low)  # Between the neighbours, in [0, 1].
    number = below.to(tl.int32) + (part > chance).to(tl.int32)
    if last == 127:
        number = tl.where(ratio < 0, -number, number)
    else:
        number = tl.where(ratio > 0, tl.maximum(number, 1), 0)  # Adam divides by its root.
    tl.store(numbers_at + places, number.to(numbers_at.dtype.element_ty), mask=inside)


@triton.jit
def moment(at, scale_at, places, inside, scale_places, has_row, kind: tl.constexpr):
    """Return the values of a moment."""
    if kind == "float32":
        return tl.load(at + places, mask=inside)
    elif kind == "bfloat16":
        return _float(tl.load(at + places, mask=inside).to(tl.int32) << 16)
    else:
        return roots(at, scale_at, places, inside, scale_places, has_row)


@triton.jit
def store_moment(
    value, bits, at, scale_at, places, inside, scale_places, has_row, kind: tl.constexpr
):
    """Round a moment at random and keep it."""
    if kind == "float32":
        tl.store(at + places, value, mask=inside)
    elif kind == "bfloat16":
        # The upper half of float32. A sum in the lower half carries into it.
        rounded = (tl.cast(value, tl.int32, bitcast=True) + bits) >> 16
        rounded = tl.where(_magnitude(value) > 0x7F800000, 0x7FC0, rounded)
        tl.store(at + places, rounded.to(tl.int16), mask=inside)
    else:
        chance = bits.to(tl.float32) * 1.52587890625e-05  # 2^-16
        last: tl.constexpr = 127 if kind == "int8" else 255
        store_roots(value, chance, at, scale_at, places, inside, scale_places, has_row, last)
