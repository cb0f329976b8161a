"""Speed of writing and reading plain memory with storage engines and other Python libraries.

Every way rewrites its own file in place until it is durable, and reads it from the device. The ways
take turns; the first engine has two turns in each round to show the noise.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import aiofiles
import numpy as np
import torch
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
from storage import huge_memory
from typing_extensions import override

from tierstore.errors import RunDirectoryError
from tierstore.storage import Extent, open_storage
from tierstore.units import format_bytes


class Way(ABC):
    """One way to move the bytes of a buffer.

    Args:
        directory: folder of its file.
        nbytes: size of the file and of the buffer.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.path = directory / "file"
        self.buffer: Any = torch.frombuffer(huge_memory(nbytes), dtype=torch.uint8)

    @abstractmethod
    def write(self) -> None:
        """Rewrite the file from the buffer, not necessarily durably."""

    @abstractmethod
    def read(self) -> None:
        """Read the file into the buffer, or replace the buffer by what was read."""

    def close(self) -> None:  # noqa: B027
        """Release resources; nothing by default."""


class StorageWay(Way):
    """A storage engine of tierstore with a registered buffer, as in a store."""

    def __init__(self, directory: Path, nbytes: int, engine: str) -> None:
        super().__init__(directory, nbytes)
        self._memory = memoryview(self.buffer.numpy())
        self._extent = Extent(0, nbytes)
        self._storage = open_storage(directory, engine)
        self._storage.register(self._memory)
        self._storage.create("file", nbytes)

    @override
    def write(self) -> None:
        self._storage.write("file", self._extent, self._memory).wait()

    @override
    def read(self) -> None:
        self._storage.read("file", self._extent, self._memory).wait()

    @override
    def close(self) -> None:
        self._storage.close()


class TorchWay(Way):
    """torch.save and torch.load of one tensor."""

    @override
    def write(self) -> None:
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            torch.save(self.buffer, file)

    @override
    def read(self) -> None:  # torch.load() allocates the buffer.
        self.buffer = torch.load(self.path, weights_only=True)


class AiofilesWay(Way):
    """The aiofiles package."""

    @override
    def write(self) -> None:
        asyncio.run(self._move("r+b" if self.path.exists() else "wb"))

    @override
    def read(self) -> None:
        asyncio.run(self._move("rb"))

    async def _move(self, mode: Literal["r+b", "wb", "rb"]) -> None:
        memory = memoryview(self.buffer.numpy())
        async with aiofiles.open(self.path, mode, buffering=0) as file:
            moved = 0
            while moved < len(memory):
                move = file.readinto if mode == "rb" else file.write
                moved += await move(memory[moved:])


class MemmapWay(Way):
    """Copies to and from numpy.memmap."""

    @override
    def write(self) -> None:
        array = self.buffer.numpy()
        mode: Literal["r+", "w+"] = "r+" if self.path.exists() else "w+"
        mapped = np.memmap(self.path, np.uint8, mode, shape=array.shape)
        mapped[:] = array
        mapped.flush()

    @override
    def read(self) -> None:
        self.buffer.numpy()[:] = np.memmap(self.path, np.uint8, "r")


class DeepSpeedWay(Way):
    """DeepSpeed's aio_handle with its own page-locked memory; built at the first use."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        super().__init__(directory, nbytes)
        from deepspeed.ops.op_builder import AsyncIOBuilder

        # block_size, queue_depth, single_submit, overlap_events, threads.
        self._handle = AsyncIOBuilder().load().aio_handle(8 * MIB, 32, False, True, 1)
        locked = self._handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
        self.buffer = locked.copy_(self.buffer)

    @override
    def write(self) -> None:
        self._handle.sync_pwrite(self.buffer, str(self.path), 0)

    @override
    def read(self) -> None:
        self._handle.sync_pread(self.buffer, str(self.path), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all rounds."""

    way: str
    operation: str
    mib_per_s: float
    cpu_s_per_gib: float
    ratio: tuple[float, ...]
    """Time over the time of the first way in the same round: extremes and quartiles."""


