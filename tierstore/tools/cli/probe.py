"""``tierstore probe``: measure the disks and processors of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.tools.cli.arguments import JsonOption, size_of
from tierstore.tools.cli.exit_codes import exit_codes
from tierstore.tools.cli.output import complain, plain, shape_text, table, write, write_lines
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.tools.probe.result import Bandwidths, DirectoryProbe, Probe, Rate


def probe(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Existing directories, one per disk.")
    ],
    sustained: Annotated[
        str, typer.Option(help="Bytes of a long write to each directory, to leave drive caches.")
    ] = "0",
    page_bytes: Annotated[str, typer.Option(help="Bytes of a page.")] = "32MiB",
    as_json: JsonOption = False,
) -> None:
    """Measure disks, processor and GPU, for fit and plan.

    Says first how many bytes it writes, and leaves nothing behind. Exits with 1 if a disk is too
    full.
    """
    with exit_codes(as_json):
        page_size = size_of("--page-bytes", page_bytes)
        sustained_bytes = size_of("--sustained", sustained)
        from tierstore.tools.probe.probe import probe as probe_machine

        result = probe_machine(
            directories,
            page_bytes=page_size,
            sustained=sustained_bytes,
            announce=lambda path, nbytes: complain(
                f"writes at most {format_bytes(nbytes)} to {path}, and removes them"
            ),
        )
        if as_json:
            write(result.to_json() + "\n")
        else:
            write_lines(_lines(result))


def _lines(probe: Probe) -> Iterator[str]:
    machine, compute = probe.machine, probe.compute
    locked = machine.locked_memory_bytes
    yield plain(
        f"{machine.host}: {machine.cpu}, {machine.cores} cores ({machine.threads} threads of "
        f"torch), {format_bytes(machine.memory_bytes)}, {machine.kernel}, torch {machine.torch}"
    )
    yield (
        f"locked memory: {'no limit' if locked is None else format_bytes(locked)}; "
        f"huge pages: {machine.huge_pages or 'unknown (the kernel does not tell)'}; "
        f"GPU: {plain(machine.gpu or 'none')}"
    )
    for directory in probe.directories:
        yield from _directory_lines(directory)
    rows: list[tuple[str, Rate | None]] = []
    for directory in probe.directories:
        rows += _rows(plain(directory.path), directory.bandwidths)
        if directory.sustained is not None:
            rows.append((f"{plain(directory.path)} sustained", directory.sustained.bytes_per_s))
    if probe.together is not None:
        rows += _rows("all directories", probe.together)
    rows += [
        ("memory copy", compute.copy),
        ("checksum, 1 thread", compute.checksum),
        ("rounding to bfloat16", compute.rounding),
    ]
    if machine.gpu is not None:
        rows += [("host to GPU", compute.host_to_device), ("GPU to host", compute.device_to_host)]
    yield from _table("rate", rows, lambda value: f"{format_bytes(int(value))}/s")
    times = [(f"{plain(one.path)} commit", one.commit_seconds) for one in probe.directories]
    times += [
        (plain(f"{one.work} {shape_text(one.shape)} {one.dtype} {one.device}"), one.seconds)
        for one in compute.optimizers
    ]
    yield from _table("time", times, lambda value: f"{value * 1000:.2f} ms")
    if not compute.optimizers:
        yield "optimizers: unknown (no installed package has a measurement)"


def _directory_lines(directory: DirectoryProbe) -> Iterator[str]:
    path = plain(directory.path)
    aligned = (
        f"alignment {directory.memory_alignment} B in memory and "
        f"{directory.offset_alignment} B in files"
        if directory.memory_alignment
        else "alignment unknown (the kernel or filesystem does not tell)"
    )
    direct = "O_DIRECT" if directory.direct else "no O_DIRECT"
    yield f"{path}: {directory.engine} ({plain(directory.engine_reason)}), {direct}, {aligned}"
    yield (
        f"{path}: {format_bytes(directory.free_bytes)} free, {format_bytes(directory.page_bytes)} "
        f"pages, {directory.pages_in_flight} in flight, {format_bytes(directory.written_bytes)} "
        "written"
    )
    if directory.sustained is not None:
        last = format_bytes(int(directory.sustained.last_bytes_per_s))
        yield f"{path}: the last tenth of the sustained write at {last}/s"
    for drive in directory.drives:
        model = plain(drive.model or "unknown model")
        wear = (
            f"{drive.percentage_used}% used, {format_bytes(drive.bytes_written or 0)} written"
            if drive.unknown is None
            else f"wear unknown ({plain(drive.unknown)})"
        )
        yield f"{path}: {plain(drive.name)}, {model}, {wear}"
    for note in directory.notes:
        yield f"{path}: {plain(note)}"


def _rows(name: str, bandwidths: Bandwidths) -> list[tuple[str, Rate | None]]:
    return [
        (f"{name} write", bandwidths.write),
        (f"{name} read", bandwidths.read),
        (f"{name} mixed", bandwidths.mixed),
    ]


def _table(
    header: str, rows: Sequence[tuple[str, Rate | None]], text: Callable[[float], str]
) -> Iterator[str]:
    def column(name: str) -> Callable[[tuple[str, Rate | None]], str]:
        return lambda row: "unknown" if row[1] is None else text(getattr(row[1], name))

    columns: dict[str, Callable[[tuple[str, Rate | None]], object]] = {header: lambda row: row[0]}
    names = ("median", "lowest", "highest")
    columns |= {name: column(name) for name in names}
    columns["rounds"] = lambda row: row[1].rounds if row[1] else ""
    yield from table(columns, rows, right=(*names, "rounds"))
