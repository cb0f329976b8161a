"""Subgroups: consecutive parameters of one group, cut so that each fills one page.

Parameters fill subgroups in order, up to about ``page_bytes``. A parameter under an elementwise
rule is cut at rows where a page is full; any other parameter stays in one subgroup.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstore.layout.chunks import Chunk, flat_range_chunks
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.records import RECORD_DATA_BYTES_MAX, record_nbytes


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
class Row:
    """A sequence of elements of one parameter, which fills pages in order."""

    parameter: ParameterSpec
    """Determines the bytes of an element, and the rows at which a cut may be."""

    numel: int
    """Number of elements."""

    ranks: int = 1
    """Number of ranks that have an equal share of each page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The elements [start, stop) of the row with this index."""

    row: int
    start: int
    stop: int


def cut_rows(rows: Sequence[Row], page_bytes: int) -> list[list[Piece]]:
    """Return the pieces of each page; no page and no piece is empty."""
    pages: list[list[Piece]] = []
    pieces: list[Piece] = []
    room = page_bytes

    def close_page() -> None:
        nonlocal room
        if pieces:
            pages.append(pieces.copy())
        pieces.clear()
        room = page_bytes

    for index, row in enumerate(rows):
        unit = _unit_numel(row, page_bytes)
        start = 0
        while start < row.numel:
            stop = _stop_within(row, start, unit, room)
            if stop == start:  # Not even one unit fits in what is left of this page.
                if pieces:
                    close_page()
                    continue
                stop = min(start + unit, row.numel)
            pieces.append(Piece(row=index, start=start, stop=stop))
            room -= _nbytes(row, start, stop)
            start = stop
    close_page()
    return pages


def _unit_numel(row: Row, page_bytes: int) -> int:
    """Return the number of consecutive elements that must stay in one page.

    All elements of a parameter that may not be cut; else those of one row, or of a row of a
    deeper dimension if a row is too large for half a page.
    """
    parameter = row.parameter
    if not parameter.elementwise:
        return row.numel
    numel_max = page_bytes * row.ranks // 2 // parameter.element_bytes
    rows = (
        math.prod(parameter.shape[dimension:]) for dimension in range(1, len(parameter.shape) + 1)
    )
    return next((numel for numel in rows if numel <= numel_max), 1)


def _stop_within(row: Row, start: int, unit: int, room: int) -> int:
    """Return the largest allowed end of a piece from ``start`` that fits in ``room`` bytes."""
    unit_bytes = unit * row.parameter.element_bytes
    units = min(-(-(row.numel - start) // unit), room * row.ranks // unit_bytes)
    # The framing of records also takes room, which depends on the chunks: step down until it fits.
    while units > 0:
        stop = min(start + units * unit, row.numel)
        if _nbytes(row, start, stop) <= room:
            return stop
        units -= 1
    return start


def record_chunks(parameter: ParameterSpec, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks of a flat range, each small enough for one record of every state."""
    itemsize = max(dtype.itemsize for _, dtype in parameter.all_states)
    numel_max = RECORD_DATA_BYTES_MAX // itemsize
    row_numel = math.prod(parameter.shape[1:])
    if numel_max > row_numel:
        numel_max -= numel_max % row_numel
    for first in range(start, stop, numel_max):
        yield from flat_range_chunks(parameter.shape, first, min(first + numel_max, stop))


def _nbytes(row: Row, start: int, stop: int) -> int:
    """Return the number of bytes that the records of a piece take in the page of one rank."""
    chunks = record_chunks(row.parameter, start, stop)
    nbytes = sum(
        record_nbytes(chunk.sizes, dtype)
        for chunk in chunks
        for _, dtype in row.parameter.all_states
    )
    return -(-nbytes // row.ranks)
