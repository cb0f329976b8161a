"""Speed of each storage engine when it moves pages, beside fio with requests of the same size.

fio and the engines take turns on the same files, so that a drift of the device meets all of
them, and fio runs twice in each round: how much it differs from itself is how much of any
other difference is noise. Buffers are on huge pages for all. The engines keep several pages in
flight, as a sweep does.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from measuring import (
    GIB,
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    cpu_seconds,
    drop_from_cache,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tierstore.errors import RunDirectoryError
from tierstore.run.checksums import block_checksum
from tierstore.storage import Extent, Storage, Transfer, open_storage
from tierstore.units import align_up, format_bytes

HUGE_PAGE_BYTES = 2 * MIB
ENGINES = ("io_uring", "libaio", "aiofiles")
OPERATIONS = ("read", "write", "mixed")
# Size of requests of fio and of blocks with a checksum.
REQUEST_BYTES = 8 * MIB
REQUESTS_IN_FLIGHT = 8
# Bytes of pages in flight; at least two pages.
IN_FLIGHT_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    page_bytes: tuple[int, ...]
    bytes_per_run: int
    """Bytes read or written in one measurement, with "mixed" both; at least two pages."""
    rounds: int


PLANS = {
    "small": Plan(page_bytes=(16 * MIB,), bytes_per_run=32 * MIB, rounds=2),
    "default": Plan(page_bytes=(16 * MIB, 64 * MIB), bytes_per_run=GIB, rounds=5),
    "full": Plan(page_bytes=(16 * MIB, 64 * MIB, GIB), bytes_per_run=2 * GIB, rounds=15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One measurement."""

    mib_per_s: float
    cpu_s_per_gib: float


@dataclass(slots=True)
class Series:
    """All rounds of one operation and page size."""

    operation: str
    page_bytes: int
    engines: dict[str, list[Speed]] = field(default_factory=dict)
    fio: list[tuple[Speed, Speed]] = field(default_factory=list)
    """Both runs of each round; empty without fio."""
    checksum_s_per_gib: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all rounds; None without fio."""

    engine: str
    operation: str
    page_bytes: int
    rounds: int
    mib_per_s: float
    cpu_s_per_gib: float
    checksum_s_per_gib: float
    """Processor time of checksums, which other figures do not include."""
    fio_mib_per_s: float | None
    fio_cpu_s_per_gib: float | None
    ratio: tuple[float, ...] | None
    """Speed over the speed of fio in the same round: extremes and quartiles."""
    fio_ratio: tuple[float, ...] | None
    """Speed of fio's second run over its first."""


