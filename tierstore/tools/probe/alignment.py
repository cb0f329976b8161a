"""The alignment that the system requires of direct I/O on a file."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEMORY_ALIGN_AT, _OFFSET_ALIGN_AT = 152, 156
_AT_FDCWD = -100


def alignment(file: Path) -> tuple[int | None, int | None]:
    """Return the alignment of memory and of offsets that direct I/O on a file requires."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    status = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(_AT_FDCWD, os.fsencode(file), 0, _STATX_DIOALIGN, status):
        return None, None
    mask, memory, offset = (
        int.from_bytes(status.raw[at : at + 4], "little")
        for at in (0, _MEMORY_ALIGN_AT, _OFFSET_ALIGN_AT)
    )
    known = mask & _STATX_DIOALIGN and memory and offset
    return (memory, offset) if known else (None, None)
