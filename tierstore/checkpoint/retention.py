"""Which checkpoints lie in a directory: names that are taken, leftovers, retention.

Only what this run published is ever removed. A checkpoint loses its name before its files,
so that no part of one is taken for a whole.
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
    """Return whether there is anything else of that name than an empty child."""
    try:
        return bool(folder.files(name))
    except StorageError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return error.errno == errno.ENOTDIR


def temporary_prefix(name: str, run_id: str) -> str:
    """Return how the temporary names of a checkpoint of a run begin."""
    return f".{name}.tmp-{run_id[:8]}-"


def remove_leftovers(folder: Folder, run_id: str) -> None:
    """Remove what publishing left that a crash ended; nobody else publishes this run now."""
    pattern = re.compile(rf"{re.escape(temporary_prefix('', run_id)[1:])}[0-9a-f]{{8}}$")
    leftovers = [
        child for child in folder.children() if child.startswith(".") and pattern.search(child)
    ]
    if leftovers:  # One may have had a checkpoint's name, and on the disk have it still.
        folder.sync_children()
    for child in leftovers:
        try:
            remove(folder, child)
        except StorageError as error:  # No reason to publish nothing any more.
            logger.warning("what an earlier checkpoint() left stays: %s", error)


def retain(folder: Folder, run_id: str, newest: str, keep_last: int) -> None:
    """Remove the oldest checkpoints that this run published, but for ``keep_last``."""
    published = {
        child: marker
        for child in folder.children()
        if (marker := _own_marker(folder, child, run_id)) is not None
    }
    others = [child for child in published if child != newest]
    others.sort(key=lambda child: -published[child]["step"])
    for child in others[keep_last - 1 :]:
        strange = set(folder.files(child)) - {MARKER_NAME, *published[child]["files"]}
        if strange:
            logger.warning(
                "%s/%s is kept, because %s in it was not published there",
                folder.location,
                child,
                sorted(strange)[0],
            )
            continue
        # First out of the way, so that no part of it is taken for a checkpoint.
        doomed = f"{temporary_prefix(child, run_id)}{secrets.token_hex(4)}"
        folder.rename(child, doomed)
        folder.sync_children()
        remove(folder, doomed)


def remove(folder: Folder, child: str) -> None:
    """Remove a child and the files in it."""
    for name in folder.files(child):
        folder.unlink(child, name)
    folder.remove(child)


def _own_marker(folder: Folder, child: str, run_id: str) -> Mapping[str, Any] | None:
    """Return what a checkpoint says that this run published under this very name; else None."""
    try:
        if MARKER_NAME not in folder.files(child):
            return None
        marker = unseal("checkpoint", folder.get(child, MARKER_NAME), f"{folder.location}/{child}")
    except TierstoreError:  # Not readable, damaged, of another version: not ours to remove.
        return None
    if (marker.get("run_id"), marker.get("name")) != (run_id, child):
        return None
    # Whoever sealed something else is a stranger, too.
    whole = is_count(marker.get("step")) and isinstance(marker.get("files"), dict)
    return marker if whole else None
