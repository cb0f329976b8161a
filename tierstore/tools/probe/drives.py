"""What the system tells of a directory's disk: alignment, drives and their wear."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierstore.tools.probe.result import Drive

_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MEMORY_ALIGN_AT, _OFFSET_ALIGN_AT = 152, 156
_AT_FDCWD = -100
_SMART_UNIT_BYTES = 512_000  # NVMe counts thousands of 512 bytes.
_SMARTCTL_SECONDS_MAX = 5


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


def drives_below(directory: Path, blocks: Path = Path("/sys/dev/block")) -> tuple[Drive, ...]:
    """Return the drives of a directory; none if it is on no block device (tmpfs, overlay, NFS).

    Args:
        directory: the directory.
        blocks: where sysfs lists block devices by number.
    """
    device = os.stat(directory).st_dev
    found = (blocks / f"{os.major(device)}:{os.minor(device)}").resolve()
    return tuple(_drive(disk) for disk in _disks(found)) if found.is_dir() else ()


def _disks(device: Path) -> Iterator[Path]:
    """Yield the disks that a partition, RAID or mapped device consists of."""
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
