"""What the programs of this folder share: options, ratios with their spread, reports."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

MIB = 1 << 20
GIB = 1 << 30

DirectoryOption = Annotated[
    Path, typer.Option(help="A folder on the disk to measure; a temporary one is made inside.")
]
SmallOption = Annotated[bool, typer.Option("--small", help="A few seconds, to see it work.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Where to write it all.")]


@contextlib.contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Make a folder, and remove it with all that is in it."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="tierstore-bench-") as scratch:
        yield Path(scratch)


def cpu_seconds() -> float:
    """Return the processor time that all threads of this process have taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spread(ratios: Sequence[float]) -> tuple[float, ...]:
    """Return the least, the quartiles and the greatest."""
    return tuple(float(value) for value in np.quantile(ratios, (0, 0.25, 0.5, 0.75, 1)))


def ratio_text(values: tuple[float, ...] | None, digits: int = 2) -> str:
    """Return the median of a spread with its quartiles, to be read."""
    if values is None:
        return "-"
    _, low, median, high, _ = (f"{value:.{digits}f}" for value in values)
    return f"{median} ({low}..{high})"


def write_report(path: Path | None, **measured: Any) -> None:
    """Write what was measured as JSON, and on what; None: nowhere."""
    if path is None:
        return
    report = {"machine": machine(), **measured}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return what a figure depends on besides the program."""
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
