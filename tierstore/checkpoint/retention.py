"""Retention: removal of old checkpoints of a run, and of the leftovers of publishing.

Only checkpoints that the run published are removed. The name of a checkpoint is removed before its
files. A partly removed checkpoint therefore does not look whole.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from tierstore.checkpoint.whole_mark import marked_ranks
from tierstore.errors import StorageError, TierstoreError
from tierstore.inspection.run_reader import RANKS_MAX, parse_marker
from tierstore.run.file_names import MARKER_NAME, published_mark
from tierstore.storage.base import Folder
from tierstore.units import format_bytes

logger = logging.getLogger("tierstore")


def is_taken(folder: Folder, name: str) -> bool:
    """Return whether a file or a directory that is not empty has this name."""
    try:
        return bool(folder.files(name))
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return error.errno == errno.ENOTDIR


def temporary_prefix(name: str, run_id: str) -> str:
    """Return the prefix of the temporary names of a checkpoint of a run."""
    return f".{name}.tmp-{run_id[:8]}-"


def remove_leftovers(folder: Folder, run_id: str) -> None:
    """Remove leftovers of publishing after a crash. Only this process publishes the run now."""
    pattern = re.compile(rf"{re.escape(temporary_prefix('', run_id)[1:])}[0-9a-f]{{8}}$")
    leftovers = [
        child for child in folder.children() if child.startswith(".") and pattern.search(child)
    ]
    if leftovers:  # On the disk, a leftover may still have the name of a checkpoint.
        folder.sync_children()
    for child in leftovers:
        try:
            remove(folder, child)
        except StorageError as error:  # Publishing does not need the space.
            logger.warning("files of an earlier checkpoint() stay: %s", error)


def marked_by_ranks(folder: Folder, run_id: str) -> dict[str, set[int]]:
    """Return for each checkpoint of a run the ranks that verified it, by the marks in it."""
    return {
        child: marked_ranks(marker, partial(folder.get, child))
        for child, marker in _published(folder, run_id).items()
    }


def retain(
    folder: Folder,
    run_id: str,
    newest: str,
    keep_last: int,
    marked: Mapping[str, Collection[int]],
) -> None:
    """Remove the checkpoints that this run published, except the last ``keep_last``.

    Checkpoints of abandoned steps are removed first. A step is abandoned if the run has published a
    step of a later epoch with the same or a smaller number.
    At most one more is kept: the newest whole one besides ``newest``, which was not read yet. If
    none is known to be whole, the one of the earliest epoch and step is kept: checkpoints link the
    same files, so damage spreads to later ones. Example, with ``keep_last=1``::

        beside d, newest first      kept        removed
        c, b, a; b and a whole      d, b        c, a
        c, b, a; none whole         d, a        c, b

    Args:
        folder: the directory above the checkpoints.
        run_id: the run.
        newest: the checkpoint that was just published. It counts as the last one.
        keep_last: how many to keep, at least 1.
        marked: checkpoint -> ranks that have verified it.
    """
    published = _published(folder, run_id)
    others = [child for child in published if child != newest]
    ages = {child: (marker["epoch"], marker["step"]) for child, marker in published.items()}
    others.sort(key=ages.__getitem__, reverse=True)
    oldest = others[-1:]
    others.sort(key=lambda child: _is_abandoned(ages[child], ages.values()))
    kept = others[: keep_last - 1]
    is_whole = (len(marked.get(c, ())) == published[c]["world_size"] for c in others)
    kept += next(compress(([child] for child in others), is_whole), oldest)
    for child in (child for child in others if child not in kept):
        if unknown := _others_in(folder, child, published[child]):
            logger.warning(
                "%s/%s is kept, because %s in it was not published there",
                folder.location,
                child,
                unknown[0],
            )
            continue
        remove(folder, withdraw(folder, child, run_id))


def withdraw(folder: Folder, child: str, run_id: str) -> str:
    """Give a checkpoint a temporary name, durably; return the name.

    Called before its files are removed: a partly removed checkpoint must not look whole.
    """
    doomed = f"{temporary_prefix(child, run_id)}{secrets.token_hex(4)}"
    folder.rename(child, doomed)
    folder.sync_children()
    return doomed


def is_replaced(folder: Folder, child: str, run_id: str, epoch: int, step: int) -> bool:
    """Return whether the run published a checkpoint of a step that it has since abandoned.

    Args:
        folder: the directory above the checkpoint.
        child: the name of the checkpoint.
        run_id: the run.
        epoch: the number of rewinds before the step that is published now.
        step: the step that is published now.
    """
    marker = _marker_of_run(folder, child, run_id)
    return (
        marker is not None
        and _is_abandoned((marker["epoch"], marker["step"]), [(epoch, step)])
        and not _others_in(folder, child, marker)
    )


def _others_in(folder: Folder, child: str, marker: Mapping[str, Any]) -> list[str]:
    """Return the files in a checkpoint that publishing did not put there."""
    marks = map(published_mark, range(min(marker["world_size"], RANKS_MAX)))
    return sorted(set(folder.files(child)) - {MARKER_NAME, *marker["files"], *marks})


def advice_on_full_disk(folder: Folder, run_id: str, step: int, nbytes: int) -> str:
    """Return text for a full disk: the bytes needed, and checkpoints of a run to remove.

    Args:
        folder: the directory above the checkpoints, on the full disk.
        run_id: the run.
        step: the newest durable step.
        nbytes: approximate number of bytes that the call needs.
    """
    text = (
        f"step {step} is committed and intact. The call needs about {format_bytes(nbytes)} more, "
        f"and {format_bytes(shutil.disk_usage(folder.location).free)} are free"
    )
    freed = {child: _bytes_of(Path(folder.location, child)) for child in _published(folder, run_id)}
    found = sorted(freed.items(), key=lambda item: -item[1])
    if found:
        text += ". Removing a checkpoint of the run frees: " + ", ".join(
            f"{folder.location}/{child}: {format_bytes(count)}" for child, count in found[:8]
        )
    return text


def _bytes_of(directory: Path) -> int:
    """Return the bytes on the disk of files that have no other link."""
    status = (path.lstat() for path in directory.iterdir())
    return sum(512 * one.st_blocks for one in status if one.st_nlink == 1)


def _is_abandoned(age: tuple[int, int], ages: Collection[tuple[int, int]]) -> bool:
    """Return whether another (epoch, step) shows that the run was rewound to before this one."""
    epoch, step = age
    return any(other[0] > epoch and other[1] <= step for other in ages)


def remove(folder: Folder, child: str) -> None:
    """Remove a child and the files in it."""
    for name in folder.files(child):
        folder.unlink(child, name)
    folder.remove(child)


def _published(folder: Folder, run_id: str) -> dict[str, Mapping[str, Any]]:
    """Return child -> marker for the checkpoints that a run published here."""
    return {
        child: marker
        for child in folder.children()
        if (marker := _marker_of_run(folder, child, run_id)) is not None
    }


def _marker_of_run(folder: Folder, child: str, run_id: str) -> Mapping[str, Any] | None:
    """Return the marker of a checkpoint if this run published it under this name; else None."""
    try:
        if MARKER_NAME not in folder.files(child):
            return None
        marker = parse_marker(folder.get(child, MARKER_NAME), f"{folder.location}/{child}")
    except TierstoreError:  # Unreadable, damaged or of another version: do not remove it.
        return None
    return marker if (marker["run_id"], marker["name"]) == (run_id, child) else None
