"""Folder of checkpoints: the kind, step, age and size of each, and what removing it frees."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tierstore.checkpoint.whole_mark import is_marked_whole
from tierstore.errors import CheckpointError, TierstoreError
from tierstore.inspection.kinds import is_unfinished, kind_of
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import newest_commit, parse_marker, read_ranks
from tierstore.run.file_names import MARKER_NAME
from tierstore.tools.convert.formats import recognized


@dataclass(slots=True, kw_only=True)
class Files:
    """Regular files below a directory."""

    files: int = 0
    nbytes: int = 0
    shared_files: int = 0
    """Number of files that have another name, here or elsewhere, and share the space."""
    shared_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Listed:
    """One run or checkpoint in a folder."""

    name: str
    kind: str
    """"run", "checkpoint", "plain checkpoint", "unfinished checkpoint", or a foreign format."""
    step: int | None = None
    """None: the files that name it are damaged, or are of another program."""
    marked_whole: bool | None = None
    """True if all ranks have marked the checkpoint as whole; None: tierstore did not publish it."""
    written_at: float
    """Time at which the directory was changed, in seconds since 1970."""
    nbytes: int
    freed_bytes: int
    """Bytes of the files that have no other name: removing the directory frees them."""


def kind_at(path: Path) -> str | None:
    """Return the kind of a run or checkpoint, or the name of a foreign format, or None."""
    with contextlib.suppress(CheckpointError):
        name = recognized(path)
        return kind_of(path) if name in ("tierstore", "dcp") else name
    return None


def checkpoints_in(folder: Path) -> list[Listed]:
    """Return the runs and checkpoints in a folder, oldest first; none if it is one of them."""
    if not folder.is_dir() or kind_at(folder) is not None:
        return []
    found = [one for child in folder.iterdir() if (one := _listed(child)) is not None]
    return sorted(found, key=lambda one: (one.written_at, one.name))


def _listed(path: Path) -> Listed | None:
    if not path.is_dir() or path.is_symlink():
        return None
    kind = "unfinished checkpoint" if is_unfinished(path) else kind_at(path)
    if kind is None:
        return None
    files = count_files(path)
    one = Listed(
        name=path.name,
        kind=kind,
        written_at=path.stat().st_mtime,
        nbytes=files.nbytes,
        freed_bytes=files.nbytes - files.shared_bytes,
    )
    reader = Reader(path)
    with contextlib.suppress(TierstoreError):  # verify() says what is damaged.
        if kind == "run":
            newest = newest_commit(read_ranks(reader))
            one.step = None if newest is None else newest.step
        elif kind == "checkpoint":
            marker = parse_marker(reader.get(MARKER_NAME), MARKER_NAME)
            one.step = marker["step"]
            one.marked_whole = is_marked_whole(marker, reader.get)
    return one


def count_files(root: Path) -> Files:
    """Count the regular files below a directory, which may change meanwhile; or one file."""
    found = Files()
    below = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    for path in [root] if root.is_file() else below:
        try:
            status = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.files += 1
            found.nbytes += status.st_size
            if status.st_nlink > 1:
                found.shared_files += 1
                found.shared_bytes += status.st_size
    return found
