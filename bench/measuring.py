"""Options, turns, ratios and reports that the benchmarks share."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
import typer
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30

DirectoryOption = Annotated[
    Path, typer.Option(help="A folder on the disk to measure; a temporary one is made inside.")
]
SmallOption = Annotated[bool, typer.Option("--small", help="A few seconds, to see it work.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Where to write all results.")]


@contextlib.contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Make a temporary folder inside a directory and remove it at the end.

    Its path is absolute: as the address of a rendezvous, a relative one names a host.
    """
    parent = directory.resolve()
    with tempfile.TemporaryDirectory(dir=parent, prefix="tierstore-bench-") as scratch:
        yield Path(scratch)


def cpu_seconds() -> float:
    """Return the processor time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_anonymous_bytes() -> int:
    """Return the peak memory of this process, without mapped files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {key: int(status[key].split()[0]) for key in ("VmHWM", "RssFile")}
    return (kib["VmHWM"] - kib["RssFile"]) * 1024


def kernel_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from drives and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def drop_from_cache(path: Path) -> None:
    """Remove a file, whose content is durable, from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def profile_threads(*activities: ProfilerActivity) -> profile:
    """Return a profiler of all threads of this process."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, experimental_config=every_thread)


def rotated(cases: Sequence[T], round_number: int) -> list[T]:
    """Return the cases, with another one first in each round.

    The first case after a pause may find the disk faster.
    """
    first = round_number % len(cases)
    return [*cases[first:], *cases[:first]]


def medians(results: Sequence[Any]) -> dict[str, float]:
    """Return the median of each field over dataclasses of one class."""
    return {
        field.name: statistics.median(getattr(result, field.name) for result in results)
        for field in fields(results[0])
    }


def spread(ratios: Sequence[float]) -> tuple[float, ...]:
    """Return the minimum, the quartiles and the maximum."""
    return tuple(float(value) for value in np.quantile(ratios, (0, 0.25, 0.5, 0.75, 1)))


def ratio_text(values: tuple[float, ...] | None, digits: int = 2) -> str:
    """Format the median and quartiles of a spread."""
    if values is None:
        return "-"
    _, low, median, high, _ = (f"{value:.{digits}f}" for value in values)
    return f"{median} ({low}..{high})"


def write_report(path: Path | None, **measured: Any) -> None:
    """Write results as JSON, with facts of the machine; None writes nothing."""
    if path is None:
        return
    report = {"machine": machine(), **measured}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return facts of the machine and software that results depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = {
        "cpu": next((line.split(": ")[1] for line in cpuinfo if "model name" in line), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    if shutil.which("fio") is not None:
        version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True)
        facts["fio"] = version.stdout.strip()
    return facts
