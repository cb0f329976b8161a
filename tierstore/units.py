"""Sizes in bytes: parsing, printing, rounding, and ranges of whole sectors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

# Every offset and length of a transfer is a multiple of this. It covers the
# direct-I/O granularity of all block devices in use (512 or 4096).
SECTOR_BYTES = 4096

_UNITS = {
    **{"": 1, "B": 1},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}


def parse_bytes(value: int | str) -> int:
    """Return a size in bytes from an int or a string such as ``"16GiB"`` or ``"1.5 MB"``.

    Raises:
        ValueError: the string is not a number followed by a known unit, or the size is negative or
            2^63 bytes or more.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"a size must be an int or a string such as '16GiB', got {value!r}")
    if isinstance(value, int):
        nbytes = value
    else:
        match = re.fullmatch(r"\s*(\d{1,19}(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"a size must look like '16GiB', '500MB' or '4096', got {value!r}")
        nbytes = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if nbytes < 0:
        raise ValueError(f"a size must not be negative, got {value!r}")
    if nbytes >= 2**63:
        raise ValueError(f"a size must be below 2^63 bytes, got {value!r}")
    return nbytes


def parse_endurance(value: int | str) -> int:
    """Return the bytes that may be written to a drive in its life, from ``"600TBW"`` or an int.

    Raises:
        ValueError: the value cannot be parsed, is 0, or is 2^63 bytes or more.
    """
    size = value
    if isinstance(value, str):
        rating = value.strip()
        # "600TB" is refused: it may be a capacity.
        size = rating[:-1] if rating.upper().endswith(("TBW", "PBW")) else ""
    try:
        nbytes = parse_bytes(size)
    except ValueError:
        nbytes = 0
    if not nbytes:
        raise ValueError(
            "an endurance is the bytes that one drive may be written in its life, above 0 and "
            "below 2^63: an int, or a string such as '600TBW' or '7PBW' from its data sheet; got "
            f"{value!r:.80}"
        )
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Return a size as text for people, such as ``"1.5 GiB"``; exact below 1 KiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def align_up(nbytes: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``nbytes``."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Extent:
    """The half-open byte range [offset, offset + nbytes) of a file, whole sectors only."""

    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.offset % SECTOR_BYTES:
            raise ValueError(f"offset must be a multiple of {SECTOR_BYTES}, got {self}")
        if self.nbytes <= 0 or self.nbytes % SECTOR_BYTES:
            raise ValueError(f"nbytes must be a positive multiple of {SECTOR_BYTES}, got {self}")