def open_ways(directory: Path, nbytes: int) -> tuple[dict[str, Way], list[str]]:
    """Return all ways that work here, tierstore's first, and why other ways do not."""
    ways: dict[str, Way] = {}
    absent = []

    def folder(name: str) -> Path:
        path = directory / name.replace(" ", "-")
        path.mkdir()
        return path

    for engine in ("io_uring", "libaio"):
        try:
            ways[engine] = StorageWay(folder(engine), nbytes, engine)
        except RunDirectoryError as error:
            absent.append(str(error))
    others: dict[str, Callable[[Path, int], Way]] = {
        "torch": TorchWay,
        "aiofiles": AiofilesWay,
        "numpy.memmap": MemmapWay,
        "DeepSpeed aio": DeepSpeedWay,
    }
    for name, way in others.items():
        if way is DeepSpeedWay and importlib.util.find_spec("deepspeed") is None:
            absent.append("DeepSpeed is not installed")
        else:
            ways[name] = way(folder(name), nbytes)
    return ways, absent


def measure(way: Way, operation: str, expected: torch.Tensor) -> tuple[float, float]:
    """Return wall and processor seconds, and leave nothing in the page cache."""
    if operation == "read":
        way.buffer[:: 64 * MIB] += 1  # Detects parts that are not read.
    began_cpu_s, began_s = cpu_seconds(), time.perf_counter()
    if operation == "write":
        way.write()
        with way.path.open("rb") as file:
            os.fdatasync(file.fileno())
    else:
        way.read()
    wall_s, cpu_s = time.perf_counter() - began_s, cpu_seconds() - began_cpu_s
    drop_from_cache(way.path)
    if not torch.equal(way.buffer, expected):
        raise RuntimeError(f"{type(way).__name__} did not read the bytes that it wrote")
    return wall_s, cpu_s


def measure_all(ways: dict[str, Way], nbytes: int, rounds: int) -> list[Row]:
    """Measure all ways in turn, and the first way twice per round."""
    first = next(iter(ways))
    expected = ways[first].buffer.clone()
    turns = [*ways, f"{first} again"]
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name in ways:
        measure(ways[name], "write", expected)  # The first write of a file costs more.
    for index in track(range(rounds), description=format_bytes(nbytes)):
        for operation in ("write", "read"):
            for turn in rotated(turns, index):
                taken = measure(ways[turn.removesuffix(" again")], operation, expected)
                measured.setdefault((turn, operation), []).append(taken)
    return [
        Row(
            way=turn,
            operation=operation,
            mib_per_s=nbytes / MIB / statistics.median(wall_s for wall_s, _ in taken),
            cpu_s_per_gib=statistics.median(cpu_s for _, cpu_s in taken) / (nbytes / GIB),
            ratio=spread(
                [
                    wall_s / first_s
                    for (wall_s, _), (first_s, _) in zip(
                        taken, measured[first, operation], strict=True
                    )
                ]
            ),
        )
        for (turn, operation), taken in measured.items()
    ]


def print_table(rows: list[Row], nbytes: int) -> None:
    """Print the results as a table."""
    table = Table(title=f"Plain transfers of {format_bytes(nbytes)}, medians (quartiles)")
    for heading in ("way", "operation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("MiB/s", "times as long as the first", "CPU s/GiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.way,
            row.operation,
            f"{row.mib_per_s:.0f}",
            ratio_text(row.ratio),
            f"{row.cpu_s_per_gib:.4f}",
        )
    Console(width=100).print(table)


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Measure every way of writing and reading one buffer."""
    torch.set_num_threads(1)  # Other threads would spin after each comparison.
    nbytes, rounds = (16 * MIB, 2) if small else (GIB, 15)
    with scratch_folder(directory) as scratch:
        ways, absent = open_ways(scratch, nbytes)
        try:
            rows = measure_all(ways, nbytes, rounds)
        finally:
            for way in ways.values():
                way.close()
    print_table(rows, nbytes)
    for reason in absent:
        typer.echo(f"not measured: {reason}")
    write_report(json_path, rows=[asdict(row) for row in rows], not_measured=absent)


if __name__ == "__main__":
    typer.run(main)
