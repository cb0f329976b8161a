"""What a store tells of its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a store has done since it was opened."""

    engine: str
    """How pages move: "io_uring", "libaio", "aiofiles", "memory"; "none" where all are resident."""
    pages: int
    state_bytes: int
    """Bytes of all pages, framing and padding included."""
    bytes_read: int
    bytes_written: int
    bytes_spread: int
    """What this rank sent of parameters that others hold, too: once for each that it went to."""
    stall_seconds: float
    """Time that the training thread waited for transfers and commits."""
    host_bytes_peak: int
    """Bytes of page buffers, pages that rest in host memory, and what compute="host" copies
    gradients and parameters to, all together at their most."""
    device_bytes_peak: int
    """Bytes of the device that pages rest in or are stepped in, at their most."""
    pages_in: Mapping[str, int]
    """Number of pages that rest in each of "device", "host" and "nvme"."""
