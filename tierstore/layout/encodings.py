"""Encodings: forms of states that take fewer bytes of a page than their values.

An encoding keeps one or more tensors for a state, the *stored* tensors. An EncodedState over them
reads and writes the values.
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
"""Name of the stored tensor that makes a parameter the master."""


BLOCK_COLUMNS = 256
"""Columns of a parameter that have one scale, of a state in 8 bits."""

_INFINITY = 0x7F800000  # In float32. Larger numbers, without the sign, are NaNs.

# MKL, which takes torch's roots, chooses their kernel in the first call. If two threads are in it,
# one may get a kernel with errors of 1e-4. Each optimizer with a store has imported this module.
for _dtype in (torch.float32, torch.float64):
    torch.ones(1, dtype=_dtype, device="cpu").sqrt()


class StoredTensor(NamedTuple):
    """A tensor that pages keep of a state."""

    name: str
    """Name of the state, unless the state is encoded."""
    dtype: torch.dtype
    columns: int = 1
    """Columns of the parameter that share one element."""
    shape: tuple[int, ...] | None = None
    """Shape of the state, if the parameter has another."""
    shared: tuple[bool, ...] | None = None
    """For each dimension whether all indices of it share an element, of a state along the
    parameter; see PagedParameter.shapes."""

    @property
    def is_free(self) -> bool:
        """True if the state does not lie along the parameter."""
        return self.shape is not None and self.shared is None

    def chunk(self, chunk: Chunk) -> Chunk:
        """Return the elements that belong to a chunk of the parameter, which cuts no block.

        An element of a state along the parameter belongs to every chunk that has a part of what it
        is for, such as a row: these chunks have copies of it. A free state belongs to all of the
        parameter.
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
        """Return about how many elements go with consecutive elements of a parameter.

        Args:
            numel: number of elements of the parameter.
            shape: its shape.
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
    """A state of a chunk whose values are not in the page as they are.

    An optimizer changes a part of it by ``values = state[part].read()``, a computation, and
    ``state[part].write(values)``.
    """

    __slots__ = ()

    BLOCK_COLUMNS: ClassVar[int] = BLOCK_COLUMNS
    """Slices of a state in 8 bits begin at multiples of this column, and end there or at the end of
    a row."""

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
            values: of the dtype and shape of those that read() returns.
            chances: float32 in [0, 1), of the shape of the state. Each value is then rounded up or
                down so that the mean over all chances is the value. None: to the nearest number.
        """

    @abstractmethod
    def __getitem__(self, index: Any) -> EncodedState:
        """Return the state of some rows and columns, as slices select them from a tensor."""

    @abstractmethod
    def zero_(self) -> None:
        """Encode zeros; of a master, the parameter."""


