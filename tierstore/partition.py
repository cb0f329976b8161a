"""Which part of which parameter lies in which subgroup, and so in which page.

Parameters of one group are taken in order and fill subgroups up to about ``page_bytes``.
A parameter under an elementwise rule is cut at rows wherever a page is full; any other
stays whole in one subgroup, however large. The result depends on the specs and on
``page_bytes`` alone, so every run of one model finds its pages again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tierstore.chunks import Chunk, flat_range_chunks
from tierstore.groups import ParameterSpec
from tierstore.records import RECORD_DATA_BYTES_MAX, record_nbytes


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The piece of one parameter that lies in one subgroup, in flat order."""

    parameter: ParameterSpec
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Consecutive parameter shards of one param group, stepped and paged together."""

    group: int
    shards: tuple[ParameterShard, ...]


def partition_group(
    group: int, parameters: Sequence[ParameterSpec], page_bytes: int
) -> list[Subgroup]:
    """Cut one param group into subgroups whose pages hold about ``page_bytes`` each.

    Parameters without elements get no shard. The records of a page take more than
    ``page_bytes`` only where one parameter that may not be cut does; the padding of
    sections comes on top.
    """
    subgroups: list[Subgroup] = []
    shards: list[ParameterShard] = []
    room = page_bytes

    def close_subgroup() -> None:
        nonlocal room
        if shards:
            subgroups.append(Subgroup(group, tuple(shards)))
        shards.clear()
        room = page_bytes

    for parameter in parameters:
        numel = math.prod(parameter.shape)
        unit = _unit_numel(parameter, page_bytes)
        start = 0
        while start < numel:
            stop = _stop_within(parameter, start, unit, room)
            if stop == start:  # Not even one unit fits in what is left of this page.
                if shards:
                    close_subgroup()
                    continue
                stop = min(start + unit, numel)
            chunks = tuple(_record_chunks(parameter, start, stop))
            shards.append(ParameterShard(parameter, chunks))
            room -= _chunks_nbytes(parameter, chunks)
            start = stop
    close_subgroup()
    return subgroups


def _unit_numel(parameter: ParameterSpec, page_bytes: int) -> int:
    """Return how many consecutive elements must stay together.

    The whole parameter where it may not be cut; else a row, or a row of a row where that
    is too large for half a page.
    """
    if not parameter.elementwise:
        return math.prod(parameter.shape)
    numel_max = page_bytes // 2 // _bytes_per_element(parameter)
    rows = (
        math.prod(parameter.shape[dimension:]) for dimension in range(1, len(parameter.shape) + 1)
    )
    return next((numel for numel in rows if numel <= numel_max), 1)


def _stop_within(parameter: ParameterSpec, start: int, unit: int, room: int) -> int:
    """Return the largest allowed end of a shard from ``start`` that fits in ``room`` bytes."""
    numel = math.prod(parameter.shape)
    units = min(-(-(numel - start) // unit), room // (unit * _bytes_per_element(parameter)))
    # The framing of records takes room too, how much depends on the chunks: step down.
    while units > 0:
        stop = min(start + units * unit, numel)
        if _chunks_nbytes(parameter, _record_chunks(parameter, start, stop)) <= room:
            return stop
        units -= 1
    return start


def _record_chunks(parameter: ParameterSpec, start: int, stop: int) -> Iterator[Chunk]:
    """Yield the chunks of a flat range, each small enough for one record of every state."""
    itemsize = max(dtype.itemsize for _, dtype in parameter.all_states)
    numel_max = RECORD_DATA_BYTES_MAX // itemsize
    row_numel = math.prod(parameter.shape[1:])
    if numel_max > row_numel:
        numel_max -= numel_max % row_numel
    for first in range(start, stop, numel_max):
        yield from flat_range_chunks(parameter.shape, first, min(first + numel_max, stop))


def _bytes_per_element(parameter: ParameterSpec) -> int:
    return sum(dtype.itemsize for _, dtype in parameter.all_states)


def _chunks_nbytes(parameter: ParameterSpec, chunks: Iterable[Chunk]) -> int:
    return sum(
        record_nbytes(chunk.sizes, dtype) for chunk in chunks for _, dtype in parameter.all_states
    )
