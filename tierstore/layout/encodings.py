"""Encodings: forms of states that take fewer bytes in a page than their values.

An encoding keeps one or more tensors for a state, the *stored* tensors. An EncodedState reads and
writes the values through these tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from typing_extensions import override

from tierstore.layout import encoding_kernels
from tierstore.layout.chunks import Chunk

MASTER = "master"
"""Name of the state that every parameter has: the value that a step updates."""

REMAINDER = "master_remainder"
"""Name of the stored tensor that, together with the parameter, makes the master."""


BLOCK_COLUMNS = 256
"""Columns of a parameter that share one scale of a state in 8 bits."""

_INFINITY = 0x7F800000  # In float32. Larger numbers, without the sign, are NaNs.

# torch takes roots with MKL, and MKL chooses the kernel in the first call. If two threads make that
# call, one may get a kernel with errors of 1e-4. Each optimizer with a store imports this module.
for _dtype in (torch.float32, torch.float64):
    torch.ones(1, dtype=_dtype, device="cpu").sqrt()


class StoredTensor(NamedTuple):
    """A tensor that pages keep for a state."""

    name: str
    """Name of the state, unless the state is encoded."""
    dtype: torch.dtype
    columns: int = 1
    """Columns of the parameter that share one element."""
    shape: tuple[int, ...] | None = None
    """Shape of the state, if it differs from the parameter."""
    shared: tuple[bool, ...] | None = None
    """For a state along the parameter: for each dimension, whether all its indices share an
    element. See PagedParameter.shapes."""

    @property
    def is_free(self) -> bool:
        """True if the state does not lie along the parameter."""
        return self.shape is not None and self.shared is None

    def chunk(self, chunk: Chunk) -> Chunk:
        """Return the elements that belong to a chunk of the parameter. The chunk cuts no block.

        In a state along the parameter, an element stands for a part of the parameter, such as a
        row. Every chunk that overlaps this part has a copy of the element. A free state belongs to
        the whole parameter.
        """
        if self.is_free:
            assert self.shape is not None
            return Chunk((0,) * len(self.shape), self.shape)
        if self.shared is not None:
            places = list(zip(self.shared, chunk.offsets, chunk.sizes, strict=True))
            return Chunk(
                tuple(0 if shared else offset for shared, offset, _ in places),
                tuple(1 if shared else size for shared, _, size in places),
            )
        if self.columns == 1:
            return chunk
        first, size = chunk.offsets[-1], chunk.sizes[-1]
        assert first % self.columns == 0
        first, size = first // self.columns, -(-size // self.columns)
        return Chunk((*chunk.offsets[:-1], first), (*chunk.sizes[:-1], size))

    def is_copy(self, chunk: Chunk) -> bool:
        """Return whether an earlier chunk of the parameter has the same elements."""
        pairs = zip(self.shared or (), chunk.offsets, strict=False)
        return any(shared and at > 0 for shared, at in pairs)

    def numel_of(self, numel: int, shape: Sequence[int]) -> int:
        """Return the approximate number of elements for consecutive elements of a parameter.

        Args:
            numel: number of elements of the parameter.
            shape: shape of the parameter.
        """
        if self.shape is None:
            columns = max(1, math.prod(shape[-1:]))
            return min(numel, -(-numel // columns) * -(-columns // self.columns))
        whole = math.prod(self.shape)
        if self.shared is None:
            return whole
        kept = max((d for d, shared in enumerate(self.shared) if not shared), default=-1)
        return min(-(-numel // max(1, math.prod(shape[kept + 1 :]))), whole)


class EncodedState(ABC):
    """A state of a chunk whose values are encoded in the page.

    To change a part, an optimizer calls ``values = state[part].read()``, computes, and calls
    ``state[part].write(values)``.
    """

    __slots__ = ()

    BLOCK_COLUMNS: ClassVar[int] = BLOCK_COLUMNS
    """Slices of a state in 8 bits begin at multiples of this number of columns. They end at
    multiples or at the end of a row."""

    @property
    @abstractmethod
    def stored(self) -> Mapping[str, torch.Tensor]:
        """The stored tensors by name."""

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Return the values, float32 or wider, to be changed in place."""

    @abstractmethod
    def write(self, values: torch.Tensor, chances: torch.Tensor | None = None) -> None:
        """Encode values.

        Args:
            values: values of the dtype and shape that read() returns.
            chances: float32 in [0, 1), of the shape of the state. Each value is then rounded up or
                down. The mean over all chances is the value. None: round to the nearest number.
        """

    @abstractmethod
    def __getitem__(self, index: Any) -> EncodedState:
        """Return the state of some rows and columns, selected by slices as in a tensor."""

    @abstractmethod
    def zero_(self) -> None:
        """Encode zeros; for a master, encode the parameter."""


