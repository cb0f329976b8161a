"""The drives of a node: capacity, bandwidth, endurance, and how long they last."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tierstore.errors import PlanError
from tierstore.units import parse_bytes, parse_endurance

WARRANTY_DAYS = 5 * 365
"""Days for which drives are rated in drive writes per day (DWPD): five years."""

SECONDS_PER_DAY = 86_400

_EXAMPLE = "'4x3.84TB@7/5GB/s,1DWPD' (drives, capacity, read and write bandwidth, endurance)"
_NUMBER = r"\d{1,15}(?:\.\d{1,15})?"
_DRIVES = re.compile(
    rf"(?:(?P<count>\d{{1,6}})x)?(?P<capacity>{_NUMBER}\s?[KMGTP]i?B)"
    rf"@(?P<read>{_NUMBER})/(?P<write>{_NUMBER})(?P<unit>[KMGT]i?B)/s"
    rf"(?:,(?:(?P<dwpd>{_NUMBER})DWPD|(?P<written>{_NUMBER}[TP]BW)))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """Equal drives of one node, over which pages are striped."""

    count: int
    capacity: int
    """Bytes of one drive."""
    read_rate: float
    """Bytes per second that one drive reads."""
    write_rate: float
    """Bytes per second that one drive writes for hours."""
    endurance: float | None
    """Bytes that may be written to one drive in its life; None if that is not known."""

    @property
    def nbytes(self) -> int:
        """Capacity of all drives."""
        return self.count * self.capacity


def drives_of(text: str | None, *, probed: bool) -> Drives | None:
    """Return the drives that a plan is made for; None if only a probe tells of them.

    Args:
        text: as for parse_drives(); None: not given.
        probed: whether a probe of the drives is given.

    Raises:
        PlanError: as parse_drives(), or nothing tells of the drives.
    """
    if text is not None:
        return parse_drives(text)
    if not probed:
        raise PlanError(
            f"a plan needs drives, such as {_EXAMPLE}, or a probe, a file that `tierstore probe "
            "--json` printed, or both"
        )
    return None


def parse_drives(text: str) -> Drives:
    """Return drives from a text such as ``"4x3.84TB@7/5GB/s,1DWPD"``.

    One drive writes per day (DWPD) is its capacity on each day of five years. ``600TBW`` and
    ``7PBW`` are the bytes written in all. Without either the endurance is not known.

    Raises:
        PlanError: the text is something else, or a number is 0.
    """
    match = _DRIVES.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"drives must look like {_EXAMPLE}, got {text[:80]!r}")
    part = match.groupdict()
    try:
        capacity = parse_bytes(part["capacity"])
        endurance = float(parse_endurance(part["written"])) if part["written"] else None
    except ValueError as error:
        raise PlanError(f"{error}: write {_EXAMPLE}") from error
    unit = parse_bytes(f"1{part['unit']}")
    if part["dwpd"]:
        endurance = float(part["dwpd"]) * capacity * WARRANTY_DAYS
    drives = Drives(
        count=int(part["count"] or 1),
        capacity=capacity,
        read_rate=float(part["read"]) * unit,
        write_rate=float(part["write"]) * unit,
        endurance=endurance,
    )
    numbers = (drives.count, drives.capacity, drives.read_rate, drives.write_rate, endurance)
    if 0 in numbers:
        raise PlanError(f"drives need numbers above 0, got {text[:80]!r}: write {_EXAMPLE}")
    return drives


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """Wear of the drives of one node under a run."""

    bytes_per_day: float
    """Bytes written to all drives of the node in a day."""
    drive_writes_per_day: float
    steps: float | None
    """Steps until the endurance is used up; infinite if nothing is written, None if not known."""
    days: float | None
    """Days until then."""


def wear_of(drives: Drives, *, step_bytes: float, step_s: float, used: float = 0.0) -> Wear:
    """Return how fast steps wear drives. Drives write as many bytes as the store writes to them.

    Pages are written whole, megabytes at a time, so drives hardly move data themselves.

    Example: writing 6 bytes for each of 8e9 parameters every 10 s is 415 TB a day. One drive of
    3.84 TB rated at 1 DWPD is written 108 times a day, and lasts 17 days.

    Args:
        drives: the drives of the node.
        step_bytes: bytes that all ranks of the node write to them in a step, on average.
        step_s: seconds from one step to the next.
        used: fraction of the endurance that is used already.
    """
    bytes_per_day = step_bytes * SECONDS_PER_DAY / step_s
    steps = None
    if drives.endurance is not None:
        left = max(0.0, 1 - used) * drives.endurance * drives.count
        steps = left / step_bytes if step_bytes else math.inf
    return Wear(
        bytes_per_day=bytes_per_day,
        drive_writes_per_day=bytes_per_day / drives.nbytes,
        steps=steps,
        days=None if steps is None else steps * step_s / SECONDS_PER_DAY,
    )
