"""The kind of a directory, by the names in it: a run, or a checkpoint."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from tierstore.errors import CheckpointError, RunLockedError
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import holder_of
from tierstore.run.file_names import MARKER_NAME, METADATA_NAME, folder_rank, published_manifest
from tierstore.storage.paths import storage_errors

_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_TEMPORARY = re.compile(r"\..*\.tmp-[0-9a-f]{8}-[0-9a-f]{8}")


def is_unfinished(root: Path) -> bool:
    """Return whether a directory has the name of a checkpoint that is being published."""
    return _TEMPORARY.fullmatch(root.absolute().name) is not None


def kind_of(root: Path) -> str:
    """Return "run", "checkpoint", or "plain checkpoint": one that tierstore did not publish.

    Raises:
        CheckpointError: it is neither a run nor a checkpoint; the message says what it is.
    """
    with storage_errors("list", root), Reader(root).permission_errors(root):
        try:
            names = set(os.listdir(root))
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            raise CheckpointError(
                f"{root} is not a directory: {error.strerror}. Name a run or a checkpoint"
            ) from error
    if is_unfinished(root):
        raise CheckpointError(
            f"{root} is a checkpoint that was not finished, because publishing it was stopped: "
            "publish again, which removes it"
        )
    if {MARKER_NAME, published_manifest(0)} & names:
        return "checkpoint"
    if METADATA_NAME in names:
        return "plain checkpoint"
    if any(folder_rank(name) is not None for name in names):
        return "run"
    if folder_rank(root.absolute().name) is not None:
        raise CheckpointError(
            f"{root} is the folder of one rank of a run: name the directory above it"
        )
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"{root} is a checkpoint that was not finished: its {METADATA_NAME}, which is written "
            "last, is missing. Take the checkpoint before it"
        )
    raise CheckpointError(
        f"{root} holds neither a run (rank-00000/) nor a checkpoint ({METADATA_NAME})"
        + (": it is empty" if not names else "")
    )


def refuse_in_use(reader: Reader) -> None:
    """Raise RunLockedError if a process uses the run."""
    holder = holder_of(reader)
    if holder is not None:
        raise RunLockedError(
            f"{reader.root} is in use by {holder}: stop that process first, or let it publish a "
            "checkpoint, with store.checkpoint()"
        )
