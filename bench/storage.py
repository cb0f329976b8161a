"""How fast each storage engine moves pages, beside fio with the same geometry.

Engine and fio take turns on the same file, so that a drift of the device meets both, and
each pair gives one ratio. Buffers are 2 MiB-aligned and on huge pages for both.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from tierstore.errors import RunDirectoryError
from tierstore.storage import Extent, Storage, open_storage
from tierstore.units import align_up, format_bytes

MIB = 1 << 20
GIB = 1 << 30
HUGE_PAGE_BYTES = 2 * MIB
ENGINES = ("io_uring", "aiofiles")
REQUEST_BYTES = 8 * MIB
REQUESTS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run of the benchmark measures."""

    page_bytes: tuple[int, ...]
    """Page sizes."""
    bytes_per_run: int
    """A page smaller than this is moved several times in one measurement."""
    pairs: int
    """Measurements of each kind; medians are taken over them."""


PLANS = {
    "small": Plan(page_bytes=(16 * MIB,), bytes_per_run=32 * MIB, pairs=2),
    "default": Plan(page_bytes=(16 * MIB, 64 * MIB), bytes_per_run=256 * MIB, pairs=7),
    "full": Plan(page_bytes=(16 * MIB, 64 * MIB, GIB), bytes_per_run=GIB, pairs=7),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One measurement."""

    mib_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all pairs. None where fio is not installed."""

    engine: str
    operation: str
    page_bytes: int
    pairs: int
    mib_per_s: float
    cpu_s_per_gib: float
    fio_mib_per_s: float | None
    fio_cpu_s_per_gib: float | None
    ratio_median: float | None
    ratio_min: float | None
    ratio_max: float | None


def huge_buffer(nbytes: int) -> memoryview:
    """Return populated memory of ``nbytes`` that starts at a multiple of 2 MiB."""
    # Private: huge pages of shared memory are off on most machines.
    mapping = mmap.mmap(
        -1,
        align_up(nbytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    start = -address % HUGE_PAGE_BYTES
    buffer = memoryview(mapping)[start : start + nbytes]
    pattern = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8)
    for offset in range(0, nbytes, MIB):
        buffer[offset : offset + MIB] = pattern.data
    return buffer


@contextmanager
def opened(directory: Path, engine: str) -> Iterator[Storage]:
    """Open a storage for the length of a block."""
    with closing(open_storage(directory, engine)) as storage:
        yield storage


def measure_engine(storage: Storage, operation: str, buffer: memoryview, repeats: int) -> Speed:
    """Move the page ``repeats`` times, one after the other."""
    start = storage.read if operation == "read" else storage.write
    extent = Extent(0, buffer.nbytes)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    for _ in range(repeats):
        start("page", extent, buffer).wait()
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    nbytes = repeats * buffer.nbytes
    return Speed(mib_per_s=nbytes / MIB / wall_s, cpu_s_per_gib=cpu_s / (nbytes / GIB))


def measure_fio(path: Path, operation: str, page_bytes: int, repeats: int) -> Speed:
    """Let fio move the same file as often, with direct I/O on huge pages."""
    done = subprocess.run(
        [
            "fio",
            "--name=page",
            f"--filename={path}",
            f"--rw={operation}",
            f"--size={page_bytes}",
            f"--loops={repeats}",
            f"--bs={min(REQUEST_BYTES, page_bytes)}",
            f"--iodepth={REQUESTS_IN_FLIGHT}",
            "--ioengine=libaio",
            "--direct=1",
            "--overwrite=1",
            "--thread=1",
            "--output-format=json",
        ],
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        capture_output=True,
        text=True,
        check=True,
    )
    job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
    measured = job[operation]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * measured["runtime"] / 1000
    return Speed(
        mib_per_s=measured["bw_bytes"] / MIB,
        cpu_s_per_gib=cpu_s / (measured["io_bytes"] / GIB),
    )


def measure_row(
    storage: Storage, operation: str, buffer: memoryview, plan: Plan, *, with_fio: bool
) -> Row:
    """Measure one engine, operation and page size in interleaved pairs with fio."""
    repeats = max(1, plan.bytes_per_run // buffer.nbytes)
    path = Path(storage.location) / "page"
    ours: list[Speed] = []
    fios: list[Speed] = []
    for pair in range(plan.pairs):
        # Who goes first alternates: the first after a pause may find the device faster.
        if with_fio and pair % 2:
            fios.append(measure_fio(path, operation, buffer.nbytes, repeats))
        ours.append(measure_engine(storage, operation, buffer, repeats))
        if with_fio and not pair % 2:
            fios.append(measure_fio(path, operation, buffer.nbytes, repeats))
    ratios = [our.mib_per_s / fio.mib_per_s for our, fio in zip(ours, fios, strict=with_fio)]
    return Row(
        engine=storage.engine,
        operation=operation,
        page_bytes=buffer.nbytes,
        pairs=plan.pairs,
        mib_per_s=statistics.median(speed.mib_per_s for speed in ours),
        cpu_s_per_gib=statistics.median(speed.cpu_s_per_gib for speed in ours),
        fio_mib_per_s=statistics.median(fio.mib_per_s for fio in fios) if fios else None,
        fio_cpu_s_per_gib=statistics.median(fio.cpu_s_per_gib for fio in fios) if fios else None,
        ratio_median=statistics.median(ratios) if ratios else None,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
    )


def measure_all(directory: Path, plan: Plan, *, with_fio: bool) -> tuple[list[Row], list[str]]:
    """Return the rows of all engines that work, and why the others do not."""
    rows: list[Row] = []
    absent: list[str] = []
    for engine in ENGINES:
        try:
            open_storage(directory, engine).close()
        except RunDirectoryError as error:
            absent.append(str(error))
            continue
        for page_bytes in plan.page_bytes:
            buffer = huge_buffer(page_bytes)
            with opened(directory, engine) as storage:
                storage.create("page", page_bytes)
                # Written once before: the first write of allocated space costs more.
                storage.write("page", Extent(0, page_bytes), buffer).wait()
                storage.flush(["page"])
                for operation in ("write", "read"):
                    rows.append(measure_row(storage, operation, buffer, plan, with_fio=with_fio))
                storage.unlink("page")
    return rows, absent


def print_table(rows: list[Row]) -> None:
    """Print what was measured, one line for each row."""
    table = Table(title="Page transfers, medians")
    for heading in ("engine", "operation", "page"):
        table.add_column(heading, no_wrap=True)
    for heading in ("MiB/s", "CPU s/GiB", "fio MiB/s", "fio CPU s/GiB", "of fio (min..max)"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratio = "-"
        if row.ratio_median is not None:
            ratio = f"{row.ratio_median:.2f} ({row.ratio_min:.2f}..{row.ratio_max:.2f})"
        table.add_row(
            row.engine,
            row.operation,
            format_bytes(row.page_bytes),
            f"{row.mib_per_s:.0f}",
            f"{row.cpu_s_per_gib:.4f}",
            "-" if row.fio_mib_per_s is None else f"{row.fio_mib_per_s:.0f}",
            "-" if row.fio_cpu_s_per_gib is None else f"{row.fio_cpu_s_per_gib:.4f}",
            ratio,
        )
    Console().print(table)


def main(
    directory: Annotated[
        Path, typer.Option(help="A directory on the device; a temporary one is made inside.")
    ] = Path("."),
    small: Annotated[bool, typer.Option("--small", help="A few seconds, to see it run.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Pages of 1 GiB too.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file.")
    ] = None,
) -> None:
    """Measure reads and writes of pages through each storage engine, beside fio."""
    if small and full:
        raise typer.BadParameter("--small and --full exclude each other")
    plan = PLANS["small" if small else "full" if full else "default"]
    with_fio = shutil.which("fio") is not None
    with tempfile.TemporaryDirectory(prefix="bench-storage-", dir=directory) as scratch:
        rows, absent = measure_all(Path(scratch), plan, with_fio=with_fio)
    print_table(rows)
    for reason in absent:
        typer.echo(f"not measured: {reason}")
    if not with_fio:
        typer.echo("fio is not installed: no comparison")
    if json_path is not None:
        report = {"rows": [asdict(row) for row in rows], "not_measured": absent}
        json_path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