class JoinedState:
    """A free state that takes several records.

    Args:
        parts: for each record, its place in the state and its tensor.
        shape: shape of the state.
    """

    __slots__ = ("parts", "shape")

    def __init__(self, parts: Sequence[tuple[Chunk, torch.Tensor]], shape: Sequence[int]) -> None:
        self.parts = parts
        self.shape = torch.Size(shape)

    def read(self) -> torch.Tensor:
        """Return a copy of the state."""
        _, first = self.parts[0]
        whole = torch.empty(self.shape, dtype=first.dtype, device=first.device)
        for chunk, part in self.parts:
            chunk.select(whole).copy_(part)
        return whole

    def write(self, values: torch.Tensor) -> None:
        """Set the state to values of any dtype and device."""
        for chunk, part in self.parts:
            part.copy_(chunk.select(values))

    def zero_(self) -> None:
        """Set all elements to 0."""
        for _, part in self.parts:
            part.zero_()


AnyState: TypeAlias = torch.Tensor | EncodedState | JoinedState


class Encoding(ABC):
    """A form of a state in pages."""

    @abstractmethod
    def stored(self, state: str) -> Sequence[StoredTensor]:
        """Return the stored tensors of a state."""

    @abstractmethod
    def over(self, state: str, tensors: Mapping[str, torch.Tensor]) -> EncodedState:
        """Return a state over its stored tensors, given all tensors of a chunk by name."""


class SplitMaster(EncodedState):
    """A float32 master, stored as the parameter and the bits that rounding takes away.

    The parameter is the master rounded to bfloat16, halves away from zero. The remainder is the
    difference of their bits, a number from -0x8000 to 0x7fff. Parameter plus remainder is the
    master, bit for bit. If halves rounded to even, two masters would share a pair: 0x3f808000 and
    0x3f7f8000 would both round to 0x3f80, by half a unit. Example::

        master 0x3f7f9000 = parameter 0x3f800000 + remainder -0x7000

    A remainder of 8 bits is the upper byte of this difference, for a master rounded to 24 bits. A
    NaN stays a NaN and keeps only its sign.

    Args:
        parameter: bfloat16, of any shape.
        remainder: int16 or int8, of the same shape.
    """

    __slots__ = ("_parameter", "_remainder")

    def __init__(self, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
        assert (parameter.shape, parameter.dtype) == (remainder.shape, torch.bfloat16)
        self._parameter = parameter
        self._remainder = remainder

    @property
    @override
    def stored(self) -> Mapping[str, torch.Tensor]:
        return {MASTER: self._parameter, REMAINDER: self._remainder}

    @override
    def read(self) -> torch.Tensor:
        if encoding_kernels.fit(self._parameter, self._remainder):
            return encoding_kernels.decode_split(self._parameter, self._remainder)
        # Outside of a step, the parameter may be on another device than the page.
        device = self._remainder.device
        high = self._parameter.view(torch.int16).to(device, torch.int32).bitwise_left_shift_(16)
        low = self._remainder.to(torch.int32)
        if self._shift:
            low.bitwise_left_shift_(self._shift)
        # A program may have changed the parameter, for example to zero, but not the remainder. The
        # sum may then be a NaN. In this case the parameter is the master. Integers are several
        # times faster than bools.
        is_number = (
            (high + low).bitwise_and_(0x7FFFFFFF).sub_(_INFINITY + 1).bitwise_right_shift_(31)
        )
        return high.add_(low.bitwise_and_(is_number)).view(torch.float32)

    @override
    def write(self, values: torch.Tensor, chances: torch.Tensor | None = None) -> None:
        assert chances is None  # The rounding of a parameter follows from its master.
        if _fit([values], self._parameter, self._remainder):
            encoding_kernels.encode_split(values, self._parameter, self._remainder)
            return
        # A NaN may have only low bits set. Rounding could make it a number.
        numbers = torch.nan_to_num(values, math.nan, math.inf, -math.inf).copysign_(values)
        bits = numbers.view(torch.int32)
        if self._shift:
            bits.add_(1 << self._shift - 1)
        # Narrowing an integer drops its upper bits.
        self._remainder.copy_(bits >> self._shift if self._shift else bits)
        self._parameter.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))

    def drop_remainders(self, before: torch.Tensor) -> torch.Tensor:
        """Set the master to the parameter where the parameter was changed.

        Args:
            before: bfloat16, the parameter for which the remainder was computed.

        Returns:
            Bool of shape (): whether any element was changed.
        """
        now = self._parameter.view(torch.int16).to(before.device)
        changed = now != before.view(torch.int16)
        self._remainder.masked_fill_(changed, 0)
        return changed.any()

    @override
    def __getitem__(self, index: Any) -> SplitMaster:
        return SplitMaster(self._parameter[index], self._remainder[index])

    @override
    def zero_(self) -> None:
        self._remainder.zero_()

    @property
    def _shift(self) -> int:
        """Number of bits of the difference that the remainder lacks."""
        return 16 - 8 * self._remainder.itemsize


