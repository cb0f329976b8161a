"""Folder of checkpoints: the kind, step, age and size of each, and what removing it frees."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tierstore.checkpoint.whole_mark import is_marked_whole
from tierstore.errors import CheckpointError, CorruptionError, StorageError
from tierstore.inspection.kinds import TIERSTORE_KINDS, kind_of, unfinished_at
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import (
    Rank,
    holder_of,
    newest_commit,
    parse_marker,
    read_ranks,
)
from tierstore.run.file_names import MARKER_NAME, STRIPING_NAME, Revision, manifest_name
from tierstore.tools.convert.formats import recognized


@dataclass(slots=True, kw_only=True)
class Files:
    """Regular files below a directory. A file with several names in it counts once."""

    files: int = 0
    nbytes: int = 0
    shared_files: int = 0
    """Number of files that also have a name elsewhere, so that removing these frees nothing."""
    shared_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Listed:
    """One run or checkpoint in a folder."""

    name: str
    kind: str
    """As of Summary; or "unfinished checkpoint", "unfinished conversion", "part of a striped run",
    or "not readable" for this user."""
    step: int | None = None
    """None: the files that name it are damaged, or are of another program."""
    in_use_by: str | None = None
    """The process that uses the run."""
    marked_whole: bool | None = None
    """True if all ranks have marked the checkpoint as whole; None: tierstore did not publish it."""
    written_at: float
    """Time of the last commit of a run, or of the last change of a directory or file, in seconds
    since 1970."""
    nbytes: int | None = None
    freed_bytes: int | None = None
    """Bytes of the files that have no name elsewhere: removing this one frees them."""


def kind_at(path: Path) -> str | None:
    """Return the kind of a run or checkpoint, or the name of a foreign format, or None."""
    with contextlib.suppress(CheckpointError):
        name = recognized(path)
        return kind_of(path) if name in ("tierstore", "dcp") else name
    return None


def checkpoints_in(folder: Path) -> list[Listed]:
    """Return the runs and checkpoints in a folder, newest first; none if it is one of them.

    They may be made and removed meanwhile.
    """
    if not folder.is_dir() or kind_at(folder) is not None:
        return []
    found = [one for child in folder.iterdir() if (one := _listed(child)) is not None]
    return sorted(found, key=lambda one: (-one.written_at, one.name))


def _listed(path: Path) -> Listed | None:
    if path.is_symlink():
        return None
    one = Listed(name=path.name, kind="not readable", written_at=0.0)
    try:
        one.written_at = path.lstat().st_mtime
        is_one = _describe(path, one)
        path.lstat()
    except FileNotFoundError:  # It was removed meanwhile.
        return None
    except (OSError, CheckpointError, StorageError):
        one.kind, is_one = "not readable", True
    return one if is_one else None


def _describe(path: Path, one: Listed) -> bool:
    """Fill in what is known of a run or checkpoint; return False if the path is neither."""
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise PermissionError
    unfinished = unfinished_at(path)
    kind = unfinished or kind_at(path)
    if kind is None:
        return False
    found = count_files(path)
    one.nbytes, one.freed_bytes = found.nbytes, found.nbytes - found.shared_bytes
    one.kind = kind if unfinished or kind in TIERSTORE_KINDS else f"{kind} checkpoint"
    reader = Reader(path)
    with contextlib.suppress(CorruptionError, StorageError):  # verify() says what is damaged.
        if kind == "run":
            try:
                ranks = read_ranks(reader)
            except CheckpointError:
                if not any(path.glob(f"rank-*/{STRIPING_NAME}")):
                    raise
                one.kind = "part of a striped run"
                return True
            one.in_use_by = holder_of(reader)
            newest = newest_commit(ranks)
            if newest is not None:
                one.step = newest.step
                one.written_at = commit_times(path, ranks[0]).get(newest, one.written_at)
        elif kind == "checkpoint":
            marker = parse_marker(reader.get(MARKER_NAME), MARKER_NAME)
            one.step = marker["step"]
            one.marked_whole = is_marked_whole(marker, reader.get)
    return True


def commit_times(root: Path, rank: Rank) -> dict[Revision, float]:
    """Return the times of the commits of a run that one rank has, in seconds since 1970."""
    times = {}
    for revision in rank.manifests:
        with contextlib.suppress(FileNotFoundError):  # The run in use has removed it.
            times[revision] = (root / rank.folder / manifest_name(revision)).stat().st_mtime
    return times


def count_files(root: Path) -> Files:
    """Count the regular files below a directory, which may change meanwhile; or one file.

    Raises:
        PermissionError: this user may not list a directory in it.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    walk = os.walk(root, onerror=refuse)
    below = (Path(folder, name) for folder, _, names in walk for name in names)
    names: dict[tuple[int, int], int] = {}
    statuses: dict[tuple[int, int], os.stat_result] = {}
    for path in [root] if root.is_file() else below:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                identity = (status.st_dev, status.st_ino)
                names[identity] = names.get(identity, 0) + 1
                statuses[identity] = status
    found = Files()
    for identity, status in statuses.items():
        found.files += 1
        found.nbytes += status.st_size
        if status.st_nlink > names[identity]:
            found.shared_files += 1
            found.shared_bytes += status.st_size
    return found
