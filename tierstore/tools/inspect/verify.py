"""Verification of a run or a checkpoint, and the report of it.

Nothing is changed or executed, and a fault does not end the check. docs/reference/commands.md lists
the checks of each kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.checkpoint.whole_mark import is_marked_whole
from tierstore.inspection.kinds import kind_of
from tierstore.inspection.reader import Fault, Reader
from tierstore.inspection.verify_checkpoint import verify_checkpoint
from tierstore.tools.inspect.verify_run import verify_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of verify()."""

    path: str
    kind: str
    """"run", "checkpoint", or "plain checkpoint": one that tierstore did not publish."""
    step: int | None
    """The committed step; None if no file names it, or nothing was committed."""
    files: int
    """Number of files that were opened."""
    bytes_checked: int
    """Number of bytes that were checked, without duplicates."""
    marked_whole: bool | None
    """True if all ranks have marked the checkpoint as whole after publishing, which proves nothing
    about it now; None if tierstore did not publish it."""
    faults: Sequence[Fault]
    notes: Sequence[str]
    """Facts that a user should know and that are not faults."""

    @property
    def good(self) -> bool:
        """True if no fault was found."""
        return not self.faults


def verify(
    path: str | os.PathLike[str], on_progress: Callable[[int, int], None] | None = None
) -> Report:
    """Check a run directory or a checkpoint, published by tierstore or not.

    Args:
        path: the directory.
        on_progress: called with the number of bytes that were checked, and the number of all
            bytes to check.

    Raises:
        CheckpointError: ``path`` is neither, or this user may not read it.
        RunLockedError: it is a run in use.
        StorageError: the disk cannot list it.
    """
    reader = Reader(Path(path), on_progress)
    kind = kind_of(reader.root)
    step: int | None = None
    marked_whole: bool | None = None
    if kind == "run":
        with reader.record_faults(str(reader.root)):
            step = verify_run(reader)
    else:
        contents = verify_checkpoint(reader, published=kind == "checkpoint")
        if contents.commits:
            step = contents.commits[0].manifest.step
        if contents.marker is not None:
            step = contents.marker["step"]
        if kind == "checkpoint":
            marked_whole = is_marked_whole(contents.marker, reader.get)
    return Report(
        path=str(reader.root),
        kind=kind,
        step=step,
        files=len(reader.opened),
        bytes_checked=reader.bytes_done,
        marked_whole=marked_whole,
        faults=tuple(reader.faults),
        notes=tuple(reader.notes),
    )
