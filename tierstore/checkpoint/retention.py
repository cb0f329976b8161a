"""Retention: which checkpoints of a run in a directory are kept, and what is removed.

Only checkpoints that the run published are removed. A checkpoint loses its name before its
files, so that a part of it is not taken for the whole.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tierstore.errors import StorageError, TierstoreError
from tierstore.run.file_names import MARKER_NAME
from tierstore.run.sealed import is_count, unseal
from tierstore.storage.base import Folder

logger = logging.getLogger("tierstore")


def is_taken(folder: Folder, name: str) -> bool:
    """Return whether the name is that of a file or of a directory that is not empty."""
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
    """Remove what a crash left of earlier publishing; the caller alone publishes this run."""
    pattern = re.compile(rf"{re.escape(temporary_prefix('', run_id)[1:])}[0-9a-f]{{8}}$")
    leftovers = [
        child for child in folder.children() if child.startswith(".") and pattern.search(child)
    ]
    if leftovers:  # On the disk, one may still have the name of a checkpoint.
        folder.sync_children()
    for child in leftovers:
        try:
            remove(folder, child)
        except StorageError as error:  # Publishing does not need the space.
            logger.warning("what an earlier checkpoint() left stays: %s", error)


def retain(folder: Folder, run_id: str, newest: str, keep_last: int) -> None:
    """Remove the checkpoints that this run published, except the last ``keep_last``."""
    published = {
        child: marker
        for child in folder.children()
        if (marker := _marker_of_run(folder, child, run_id)) is not None
    }
    others = [child for child in published if child != newest]
    others.sort(key=lambda child: -published[child]["step"])
    for child in others[keep_last - 1 :]:
        unknown = set(folder.files(child)) - {MARKER_NAME, *published[child]["files"]}
        if unknown:
            logger.warning(
                "%s/%s is kept, because %s in it was not published there",
                folder.location,
                child,
                sorted(unknown)[0],
            )
            continue
        # Renamed first, so that a part of it is not taken for a checkpoint.
        doomed = f"{temporary_prefix(child, run_id)}{secrets.token_hex(4)}"
        folder.rename(child, doomed)
        folder.sync_children()
        remove(folder, doomed)


def remove(folder: Folder, child: str) -> None:
    """Remove a child and the files in it."""
    for name in folder.files(child):
        folder.unlink(child, name)
    folder.remove(child)


def _marker_of_run(folder: Folder, child: str, run_id: str) -> Mapping[str, Any] | None:
    """Return the marker of a checkpoint that this run published under this name; else None."""
    try:
        if MARKER_NAME not in folder.files(child):
            return None
        marker = unseal("checkpoint", folder.get(child, MARKER_NAME), f"{folder.location}/{child}")
    except TierstoreError:  # Unreadable, damaged or of another version: not removed.
        return None
    if (marker.get("run_id"), marker.get("name")) != (run_id, child):
        return None
    is_whole = is_count(marker.get("step")) and isinstance(marker.get("files"), dict)
    return marker if is_whole else None