class JoinedState:
    """A free state that takes several records.

    Args:
        parts: the place of each record in the state, and its tensor.
        shape: of the state.
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
        """Set the state, from values of any dtype and device."""
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
        """Return what pages keep of a state."""

    @abstractmethod
    def over(self, state: str, tensors: Mapping[str, torch.Tensor]) -> EncodedState:
        """Return a state over its stored tensors, given all tensors of a chunk by their names."""


class SplitMaster(EncodedState):
    """A float32 master as the parameter and the bits that rounding it takes away.

    The parameter is the master rounded to bfloat16, halves away from zero; the remainder is the
    difference of their bits, a number from -0x8000 to 0x7fff. So their sum is the master, bit for
    bit. With halves to even two masters would share a pair: 0x3f808000 rounds to 0x3f80, and
    0x3f7f8000 too, both by half a unit. Example::

        master 0x3f7f9000 = parameter 0x3f800000 + remainder -0x7000

    A remainder of 8 bits is the upper byte of that, of a master rounded to 24 bits. A NaN stays a
    NaN, of which the sign alone is kept.

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
        # A program may have changed the parameter, to a zero for example, and not the remainder,
        # so that the sum is a NaN: then the parameter is the master. Integers are several times
        # faster than bools.
        is_number = (
            (high + low).bitwise_and_(0x7FFFFFFF).sub_(_INFINITY + 1).bitwise_right_shift_(31)
        )
        return high.add_(low.bitwise_and_(is_number)).view(torch.float32)

    @override
    def write(self, values: torch.Tensor, chances: torch.Tensor | None = None) -> None:
        assert chances is None  # A parameter rounds as its master says.
        if _fit([values], self._parameter, self._remainder):
            encoding_kernels.encode_split(values, self._parameter, self._remainder)
            return
        # The lower bits of a NaN may be all that it has, and rounded it may be a number.
        numbers = torch.nan_to_num(values, math.nan, math.inf, -math.inf).copysign_(values)
        bits = numbers.view(torch.int32)
        if self._shift:
            bits.add_(1 << self._shift - 1)
        # Integers are narrowed without their upper bits.
        self._remainder.copy_(bits >> self._shift if self._shift else bits)
        self._parameter.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))

    def drop_remainders(self, before: torch.Tensor) -> torch.Tensor:
        """Let the parameter be the master where it was changed.

        Args:
            before: bfloat16, the parameter as the remainder belongs to it.

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
        """Bits of the difference that the remainder does not have."""
        return 16 - 8 * self._remainder.itemsize


class RootState(EncodedState):
    """Values as the fourth powers of whole numbers, times a scale for each block of columns.

    The scale is the largest magnitude in the block by the fourth power of the largest number. The
    distance of neighbours is a part of their own size, so that one large element does not spoil the
    small ones beside it. With a sign, numbers are -127 to 127: the distance is 3.1% of the largest
    magnitude there, 10% of a hundredth of it, and 56% of a hundred-thousandth. Without one they are
    0 to 255: 1.6%, 5% and 28%. Such a value above 0 is never rounded to 0, by whose root Adam would
    divide, unless the largest value in its block is about 1e-35 or less.

    A value has one number wherever it is computed: all operations but roots are exact or rounded as
    IEEE 754 says, and roots may be a few units too large, since a value just below a fourth power
    is rounded to it either way, with chances of 16 bits. A block with a number that is not finite
    is NaN.

    Args:
        name: of the state.
        numbers: int8 for values with a sign, uint8 for values from 0 on; shape (..., columns).
        scales: float32, shape (..., blocks): of each BLOCK_COLUMNS columns.
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
        # A tensor: a GPU would multiply by the reciprocal of a number.
        top = torch.full((), self._largest**4, dtype=torch.float32, device=values.device)
        ratios = torch.empty_like(values)
        pairs = zip(_blocks(values, self._scales), _blocks(ratios, self._scales), strict=True)
        for (of_blocks, scales), (target, _) in pairs:
            largest = of_blocks.abs().amax(-1, keepdim=True)  # (..., blocks, 1)
            scale = (largest / top).masked_fill_(~largest.isfinite(), torch.nan)
            scales.copy_(scale)
            # A block of zeros has the scale 0, and so have numbers too small for a scale.
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
        """The number of the largest magnitude in a block."""
        return 127 if self._numbers.dtype == torch.int8 else 255

    def _encoded(self, values: torch.Tensor, chances: torch.Tensor | None) -> torch.Tensor:
        """Return the float32 numbers of values in blocks of scale 1."""
        sizes = values.abs()
        below = sizes.sqrt().sqrt_().floor_().clamp_(0, self._largest - 1)
        low, high = below.square().square_(), (below + 1).square_().square_()
        parts = sizes.sub_(low).div_(high.sub_(low))  # Between the two neighbours, in [0, 1].
        rises = parts.gt_(0.5 if chances is None else chances)  # 0 or 1.
        numbers = below.add_(rises)
        if self._numbers.dtype == torch.int8:
            return numbers.copysign_(values)
        return numbers.clamp_min_(1).mul_(values.gt_(0))


def _fit(given: Sequence[torch.Tensor], *stored: torch.Tensor) -> bool:
    """Return whether a kernel encodes what is given: float32, of the shape of what is stored."""
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
    """Return the smallest chunk around a chunk of a tensor that cuts no block of 8-bit states."""
    if not shape:
        return chunk
    first = chunk.offsets[-1] // BLOCK_COLUMNS * BLOCK_COLUMNS
    end = -(-(chunk.offsets[-1] + chunk.sizes[-1]) // BLOCK_COLUMNS) * BLOCK_COLUMNS
    return Chunk((*chunk.offsets[:-1], first), (*chunk.sizes[:-1], min(end, shape[-1]) - first))


def values_of(state: AnyState) -> torch.Tensor:
    """Return the values of a state: the tensor itself, if it is one."""
    return state if isinstance(state, torch.Tensor) else state.read()


def assign(state: AnyState, values: torch.Tensor) -> None:
    """Set the values of a state, from values of any dtype and device."""
    if isinstance(state, torch.Tensor):
        state.copy_(values)
    else:
        state.write(values.to(torch.float32) if isinstance(state, EncodedState) else values)
