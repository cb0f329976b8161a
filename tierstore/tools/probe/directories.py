"""Bandwidth and commit cost of directories, measured through the engines of stores."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tierstore.errors import RunDirectoryError, StorageError
from tierstore.paging.buffers import BufferPool
from tierstore.paging.tier_plan import STREAM_BUFFERS, Budget, default_page_bytes
from tierstore.run.committer import write_durably
from tierstore.run.sealed import seal
from tierstore.storage.base import Transfer
from tierstore.storage.drives import drives_below
from tierstore.storage.engine_storage import EngineStorage
from tierstore.storage.select import choose_storage
from tierstore.threads import Threads
from tierstore.tools.probe.alignment import alignment
from tierstore.tools.probe.result import Bandwidths, DirectoryProbe, Rate, Sustained
from tierstore.tools.probe.rounds import ROUNDS, measured, rate_of
from tierstore.units import SECTOR_BYTES, Extent, align_up, format_bytes

PAGE_BYTES = default_page_bytes(Budget(host_memory=2**29, device_memory=0, buffers=None))
"""Pages of a store with 512 MiB of host memory: larger ones do not make a disk faster."""

_PAGES = 2 * STREAM_BUFFERS  # Of the file: pages are not read while they are written.
_PARTS = 10
_COMMITS = 9
_MANIFEST_BYTES = 1 << 16  # Manifest of about 100 pages of 256 MiB.
_SPARE_BYTES = 64 << 20  # Free space that stays, for the filesystem and for others.


def written_bytes_max(page_bytes: int, directories: int, sustained: int) -> int:
    """Return the most bytes that are written to each directory, the filesystem's own aside."""
    # One round without a figure, then rounds of writes, and mixed rounds, which write one half.
    pages = _PAGES + ROUNDS * (_PAGES + _PAGES // 2) * (1 if directories == 1 else 2)
    return pages * page_bytes + sustained + _COMMITS * _MANIFEST_BYTES + SECTOR_BYTES


def check_directories(paths: Sequence[Path], page_bytes: int, sustained: int) -> list[Path]:
    """Return the absolute paths of directories that can be measured. Writes nothing.

    Raises:
        RunDirectoryError: a path is not a directory, or is given twice.
        StorageError: ENOSPC, a directory has not enough free space.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise RunDirectoryError(
                f"{path} is not a directory, expected one on the disk to measure: make it, or "
                "name another one"
            )
        if path.resolve() in found:
            raise RunDirectoryError(f"{path} is named twice: name each directory once")
        found.append(path.resolve())
    needs: dict[int, int] = {}  # Directories on one filesystem share its space.
    for path in found:
        device = path.stat().st_dev
        needs[device] = needs.get(device, _SPARE_BYTES) + max(_PAGES * page_bytes, sustained)
        if _free_bytes(path) < needs[device]:
            free, need = format_bytes(_free_bytes(path)), format_bytes(needs[device])
            raise StorageError(
                f"reserving {need} where {free} are free (free some, or name another directory)",
                path=str(path),
                errno=errno.ENOSPC,
            )
    return found


def probe_directories(
    paths: Sequence[Path], page_bytes: int = PAGE_BYTES, sustained: int = 0
) -> tuple[tuple[DirectoryProbe, ...], Bandwidths | None]:
    """Measure directories one after the other, then all at once.

    Args:
        paths: of check_directories().
        page_bytes: bytes of a page, a multiple of SECTOR_BYTES.
        sustained: bytes of a long write, a multiple of SECTOR_BYTES; 0 for none.

    Returns:
        The directories in order, and the bandwidth of all of them together if there are several.

    Raises:
        RunDirectoryError: no engine works in a directory, for example because it is read-only.
        StorageError: an operation failed, or a file of the probe cannot be removed.
    """
    with ExitStack() as stack:
        measurers = [stack.enter_context(_measurer(path, page_bytes, sustained)) for path in paths]
        alone = [(_bandwidths([one]), one.sustained(sustained), one.commits()) for one in measurers]
        together = _bandwidths(measurers) if len(measurers) > 1 else None
        results = [one.result(*figures) for one, figures in zip(measurers, alone, strict=True)]
    return tuple(results), together


class _Measurer:
    """A file of one directory and the buffers of its pages."""

    def __init__(
        self,
        storage: EngineStorage[Any],
        reasons: Sequence[str],
        path: Path,
        names: Sequence[str],
        page_bytes: int,
        sustained: int,
    ) -> None:
        self.storage = storage
        self._reasons, self._path, self._page_bytes = reasons, path, page_bytes
        self._name, self._manifest = names
        self._written = 0
        self._free = _free_bytes(path)
        self._pool = BufferPool(STREAM_BUFFERS, page_bytes)
        self._extents = [Extent(index * page_bytes, page_bytes) for index in range(_PAGES)]
        buffers = [self._pool.acquire() for _ in range(STREAM_BUFFERS)]
        for buffer in buffers:  # Some disks write zeros faster.
            buffer.tensor.view(torch.int64).random_()
        self._memory = [buffer.memory for buffer in buffers]
        self.storage.register(self._pool.memory)
        self.storage.create(self._name, max(_PAGES * page_bytes, sustained))
        self._alignment = alignment(path / self._name)
        self.write()  # Space that was never written is slower than the pages of a run.

    def write(self) -> int:
        """Write all pages and flush the file."""
        moved = self._move(self._extents, lambda index: True)
        self.storage.flush([self._name])
        return moved

    def read(self) -> int:
        """Read all pages."""
        return self._move(self._extents, lambda index: False)

    def mixed(self) -> int:
        """Read one half of the pages while the other half is written, and flush the file."""
        moved = self._move(self._extents, lambda index: index % 2 == 0)
        self.storage.flush([self._name])
        return moved

    def sustained(self, nbytes: int) -> Sustained | None:
        """Write a number of bytes once, in order."""
        if not nbytes:
            return None
        part_bytes = max(SECTOR_BYTES, nbytes // _PARTS // SECTOR_BYTES * SECTOR_BYTES)
        rates: list[float] = []
        for start in range(0, nbytes, part_bytes):
            end = min(nbytes, start + part_bytes)
            extents = [
                Extent(offset, min(self._page_bytes, end - offset))
                for offset in range(start, end, self._page_bytes)
            ]
            began = time.perf_counter()
            self._move(extents, lambda index: True)
            self.storage.flush([self._name])
            rates.append((end - start) / (time.perf_counter() - began))
        return Sustained(nbytes, rate_of(rates), rates[-1])

    def commits(self) -> Rate:
        """Return the seconds of a commit, as the committer makes one: a page, the manifest."""
        data = seal("manifest", {"pages": secrets.token_hex(_MANIFEST_BYTES // 2 - 64)})
        seconds = []
        for _ in range(_COMMITS):
            began = time.perf_counter()
            self.storage.flush([self._name])
            write_durably(self.storage, self._manifest, data)
            seconds.append(time.perf_counter() - began)
            self._written += align_up(len(data), SECTOR_BYTES)
        return rate_of(seconds)

    def result(
        self, bandwidths: Bandwidths, sustained: Sustained | None, commits: Rate
    ) -> DirectoryProbe:
        """Return all figures of the directory."""
        drives = drives_below(self._path)
        notes = [] if drives else ["the drive is unknown: the directory is on no block device"]
        if not self.storage.direct:
            notes.append(
                "read and mixed are unknown: without O_DIRECT, reads come from the page cache"
            )
        return DirectoryProbe(
            path=str(self._path),
            engine=self.storage.engine,
            engine_reason="; ".join(self._reasons) or "a write and read-back succeeded",
            direct=self.storage.direct,
            memory_alignment=self._alignment[0],
            offset_alignment=self._alignment[1],
            filesystem=self._path.stat().st_dev,
            free_bytes=self._free,
            page_bytes=self._page_bytes,
            pages_in_flight=STREAM_BUFFERS,
            written_bytes=self._written,
            bandwidths=bandwidths,
            sustained=sustained,
            commit_seconds=commits,
            drives=drives,
            notes=tuple(notes),
        )

    def _move(self, extents: Sequence[Extent], is_written: Callable[[int], bool]) -> int:
        """Move extents with several in flight; return their bytes."""
        moving: deque[Transfer] = deque()
        for index, extent in enumerate(extents):
            if len(moving) == STREAM_BUFFERS:  # Its buffer is the next one.
                moving.popleft().wait()
            memory = self._memory[index % STREAM_BUFFERS][: extent.nbytes]
            if is_written(index):
                moving.append(self.storage.write(self._name, extent, memory))
                self._written += extent.nbytes
            else:
                moving.append(self.storage.read(self._name, extent, memory))
        for transfer in moving:
            transfer.wait()
        return sum(extent.nbytes for extent in extents)


def _bandwidths(measurers: Sequence[_Measurer]) -> Bandwidths:
    """Return the bandwidths of directories that are busy at once."""
    with Threads(len(measurers), "tierstore-probe") as threads:

        def rate(act: Callable[[_Measurer], int]) -> Rate:
            def moved() -> int:
                calls = [threads.submit(act, measurer) for measurer in measurers]
                return sum(call.result() for call in calls)

            return measured(moved)

        write = rate(_Measurer.write)
        if not all(measurer.storage.direct for measurer in measurers):
            return Bandwidths(write, None, None)
        return Bandwidths(write, rate(_Measurer.read), rate(_Measurer.mixed))


@contextmanager
def _measurer(path: Path, page_bytes: int, sustained: int) -> Iterator[_Measurer]:
    storage, reasons = choose_storage(path)
    with ExitStack() as stack:
        stack.callback(storage.close)
        if not isinstance(storage, EngineStorage):
            raise TypeError(f"{path}: {storage.engine} is not an engine of a directory")
        names = [f"probe-{secrets.token_hex(8)}.tmp" for _ in range(2)]
        stack.enter_context(_removed_afterwards(path, [*names, f"{names[1]}.tmp"]))
        yield _Measurer(storage, reasons, path, names, page_bytes, sustained)


@contextmanager
def _removed_afterwards(path: Path, names: Sequence[str]) -> Iterator[None]:
    """Remove files of a directory after the block, also if this process is killed.

    A process of its own removes them: the system closes its pipe when this process ends, however
    that happens. A lock keeps other probes from removing them earlier, see select.py.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # Some network filesystems cannot lock directories.
            fcntl.flock(fd, fcntl.LOCK_SH)
        program = 'cat >/dev/null; exec rm -f -- "$@"'
        with subprocess.Popen(
            ["/bin/sh", "-c", program, "tierstore-probe", *(path / name for name in names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal does not reach it.
        ) as remover:
            yield
        if remover.returncode:
            raise StorageError("remove", path=str(path / names[0]), errno=errno.EIO)
    finally:
        os.close(fd)


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize
