"""Retention: removal of old checkpoints of a run, and of the leftovers of publishing.

Only checkpoints that the run published are removed. A checkpoint loses its name before its
files, so that a partly removed checkpoint does not look whole.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tierstore.errors import StorageError, TierstoreError
from tierstore.inspection.run_reader import parse_marker
from tierstore.run.file_names import MARKER_NAME
from tierstore.storage.base import Folder

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
    """Remove what a crash left of earlier publishing; nobody else publishes this run now."""
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


def retain(folder: Folder, run_id: str, newest: str, keep_last: int) -> None:
    """Remove the checkpoints that this run published, except the last ``keep_last``."""
    published = {
        child: marker
        for child in folder.children()
        if (marker := _marker_of_run(folder, child, run_id)) is not None
    }
    others = (child for child in published if child != newest)
    for child in sorted(others, key=lambda child: -published[child]["step"])[keep_last - 1 :]:
        unknown = set(folder.files(child)) - {MARKER_NAME, *published[child]["files"]}
        if unknown:
            logger.warning(
                "%s/%s is kept, because %s in it was not published there",
                folder.location,
                child,
                sorted(unknown)[0],
            )
            continue
        # Renamed first, so that a partly removed checkpoint does not look whole.
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
    """Return the marker of a checkpoint if this run published it under this name; else None."""
    try:
        if MARKER_NAME not in folder.files(child):
            return None
        marker = parse_marker(folder.get(child, MARKER_NAME), f"{folder.location}/{child}")
    except TierstoreError:  # Unreadable, damaged or of another version: not removed.
        return None
    return marker if (marker["run_id"], marker["name"]) == (run_id, child) else None
