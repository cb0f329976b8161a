"""The probe of a machine: the rates of its disks and processors."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore.tools.probe.compute import compute, machine
from tierstore.tools.probe.directories import (
    PAGE_BYTES,
    check_directories,
    probe_directories,
    written_bytes_max,
)
from tierstore.tools.probe.result import Probe
from tierstore.units import SECTOR_BYTES, align_up


def probe(
    paths: Sequence[Path],
    *,
    page_bytes: int = PAGE_BYTES,
    sustained: int = 0,
    announce: Callable[[Path, int], object] = lambda path, nbytes: None,
) -> Probe:
    """Measure directories and the machine. Leaves nothing in the directories.

    Args:
        paths: existing directories.
        page_bytes: bytes of a page, rounded up to sectors.
        sustained: bytes of a further, long write to each directory; 0 for none.
        announce: called before anything is written, with each directory and the most bytes that
            are written to it.

    Raises:
        RunDirectoryError: a directory is absent, named twice or not writable.
        StorageError: a directory has not enough space (ENOSPC, nothing was written), or a disk
            fails.
        PlanError: an optimizer that is installed cannot be loaded.
    """
    page_bytes = max(SECTOR_BYTES, align_up(page_bytes, SECTOR_BYTES))
    sustained = align_up(sustained, SECTOR_BYTES)
    directories = check_directories(paths, page_bytes, sustained)
    for directory in directories:
        announce(directory, written_bytes_max(page_bytes, len(directories), sustained))
    rates = compute()
    results, together = probe_directories(directories, page_bytes, sustained)
    return Probe(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine(),
        directories=results,
        together=together,
        compute=rates,
    )
