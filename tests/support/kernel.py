"""Counters of this process: bytes read and written, anonymous memory, torch's allocator."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch


def disk_bytes() -> tuple[int, int]:
    """Bytes read from and written to block devices so far, by all threads."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    counts = dict(line.split(": ") for line in text.splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def reset_peak() -> None:
    """Let the kernel's peak begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def anonymous_peak() -> int:
    """Most bytes of anonymous memory since reset_peak(): the peak less the files mapped."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    kib = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * 1024


def peak_of(action: Callable[[], object]) -> int:
    """Return the most bytes of torch's allocator that an action has more than there were before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))
