"""Processors and memory that this process may use: limits of the container, not of the host."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the processors that this process may use, at least 1."""
    found = [float(len(os.sched_getaffinity(0)))]
    for text in _limits("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            found.append(int(quota) / int(period))
    quotas, periods = _limits("cpu", "cpu.cfs_quota_us"), _limits("cpu", "cpu.cfs_period_us")
    found += [int(q) / int(p) for q, p in zip(quotas, periods, strict=True) if int(q) > 0]
    return max(1, math.ceil(min(found)))


def memory_bytes() -> int:
    """Return the bytes of memory that this process and its container may use together."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory.limit_in_bytes"):
        found += [int(text) for text in _limits("memory", name) if text != "max"]
    return min(found)


def _limits(controller: str, name: str) -> Iterator[str]:
    """Yield the content of a file of the group of this process, and of all groups around it.

    Args:
        controller: of version 1, where each controller has groups of its own.
        name: of the file, which differs between version 1 and 2.
    """
    for line in _OWN.read_text().splitlines() if _OWN.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [_ROOT, _ROOT / "unified"]
        elif controller in controllers.split(","):
            roots = [_ROOT / controllers, _ROOT / controller]
        else:
            continue
        # In a container, the path may be the path on the host; then the root is the group.
        group = Path(path.lstrip("/"))
        for root in dict.fromkeys(roots):
            for folder in (group, *group.parents):
                file = root / folder / name
                if file.is_file():
                    yield file.read_text().strip()
