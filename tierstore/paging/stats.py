"""Counters of a store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of a store since it was opened."""

    engine: str
    """The storage engine: "io_uring", "libaio", "aiofiles" or "memory"; "none" without files."""
    pages: int
    state_bytes: int
    """Bytes of all pages of this rank, with framing and padding."""
    bytes_read: int
    bytes_written: int
    bytes_spread: int
    """Bytes of parameters that this rank sent to replicas, counted once per replica."""
    stall_seconds: float
    """Time that the training thread waited for transfers and commits."""
    host_bytes_peak: int
    """Largest number of bytes of host memory for page buffers, for pages of tier "host", and for
    gradients and parameters that the store copies there, together."""
    device_bytes_peak: int
    """Largest number of bytes of device memory that pages rest in or are stepped in, and that hold
    gradients and parameters of them that were copied there."""
    pages_in: Mapping[str, int]
    """Tier -> number of pages: "device", "host" and "nvme"."""
    steps: int
    """Number of steps that were begun, skipped ones included."""
    seconds: float
    """Time since the store was opened."""
    drive_life_used: float | None
    """Share of the rated life of a drive that is used; None without ``endurance``."""
    drive_days_left: float | None
    """Days until it is used up at the pace so far; None without ``endurance``, in the first ten
    minutes, and before anything was written."""

    @property
    def bytes_written_per_step(self) -> float:
        """Mean of the bytes that a step writes; NaN before the first step."""
        return self.bytes_written / self.steps if self.steps else math.nan

    @property
    def bytes_written_per_day(self) -> float:
        """Bytes that this rank writes in a day at the pace so far: drives are rated so."""
        return self.bytes_written / self.seconds * 86_400
