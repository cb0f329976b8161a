"""Subgroups: consecutive parameters of one group, cut so that each fills one page.

Parameters fill subgroups in order, up to about ``page_bytes``. Where a page is full, a parameter
with an elementwise rule is cut at a row, and a parameter with units between two units. Any other
parameter stays in one subgroup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstore.layout.chunks import Chunk, flat_range_chunks
from tierstore.layout.encodings import StoredTensor
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import RECORD_DATA_BYTES_MAX, record_nbytes
from tierstore.layout.sharding import on_grid


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The part of one parameter in one subgroup, in flat order."""

    parameter: ParameterSpec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Consecutive parameter shards of one param group, stepped and paged together."""

    group: int
    shards: tuple[ParameterShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """A sequence of elements of one parameter. It fills pages in order."""

    parameter: ParameterSpec
    """Determines the bytes of an element, and the rows where a cut is allowed."""

    numel: int
    """Number of elements."""

    ranks: int = 1
    """Number of ranks with an equal share of each page."""

    def nbytes(self, start: int, stop: int) -> int:
        """Return the number of bytes that the records of a piece take in the page of one rank."""
        chunks = record_chunks(self.parameter, start, stop)
        return -(-sum(_record_bytes(self.parameter, chunk) for chunk in chunks) // self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The elements [start, stop) of a parameter."""

    parameter: int
    """Index of the parameter."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def cut_into_pages(
    sequences: Sequence[Elements], page_bytes: int, *, may_cut: bool = True
) -> list[list[Piece]]:
    """Return the pieces of each page. No page and no piece is empty.

    Args:
        sequences: the elements of each parameter.
        page_bytes: approximate size of a page.
        may_cut: whether a parameter that may be cut is cut where a page is full.
    """
    pages: list[list[Piece]] = [[]]
    room = page_bytes
    for index, elements in enumerate(sequences):
        unit = _unit_numel(elements, page_bytes) if may_cut else elements.numel
        unit_bytes = elements.parameter.bytes_of(unit)
        start = 0
        while start < elements.numel:
            stop, nbytes = _stop_within(elements, start, unit, unit_bytes, room)
            if stop == start and pages[-1]:  # Not even one unit fits in the rest of this page.
                pages.append([])
                room = page_bytes
                continue
            if stop == start:
                stop = min(start + unit, elements.numel)
                nbytes = elements.nbytes(start, stop)
            pages[-1].append(Piece(parameter=index, start=start, stop=stop))
            room -= nbytes
            start = stop
    return [pieces for pieces in pages if pieces]


def _unit_numel(elements: Elements, page_bytes: int) -> int:
    """Return the number of consecutive elements that must stay in one page.

    All elements of a parameter that may not be cut; the elements of a unit; else the elements of a
    row. If a row is too large for half a page, a row of a deeper dimension counts.
    """
    parameter = elements.parameter
    if parameter.unit is not None:
        return parameter.unit * math.prod(parameter.shape[1:])
    if not parameter.elementwise:
        return elements.numel
    bytes_max = page_bytes * elements.ranks // 2
    depths = range(1, len(parameter.shape) + 1)
    rows = (math.prod(parameter.shape[depth:]) for depth in depths)
    numel = next((numel for numel in rows if parameter.bytes_of(numel) <= bytes_max), 1)
    block = parameter.column_block
    if block > 1 and numel < parameter.shape[-1]:
        # Cut a row between blocks if all blocks have the same size.
        return parameter.shape[-1] if parameter.shape[-1] % block else block
    return numel


def _stop_within(
    elements: Elements, start: int, unit: int, unit_bytes: int, room: int
) -> tuple[int, int]:
    """Return the end and the bytes of a piece.

    The piece is the largest allowed one from ``start`` that fits in ``room`` bytes.
    """
    units = min(-(-(elements.numel - start) // unit), room * elements.ranks // unit_bytes)
    # The framing of records also takes room. It depends on the chunks: step down until it fits.
    while units > 0:
        stop = min(start + units * unit, elements.numel)
        nbytes = elements.nbytes(start, stop)
        if nbytes <= room:
            return stop, nbytes
        units -= 1
    return start, 0


def uncut_nbytes(shard: ParameterShard) -> int:
    """Return the bytes of the records of a shard that smaller pages may not cut.

    A parameter with units counts whole: how far pages can cut it depends on its ranks.
    """
    spec = shard.parameter
    if spec.elementwise:
        return 0
    return sum(_record_bytes(spec, chunk) for chunk in shard.chunks)


def _record_bytes(parameter: ParameterSpec, chunk: Chunk) -> int:
    """Return the number of bytes that the records of a chunk take."""
    return sum(
        record_nbytes(place.sizes, tensor.dtype)
        for tensor in parameter.stored
        for place in record_places(tensor, chunk)
    )


def record_places(tensor: StoredTensor, chunk: Chunk) -> list[Chunk]:
    """Return the places of the records that a stored tensor has for a chunk of the parameter."""
    if tensor.is_free:
        assert tensor.shape is not None
        return list(_cut(tensor.shape, 0, math.prod(tensor.shape), tensor.dtype.itemsize))
    return [tensor.chunk(chunk)]  # The chunk is small enough for one record of it.


def record_chunks(
    parameter: ParameterSpec, start: int, stop: int, shape: tuple[int, ...] | None = None
) -> Iterator[Chunk]:
    """Yield the chunks of a flat range, each small enough for one record of every state.

    Args:
        parameter: the parameter.
        start: first element of the range.
        stop: end of the range.
        shape: shape of a rectangle of the parameter, if the range counts its elements.
    """
    itemsize = max(tensor.dtype.itemsize for tensor in parameter.stored)
    shape = parameter.shape if shape is None else shape
    return _cut(shape, start, stop, itemsize, parameter.column_block)


def _cut(
    shape: tuple[int, ...], start: int, stop: int, itemsize: int, columns: int = 1
) -> Iterator[Chunk]:
    """Yield the chunks of a flat range of a tensor, each small enough for one record.

    Args:
        shape: of the tensor.
        start: first element of the range.
        stop: end of the range.
        itemsize: bytes of an element.
        columns: rows are cut at multiples of this number.
    """
    numel_max = RECORD_DATA_BYTES_MAX // itemsize
    row_numel = math.prod(shape[1:])
    if numel_max > row_numel:
        numel_max -= numel_max % row_numel
    while start < stop:
        end = min(start + numel_max, stop)
        if end < stop:
            end = on_grid(shape, end, columns)
        yield from flat_range_chunks(shape, start, end)
        start = end
