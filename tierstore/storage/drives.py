"""The drives below a directory and their wear, as reported by the system."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_DEVICES = Path("/sys/dev/block")
"""Folder of sysfs with the block devices by number."""

_SMART_UNIT_BYTES = 512_000  # NVMe counts thousands of 512 bytes.
_SMARTCTL_SECONDS_MAX = 5


@dataclass(frozen=True, slots=True)
class Drive:
    """A drive below a directory. Values that the system does not report are None."""

    name: str
    model: str | None
    percentage_used: int | None
    """SMART wear. 100 is the rated life of the drive; larger values are possible."""
    bytes_written: int | None
    unknown: str | None
    """Reason why the wear is unknown."""


def drives_below(directory: Path) -> tuple[Drive, ...]:
    """Return the drives of a directory; () if it is not on a block device (tmpfs, overlay, NFS).

    A drive that does not answer takes five seconds.
    """
    device = os.stat(directory).st_dev
    found = (BLOCK_DEVICES / f"{os.major(device)}:{os.minor(device)}").resolve()
    return tuple(_drive(disk) for disk in _disks(found)) if found.is_dir() else ()


def _disks(device: Path) -> Iterator[Path]:
    """Yield the disks of a partition, RAID or mapped device."""
    if (device / "partition").exists():
        device = device.parent
    slaves = device / "slaves"
    below = sorted(slaves.iterdir()) if slaves.is_dir() else []
    for slave in below:
        yield from _disks(slave.resolve())
    if not below:
        yield device


def _drive(disk: Path) -> Drive:
    model_file = disk / "device/model"
    model = model_file.read_text().strip() if model_file.is_file() else None
    program = shutil.which("smartctl")
    if program is None:
        return Drive(disk.name, model, None, None, "smartctl is not installed")
    try:
        done = subprocess.run(
            [program, "--json", "--all", f"/dev/{disk.name}"],
            capture_output=True,
            timeout=_SMARTCTL_SECONDS_MAX,
            check=False,
        )
        body = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Drive(disk.name, model, None, None, f"smartctl failed: {type(error).__name__}")
    health = _field(body, "nvme_smart_health_information_log")
    used, units = _field(health, "percentage_used"), _field(health, "data_units_written")
    if type(used) is not int or type(units) is not int or min(used, units) < 0:
        messages = _field(_field(body, "smartctl"), "messages")
        said = _field(messages[0], "string") if type(messages) is list and messages else None
        reason = f"smartctl: {said}" if said else "smartctl reports no NVMe wear"
        return Drive(disk.name, model, None, None, reason)
    return Drive(disk.name, model, used, units * _SMART_UNIT_BYTES, None)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