class RootState(EncodedState):
    """Values stored as fourth powers of whole numbers, times a scale for each block of columns.

    The scale is the largest magnitude in the block divided by the fourth power of the largest
    number. The spacing of values shrinks with their size, so small elements beside a large one stay
    accurate. Signed numbers are -127 to 127: the spacing is 3.1% at the largest magnitude, 10% at a
    hundredth of it, and 56% at a hundred-thousandth. Unsigned numbers are 0 to 255: 1.6%, 5%, 28%.
    Adam divides by the root of an unsigned value, so a value above 0 is never rounded to 0, unless
    the largest value in its block is about 1e-35 or less.

    A value gets the same number wherever it is computed. All operations except roots are exact or
    rounded by IEEE 754. Roots may be a few units too large. This has no effect: a value just below
    a fourth power is rounded to it in any case, with chances of 16 bits. A block with a number that
    is not finite is NaN.

    Args:
        name: name of the state.
        numbers: int8 for signed values, uint8 for values of at least 0; shape (..., columns).
        scales: float32, shape (..., blocks): one for each BLOCK_COLUMNS columns.
    """

    __slots__ = ("_name", "_numbers", "_scales")

    def __init__(self, name: str, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        blocks = (*numbers.shape[:-1], -(-numbers.shape[-1] // BLOCK_COLUMNS))
        assert (scales.shape, scales.dtype) == (blocks, torch.float32)
        self._name = name
        self._numbers = numbers
        self._scales = scales

    @property
    @override
    def stored(self) -> Mapping[str, torch.Tensor]:
        names = (stored.name for stored in _block_tensors(self._name, self._numbers.dtype))
        return dict(zip(names, (self._numbers, self._scales), strict=True))

    @override
    def read(self) -> torch.Tensor:
        if encoding_kernels.fit(self._numbers, self._scales):
            return encoding_kernels.decode_blocks(self._numbers, self._scales)
        values = self._numbers.to(torch.float32)
        values = values.square().square_().copysign_(values)
        for of_blocks, scales in _blocks(values, self._scales):
            of_blocks.mul_(scales)
        return values

    @override
    def write(self, values: torch.Tensor, chances: torch.Tensor | None = None) -> None:
        given = [values] if chances is None else [values, chances]
        if _fit(given, self._numbers) and encoding_kernels.fit(self._scales):
            encoding_kernels.encode_blocks(values, chances, self._numbers, self._scales)
            return
        # Divide by a tensor: for a Python number, a GPU multiplies by the reciprocal.
        top = torch.full((), self._largest**4, dtype=torch.float32, device=values.device)
        ratios = torch.empty_like(values)
        pairs = zip(_blocks(values, self._scales), _blocks(ratios, self._scales), strict=True)
        for (of_blocks, scales), (target, _) in pairs:
            largest = of_blocks.abs().amax(-1, keepdim=True)  # (..., blocks, 1)
            scale = (largest / top).masked_fill_(~largest.isfinite(), torch.nan)
            scales.copy_(scale)
            # Blocks of zeros, and of numbers too small for a scale, have the scale 0.
            torch.div(of_blocks, torch.where(scale > 0, scale, 1), out=target)
        self._numbers.copy_(self._encoded(ratios.nan_to_num_(0, 0, 0), chances))

    @override
    def __getitem__(self, index: Any) -> RootState:
        parts = list(index) if isinstance(index, tuple) else [index]
        absent = [slice(None)] * (self._numbers.ndim - len(parts) + (... in parts))
        at = parts.index(...) if ... in parts else len(parts)
        *rows, columns = parts[:at] + absent + parts[at + 1 :]
        start, stop, step = columns.indices(self._numbers.shape[-1])
        is_end = stop == self._numbers.shape[-1]
        if step != 1 or start % BLOCK_COLUMNS or not (is_end or stop % BLOCK_COLUMNS == 0):
            raise ValueError(
                f"columns {start} to {stop} in steps of {step} cut a block: begin and end at "
                f"multiples of {BLOCK_COLUMNS}, or with the row"
            )
        blocks = slice(start // BLOCK_COLUMNS, -(-stop // BLOCK_COLUMNS))
        scales = self._scales[(*rows, blocks)]
        return RootState(self._name, self._numbers[(*rows, columns)], scales)

    @override
    def zero_(self) -> None:
        self._numbers.zero_()
        self._scales.zero_()

    @property
    def _largest(self) -> int:
        """The number that stands for the largest magnitude in a block."""
        return 127 if self._numbers.dtype == torch.int8 else 255

    def _encoded(self, values: torch.Tensor, chances: torch.Tensor | None) -> torch.Tensor:
        """Return the float32 numbers of values in blocks of scale 1."""
        sizes = values.abs()
        below = sizes.sqrt().sqrt_().floor_().clamp_(0, self._largest - 1)
        low, high = below.square().square_(), (below + 1).square_().square_()
        parts = sizes.sub_(low).div_(high.sub_(low))  # Position between the neighbours, in [0, 1].
        rises = parts.gt_(0.5 if chances is None else chances)  # 0 or 1.
        numbers = below.add_(rises)
        if self._numbers.dtype == torch.int8:
            return numbers.copysign_(values)
        return numbers.clamp_min_(1).mul_(values.gt_(0))


def _fit(given: Sequence[torch.Tensor], *stored: torch.Tensor) -> bool:
    """Return whether a kernel encodes these tensors: float32, with the shape of the stored ones."""
    return (
        all(tensor.dtype == torch.float32 for tensor in given)
        and len({tensor.shape for tensor in (*given, *stored)}) == 1
        and encoding_kernels.fit(*given, *stored)
    )


def _block_tensors(state: str, dtype: torch.dtype) -> Sequence[StoredTensor]:
    bits = str(dtype).removeprefix("torch.")
    return [
        StoredTensor(f"{state}_{bits}_root", dtype),
        StoredTensor(f"{state}_scale", torch.float32, BLOCK_COLUMNS),
    ]


def _blocks(
    values: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the blocks of one size, (..., blocks, columns), and their scales, (..., blocks, 1)."""
    columns = values.shape[-1]
    full = columns // BLOCK_COLUMNS
    if full:
        whole = torch.unflatten(values[..., : full * BLOCK_COLUMNS], -1, (full, BLOCK_COLUMNS))
        yield whole, scales[..., :full, None]
    if columns % BLOCK_COLUMNS:
        yield values[..., None, full * BLOCK_COLUMNS :], scales[..., full:, None]


class _Root(Encoding):
    """RootState with numbers of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @override
    def stored(self, state: str) -> Sequence[StoredTensor]:
        return _block_tensors(state, self._dtype)

    @override
    def over(self, state: str, tensors: Mapping[str, torch.Tensor]) -> RootState:
        numbers, scales = (stored.name for stored in self.stored(state))
        return RootState(state, tensors[numbers], tensors[scales])


class _Split(Encoding):
    """SplitMaster with a remainder of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @override
    def stored(self, state: str) -> Sequence[StoredTensor]:
        return [StoredTensor(MASTER, torch.bfloat16), StoredTensor(REMAINDER, self._dtype)]

    @override
    def over(self, state: str, tensors: Mapping[str, torch.Tensor]) -> SplitMaster:
        return SplitMaster(tensors[MASTER], tensors[REMAINDER])


ENCODINGS: Mapping[str, Encoding] = {
    "remainder": _Split(torch.int16),
    "24bit": _Split(torch.int8),
    "int8_root": _Root(torch.int8),
    "uint8_root": _Root(torch.uint8),
}
"""Name -> encoding."""


def encodings_of(state: str) -> Sequence[str]:
    """Return the names of the encodings that a state may have."""
    return ("remainder", "24bit") if state == MASTER else ("int8_root", "uint8_root")


def whole_blocks(shape: Sequence[int], chunk: Chunk) -> Chunk:
    """Return the smallest chunk that contains a chunk and cuts no block of 8-bit states."""
    if not shape:
        return chunk
    first = chunk.offsets[-1] // BLOCK_COLUMNS * BLOCK_COLUMNS
    end = -(-(chunk.offsets[-1] + chunk.sizes[-1]) // BLOCK_COLUMNS) * BLOCK_COLUMNS
    return Chunk((*chunk.offsets[:-1], first), (*chunk.sizes[:-1], min(end, shape[-1]) - first))


def values_of(state: AnyState) -> torch.Tensor:
    """Return the values of a state. A tensor is returned itself."""
    return state if isinstance(state, torch.Tensor) else state.read()


def assign(state: AnyState, values: torch.Tensor) -> None:
    """Set the values of a state to values of any dtype and device."""
    if isinstance(state, torch.Tensor):
        state.copy_(values)
    else:
        state.write(values.to(torch.float32) if isinstance(state, EncodedState) else values)
