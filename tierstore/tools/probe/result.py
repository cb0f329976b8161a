"""The result of a probe, as a file of JSON that is checked when it is read."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.errors import PlanError
from tierstore.run.sealed import parse_json
from tierstore.storage.drives import Drive

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Rate:
    """Median and spread of several rounds, in the unit of the field that holds it."""

    median: float
    lowest: float
    highest: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second at page geometry. A figure is None if only the page cache was measured."""

    write: Rate
    """Pages written and flushed."""
    read: Rate | None
    mixed: Rate | None
    """Reads and writes at the same time; the bytes of both count."""


@dataclass(frozen=True, slots=True)
class Sustained:
    """One long write."""

    nbytes: int
    bytes_per_s: Rate
    """Of ten parts of the write."""
    last_bytes_per_s: float
    """Of the last part, after a cache of the drive may be full."""


@dataclass(frozen=True, slots=True)
class DirectoryProbe:
    """One directory."""

    path: str
    engine: str
    engine_reason: str
    direct: bool
    memory_alignment: int | None
    """Bytes that STATX_DIOALIGN requires of memory; None if the kernel does not tell."""
    offset_alignment: int | None
    filesystem: int
    """Its number (``st_dev``): directories with the same one share their free space."""
    free_bytes: int
    page_bytes: int
    pages_in_flight: int
    written_bytes: int
    """Bytes that the probe wrote, without the file system's own."""
    bandwidths: Bandwidths
    sustained: Sustained | None
    commit_seconds: Rate
    drives: tuple[Drive, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that was measured."""

    host: str
    cpu: str
    cores: int
    threads: int
    """Threads that torch computes with."""
    memory_bytes: int
    kernel: str
    torch: str
    gpu: str | None
    locked_memory_bytes: int | None
    """Limit of locked memory (``ulimit -l``); None without a limit."""
    huge_pages: str | None
    """Mode of transparent huge pages; None if the kernel has none."""


@dataclass(frozen=True, slots=True)
class OptimizerRate:
    """Time of one computation of an optimizer."""

    optimizer: str
    device: str
    work: str
    """Name of the computation, as the optimizer gives it."""
    shape: tuple[int, ...]
    """(matrices, rows, columns)."""
    dtype: str
    seconds: Rate


@dataclass(frozen=True, slots=True)
class Compute:
    """Rates of processor and GPU, in bytes per second; None without a GPU."""

    copy: Rate
    """Bytes copied from memory to memory."""
    checksum: Rate
    """Checksum of blocks, on one thread."""
    rounding: Rate
    """Bytes of float32 that are rounded to bfloat16."""
    host_to_device: Rate | None
    device_to_host: Rate | None
    optimizers: tuple[OptimizerRate, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """The measurement of a machine."""

    time: str
    """ISO 8601, UTC."""
    machine: Machine
    directories: tuple[DirectoryProbe, ...]
    together: Bandwidths | None
    """Sum over all directories, which are busy at once; None for a single directory."""
    compute: Compute

    @property
    def free_bytes(self) -> int:
        """Free bytes of the filesystems of all directories together."""
        return sum({one.filesystem: one.free_bytes for one in self.directories}.values())

    @property
    def life_used(self) -> float:
        """Share of the rated life that the most worn drive has used; 0 if none tells."""
        drives = [drive for one in self.directories for drive in one.drives]
        return max((drive.percentage_used or 0 for drive in drives), default=0) / 100

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Return the probe in a file.

        Raises:
            PlanError: the file cannot be read, or is not a probe.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PlanError(
                f"{path} cannot be read ({error.strerror}): make it with "
                "`tierstore probe --json DIR`"
            ) from error
        return cls.from_json(data, f"{path}")

    def to_json(self) -> str:
        """Return one line of JSON, with ``"format": 2``."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "the probe") -> Probe:
        """Return the probe that to_json() wrote.

        Args:
            text: JSON.
            where: the file, for errors.

        Raises:
            PlanError: the text is not a probe; the message names the field.
        """
        try:
            data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
            body = parse_json(data)
            if type(body) is not dict or type(body.get("format")) is not int:
                raise ValueError("'format' is missing")
            if body.pop("format") != FORMAT:
                raise ValueError(f"'format' is not {FORMAT}, which this version reads")
            probe: Probe = _checked(cls, body, "")
        except ValueError as error:  # Also for text that is not JSON or not UTF-8.
            raise PlanError(
                f"{where} is not the result of a probe: {error}. Make it again with "
                "`tierstore probe --json DIR`"
            ) from error
        return probe


def _checked(kind: Any, value: Any, place: str) -> Any:
    """Return a value of JSON as the type of a field, or raise ValueError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _checked(arguments[0], value, place)
    if origin is tuple and type(value) is list:
        items = enumerate(value)
        return tuple(_checked(arguments[0], item, f"{place}[{index}]") for index, item in items)
    if dataclasses.is_dataclass(kind) and type(value) is dict:
        kinds = typing.get_type_hints(kind)
        if differing := sorted(kinds.keys() ^ value.keys()):
            missing = differing[0] in kinds
            name = f"{place}.{differing[0]}".lstrip(".")[:100]
            raise ValueError(f"{name!r} is {'missing' if missing else 'not known'}")
        fields = {
            name: _checked(kinds[name], value[name], f"{place}.{name}".lstrip("."))
            for name in kinds
        }
        return typing.cast(Any, kind)(**fields)
    if kind is float and type(value) is int and 0 <= value < 2**63:
        value = float(value)
    good = type(value) is kind
    if good and kind is float:
        good = math.isfinite(value) and value >= 0
    if good and kind is int:
        good = 0 <= value < 2**63
    if not good:
        names = {float: "a number", int: "a count", str: "a text", bool: "true or false"}
        raise ValueError(f"{place!r} is not {names.get(kind, 'a list or object')}")
    return value
