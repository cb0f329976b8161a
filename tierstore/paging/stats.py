"""Counters of a store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tierstore.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of a store since it was opened."""

    engine: str
    """The storage engine: "io_uring", "libaio", "aiofiles" or "memory"; "none" without files."""
    pages: int
    state_bytes: int
    """Bytes of all pages of this rank, including framing and padding."""
    bytes_read: int
    bytes_written: int
    bytes_spread: int
    """Bytes of parameters that this rank sent to replicas, counted once per replica."""
    stall_seconds: float
    """Time that the training thread has waited for transfers and commits."""
    host_bytes_peak: int
    """Peak of the host memory for page buffers, pages of tier "host", and copies of gradients and
    parameters together."""
    device_bytes_peak: int
    """Peak of the device memory for pages that rest or are stepped there, and for copies of their
    gradients and parameters."""
    pages_in: Mapping[str, int]
    """Tier -> number of pages: "device", "host" and "nvme"."""
    steps: int
    """Number of steps that were begun, including skipped steps."""
    seconds: float
    """Time since the store was opened."""
    drive_life_used: float | None
    """Used share of the rated life of a drive; None without ``endurance``."""
    drive_days_left: float | None
    """Days until the rated life is used up at the current pace; None without ``endurance``, in the
    first ten minutes, and before the first write."""

    def __str__(self) -> str:
        """Return a table of the counters that have a value, one a line, with units."""
        names = [field.name for field in fields(self)]
        after = names.index("bytes_written") + 1
        names[after:after] = ["bytes_written_per_step", "bytes_written_per_day"]
        rows = [(name, self._text(name)) for name in names]
        width = max(map(len, names)) + 2
        return "\n".join(f"{name:{width}}{text}" for name, text in rows if text)

    def _text(self, name: str) -> str:
        """Return a counter for people; an empty text if it has no value."""
        value = getattr(self, name)
        if value is None or value != value:  # NaN before the first step.
            return ""
        if isinstance(value, Mapping):
            return ", ".join(f"{tier} {count}" for tier, count in value.items()) or "none"
        if "bytes" in name:
            return format_bytes(round(value))
        if name == "drive_life_used":
            return f"{value:.1%}"
        return f"{value:,.1f}" if isinstance(value, float) else str(value)

    @property
    def bytes_written_per_step(self) -> float:
        """Mean of the bytes that a step writes; NaN before the first step."""
        return self.bytes_written / self.steps if self.steps else math.nan

    @property
    def bytes_written_per_day(self) -> float:
        """Bytes that this rank writes in a day at the pace so far, the unit of drive ratings."""
        return self.bytes_written / self.seconds * 86_400
