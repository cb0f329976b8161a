"""Checksums of data are found whatever order it is read in."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import CorruptionError
from tierstore.inspection.data_checksums import DataChecksums, combined_crc32

DATA = bytes(number * 37 % 251 for number in range(1000))
EXTENTS = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(sorted)


@given(first=st.binary(), rest=st.binary())
def test_combined(first: bytes, rest: bytes) -> None:
    crc = combined_crc32(zlib.crc32(first), zlib.crc32(rest), len(rest))
    assert crc == zlib.crc32(first + rest)


@given(
    cuts=st.sets(st.integers(1, 999), max_size=5).map(lambda cuts: sorted({0, 1000} | cuts)),
    extents=st.lists(EXTENTS, max_size=8),
    wrong=st.integers(0, 999),
)
def test_any_order(cuts: list[int], extents: list[list[int]], wrong: int) -> None:
    """A fault is found in each range that was read in part or whole, and in no other."""
    read: list[tuple[int, int]] = []
    disk = bytearray(DATA)

    def read_into(buffer: memoryview, offset: int) -> None:
        read.append((offset, offset + len(buffer)))
        buffer[:] = disk[offset : offset + len(buffer)]

    for damaged in (False, True):
        read.clear()
        disk[wrong] ^= damaged
        checksums = DataChecksums()
        for begin, end in pairwise(cuts):
            checksums.expect(begin, end - begin, zlib.crc32(DATA[begin:end]))
        for begin, end in extents:
            checksums.add(begin, memoryview(disk)[begin:end])
        touched = [
            (begin, end)
            for begin, end in pairwise(cuts)
            if any(max(begin, first) < min(end, last) for first, last in extents)
        ]
        if damaged and any(begin <= wrong < end for begin, end in touched):
            with pytest.raises(CorruptionError, match="not what was written"):
                checksums.compare(read_into)
            continue
        checksums.compare(read_into)
        known = {byte for begin, end in extents for byte in range(begin, end)}
        rest = {byte for begin, end in touched for byte in range(begin, end)} - known
        found = [byte for begin, end in read for byte in range(begin, end)]
        assert sorted(found) == sorted(rest)


def test_data_that_other_code_reads() -> None:
    checksums = DataChecksums()
    checksums.expect(0, 1000, zlib.crc32(DATA) ^ 1)

    def read_into(buffer: memoryview, offset: int) -> None:
        buffer[:] = DATA[offset : offset + len(buffer)]

    checksums.compare(read_into)
    checksums.need(999, 1)
    with pytest.raises(CorruptionError, match="not what was written"):
        checksums.compare(read_into)


@pytest.mark.parametrize("other", [(100, 50, 7), (100, 100, 8), (50, 51, 7), (199, 1, 7)])
def test_ranges_that_overlap(other: tuple[int, int, int]) -> None:
    checksums = DataChecksums()
    for start in (100, 0, 300, 100):
        checksums.expect(start, 50 if start != 100 else 100, 7)
    checksums.expect(150, 0, 0)
    with pytest.raises(CorruptionError, match="overlap"):
        checksums.expect(*other)


def test_several_threads() -> None:
    checksums = DataChecksums()
    checksums.expect(0, 1000, zlib.crc32(DATA))
    with ThreadPoolExecutor(8) as pool:
        for begin in range(990):
            pool.submit(checksums.add, begin, memoryview(DATA)[begin : begin + 11])

    def refuse(buffer: memoryview, offset: int) -> None:
        raise AssertionError

    checksums.compare(refuse)
