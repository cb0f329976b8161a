"""CRC-32 of ranges of files. The bytes are read in any order, and only once."""

from __future__ import annotations

import functools
import threading
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierstore.errors import CorruptionError

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32 without x^32, bit-reflected: the highest bit is x^0."""
_ONE = 1 << 31
_READ_BYTES = 8 * 2**20

ReadInto = Callable[[memoryview, int], None]
"""Fill a buffer with the bytes of a file from an offset on."""


class DataChecksums:
    """The checksums of ranges of one file. Several threads may add bytes that they read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, _Range] = {}
        self._starts: list[int] = []

    def expect(self, start: int, nbytes: int, crc: int) -> None:
        """State the CRC-32 of a range, for the first time or again.

        Raises:
            CorruptionError: the range overlaps another one.
        """
        if not nbytes:
            return
        known = [(one.start, one.end, one.crc) for one in self._overlapping(start, start + nbytes)]
        if known and known != [(start, start + nbytes, crc)]:
            raise CorruptionError(f"has two pieces of data that overlap at byte {start}")
        if not known:
            self._ranges[start] = _Range(start, start + nbytes, crc)
            insort(self._starts, start)

    def add(self, offset: int, data: memoryview) -> None:
        """Add bytes that were read at an offset. Bytes that were added before are ignored."""
        for found in self._overlapping(offset, offset + len(data)):
            with self._lock:
                claimed = found.claim(offset, offset + len(data))
            for begin, end in claimed:
                found.crcs[begin] = zlib.crc32(data[begin - offset : end - offset])

    def need(self, offset: int, nbytes: int) -> None:
        """State that other code reads these bytes. compare() then also reads them."""
        for found in self._overlapping(offset, offset + nbytes):
            found.is_needed = True

    def compare(self, read_into: ReadInto) -> None:
        """Compare every range that is needed or that has added bytes.

        Args:
            read_into: reads the bytes of these ranges that were not added.

        Raises:
            CorruptionError: a range is not what was written, or cannot be read.
        """
        for found in self._ranges.values():
            if not found.is_needed and not found.claimed:
                continue
            for begin, end in found.claim(found.start, found.end):
                found.crcs[begin] = _crc_of(read_into, begin, end)
            crc = 0
            for begin, end in found.claimed:
                crc = combined_crc32(crc, found.crcs[begin], end - begin)
            if crc != found.crc:
                raise CorruptionError(
                    f"the {found.end - found.start} bytes of data at {found.start} are not what "
                    "was written: their CRC-32 differs"
                )

    def _overlapping(self, begin: int, end: int) -> Iterator[_Range]:
        """Yield the ranges that overlap the bytes from ``begin`` to ``end``."""
        number = max(bisect_left(self._starts, begin) - 1, 0)
        while number < len(self._starts) and self._starts[number] < end:
            found = self._ranges[self._starts[number]]
            if found.end > begin:
                yield found
            number += 1


@dataclass(slots=True)
class _Range:
    """A range with a checksum, and the parts that were read."""

    start: int
    end: int
    crc: int
    claimed: list[tuple[int, int]] = field(default_factory=list)
    """First byte and end of each part that was read or is being added, in order, no overlap."""
    crcs: dict[int, int] = field(default_factory=dict)
    """First byte of a part that was read -> its CRC-32."""
    is_needed: bool = False

    def claim(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Claim the unclaimed parts between two bytes; return these parts."""
        begin, end = max(begin, self.start), min(end, self.end)
        number = max(bisect_left(self.claimed, (begin, begin)) - 1, 0)
        found = []
        while number < len(self.claimed) and self.claimed[number][0] < end:
            first, last = self.claimed[number]
            if begin < first:
                found.append((begin, first))
            begin = max(begin, last)
            number += 1
        if begin < end:
            found.append((begin, end))
        for part in found:
            insort(self.claimed, part)
        return found


def _crc_of(read_into: ReadInto, begin: int, end: int) -> int:
    buffer = memoryview(bytearray(min(end - begin, _READ_BYTES)))
    crc = 0
    for offset in range(begin, end, _READ_BYTES):
        piece = buffer[: end - offset]
        read_into(piece, offset)
        crc = zlib.crc32(piece, crc)
    return crc


def combined_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of data, given the CRC-32 of its first part and of the rest.

    Multiplies ``first`` by x^(8 * nbytes), which has the same effect as reading the rest.

    Args:
        first: CRC-32 of the first part; 0 if it is empty.
        second: CRC-32 of the rest.
        nbytes: number of bytes of the rest.
    """
    return _product(_power(nbytes), first) ^ second


@functools.lru_cache
def _power(nbytes: int) -> int:
    """Return x^(8 * nbytes) modulo the polynomial."""
    result, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        nbytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial of CRC-32."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