class Pages:
    """Files of pages to read, files of pages to write, and buffers in one arena.

    Args:
        directory: folder of the files.
        page_bytes: size of each file and buffer.
        count: number of files to read, and of files to write.
    """

    def __init__(self, directory: Path, page_bytes: int, count: int) -> None:
        self.directory = directory
        self.page_bytes = page_bytes
        self.names = {
            operation: [f"{operation}-{index}" for index in range(count)]
            for operation in ("read", "write")
        }
        buffers = max(2, IN_FLIGHT_BYTES // page_bytes)
        self.memory = huge_memory(buffers * page_bytes)
        self.buffers = [
            self.memory[start : start + page_bytes]
            for start in range(0, len(self.memory), page_bytes)
        ]

    def create(self, storage: Storage) -> None:
        """Create all files and write each once: the first write of a file costs more."""
        names = [name for names in self.names.values() for name in names]
        for name in names:
            storage.create(name, self.page_bytes)
            storage.write(name, Extent(0, self.page_bytes), self.buffers[0]).wait()
        storage.flush(names)

    def drop_from_cache(self) -> None:
        """Remove the files from the page cache."""
        for names in self.names.values():
            for name in names:
                drop_from_cache(self.directory / name)

    def sequence(self, operation: str) -> Iterator[tuple[str, str]]:
        """Yield ("read" or "write", file name) forever."""
        while True:
            for read, write in zip(self.names["read"], self.names["write"], strict=True):
                if operation in ("read", "mixed"):
                    yield "read", read
                if operation in ("write", "mixed"):
                    yield "write", write


def huge_memory(nbytes: int) -> memoryview:
    """Return populated memory of ``nbytes`` that starts at a multiple of 2 MiB."""
    # Private, because most machines disable huge pages of shared memory.
    mapping = mmap.mmap(
        -1,
        align_up(nbytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    mapping.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    start = -address % HUGE_PAGE_BYTES
    memory = memoryview(mapping)[start : start + nbytes]
    pattern = np.random.default_rng(0).integers(0, 256, MIB, dtype=np.uint8)
    for offset in range(0, nbytes, MIB):
        memory[offset : offset + MIB] = pattern.data
    return memory


def measure_engine(storage: Storage, pages: Pages, operation: str, nbytes: int) -> Speed:
    """Move ``nbytes`` in pages; a buffer starts its next page as soon as it is free."""
    buffered = storage.engine == "aiofiles"
    if buffered:
        pages.drop_from_cache()
    extent = Extent(0, pages.page_bytes)
    moves = {"read": storage.read, "write": storage.write}
    transfers: list[Transfer] = []
    began_cpu_s, began_s = cpu_seconds(), time.perf_counter()
    for index, (kind, name) in zip(
        range(nbytes // pages.page_bytes), pages.sequence(operation), strict=False
    ):
        if index >= len(pages.buffers):
            transfers[index - len(pages.buffers)].wait()
        transfers.append(moves[kind](name, extent, pages.buffers[index % len(pages.buffers)]))
    for transfer in transfers:
        transfer.wait()
    wall_s, cpu_s = time.perf_counter() - began_s, cpu_seconds() - began_cpu_s
    if buffered:
        pages.drop_from_cache()  # Direct I/O of other engines would have to do it.
    return Speed(mib_per_s=nbytes / MIB / wall_s, cpu_s_per_gib=cpu_s / (nbytes / GIB))


def measure_fio(pages: Pages, operation: str) -> Speed:
    """Move the same files once with fio, with direct I/O on huge pages."""
    # Reads as a mix of 100% reads: only then fio touches its buffers before it starts.
    kinds = {"read": ("--rw=rw", "--rwmixread=100"), "write": ("--rw=write",)}
    if operation != "mixed":
        kinds = {operation: kinds[operation]}
    command = [
        "fio",
        "--ioengine=io_uring",
        "--direct=1",
        f"--bs={min(REQUEST_BYTES, pages.page_bytes)}",
        f"--iodepth={REQUESTS_IN_FLIGHT}",
        "--file_service_type=sequential",
        "--scramble_buffers=0",
        "--invalidate=0",
        "--overwrite=1",
        "--output-format=json",
    ]
    for kind, arguments in kinds.items():
        names = pages.names[kind]
        command += [f"--name={kind}", f"--filename={':'.join(names)}", *arguments]
        command.append(f"--size={len(names) * pages.page_bytes}")
    done = subprocess.run(
        command,
        cwd=pages.directory,
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        capture_output=True,
        text=True,
        check=True,
    )
    jobs: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    nbytes = sum(job[kind]["io_bytes"] for job, kind in zip(jobs, kinds, strict=True))
    wall_ms = max(job["job_runtime"] for job in jobs)
    cpu_ms = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] for job in jobs)
    return Speed(
        mib_per_s=nbytes / MIB / (max(wall_ms, 1) / 1000),
        cpu_s_per_gib=cpu_ms / 1000 / (nbytes / GIB),
    )


def measure_checksums(pages: Pages) -> float:
    """Return the processor seconds per GiB of the checksums of one buffer."""
    buffer = pages.buffers[0]
    began_cpu_s = cpu_seconds()
    for offset in range(0, len(buffer), REQUEST_BYTES):
        block = buffer[offset : offset + REQUEST_BYTES]
        block_checksum(block, run_id="bench", page=0, offset=offset, step=1)
    return (cpu_seconds() - began_cpu_s) / (len(buffer) / GIB)


def measure_series(
    storages: list[Storage], pages: Pages, operation: str, plan: Plan, *, with_fio: bool
) -> Series:
    """Measure one operation and page size with all engines and fio in turn."""
    nbytes = len(pages.names["read"]) * pages.page_bytes * (2 if operation == "mixed" else 1)
    series = Series(operation, pages.page_bytes)
    turns: list[tuple[str, Callable[[], Speed]]] = [
        (storage.engine, partial(measure_engine, storage, pages, operation, nbytes))
        for storage in storages
    ]
    if with_fio:
        fio = partial(measure_fio, pages, operation)
        turns = [("fio", fio), *turns, ("fio again", fio)]
    for index in track(
        range(plan.rounds), description=f"{operation} {format_bytes(pages.page_bytes)}"
    ):
        speeds = {name: measure() for name, measure in rotated(turns, index)}
        for storage in storages:
            series.engines.setdefault(storage.engine, []).append(speeds[storage.engine])
        if with_fio:
            series.fio.append((speeds["fio"], speeds["fio again"]))
        series.checksum_s_per_gib.append(measure_checksums(pages))
    return series


def rows_of(series: Series) -> list[Row]:
    """Return one row for each engine."""
    fio_mib_per_s = [statistics.mean(run.mib_per_s for run in both) for both in series.fio]
    fio_ratios = [second.mib_per_s / first.mib_per_s for first, second in series.fio]
    fio_cpu = [statistics.mean(run.cpu_s_per_gib for run in both) for both in series.fio]
    rows = []
    for engine, speeds in series.engines.items():
        ratios = [speed.mib_per_s / fio for speed, fio in zip(speeds, fio_mib_per_s, strict=False)]
        rows.append(
            Row(
                engine=engine,
                operation=series.operation,
                page_bytes=series.page_bytes,
                rounds=len(speeds),
                mib_per_s=statistics.median(speed.mib_per_s for speed in speeds),
                cpu_s_per_gib=statistics.median(speed.cpu_s_per_gib for speed in speeds),
                checksum_s_per_gib=statistics.median(series.checksum_s_per_gib),
                fio_mib_per_s=statistics.median(fio_mib_per_s) if series.fio else None,
                fio_cpu_s_per_gib=statistics.median(fio_cpu) if series.fio else None,
                ratio=spread(ratios) if ratios else None,
                fio_ratio=spread(fio_ratios) if fio_ratios else None,
            )
        )
    return rows


def measure_all(directory: Path, plan: Plan, *, with_fio: bool) -> tuple[list[Series], list[str]]:
    """Return all series of the engines that work, and errors of the other engines."""
    all_series: list[Series] = []
    absent: list[str] = []
    with ExitStack() as stack:
        storages: list[Storage] = []
        for engine in ENGINES:
            try:
                storages.append(stack.enter_context(closing(open_storage(directory, engine))))
            except RunDirectoryError as error:
                absent.append(str(error))
        for page_bytes in plan.page_bytes:
            pages = Pages(directory, page_bytes, max(2, plan.bytes_per_run // page_bytes))
            pages.create(storages[0])
            for storage in storages:
                storage.register(pages.memory)
            all_series += [
                measure_series(storages, pages, operation, plan, with_fio=with_fio)
                for operation in OPERATIONS
            ]
            for storage in storages:
                storage.register(memoryview(b""))
            for name in storages[0].list():
                storages[0].unlink(name)
    return all_series, absent


def print_table(rows: list[Row]) -> None:
    """Print the results as a table."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    table = Table(title="Page transfers, medians (quartiles)")
    for heading in ("engine", "operation", "page"):
        table.add_column(heading, no_wrap=True)
    for heading in ("MiB/s", "of fio", "fio of itself", "CPU s/GiB", "fio's", "checksums'"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.engine,
            row.operation,
            format_bytes(row.page_bytes),
            number(row.mib_per_s, 0),
            ratio_text(row.ratio),
            ratio_text(row.fio_ratio),
            number(row.cpu_s_per_gib, 4),
            number(row.fio_cpu_s_per_gib, 4),
            number(row.checksum_s_per_gib, 4),
        )
    Console(width=120).print(table)


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    full: Annotated[
        bool, typer.Option("--full", help="With pages of 1 GiB and 15 rounds: half an hour.")
    ] = False,
    json_path: JsonOption = None,
) -> None:
    """Measure reads and writes of pages through each storage engine, beside fio."""
    if small and full:
        raise typer.BadParameter("--small and --full exclude each other")
    plan = PLANS["small" if small else "full" if full else "default"]
    with_fio = shutil.which("fio") is not None
    with scratch_folder(directory) as scratch:
        all_series, absent = measure_all(scratch, plan, with_fio=with_fio)
    rows = [row for series in all_series for row in rows_of(series)]
    print_table(rows)
    for reason in absent:
        typer.echo(f"not measured: {reason}")
    if not with_fio:
        typer.echo("fio is not installed: no comparison")
    write_report(
        json_path,
        plan=asdict(plan),
        rows=[asdict(row) for row in rows],
        series=[asdict(series) for series in all_series],
        not_measured=absent,
    )


if __name__ == "__main__":
    typer.run(main)
