"""The kind of a directory, by the names in it: a run or a checkpoint."""

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
_TEMPORARY = re.compile(r"\..*\.tmp-[0-9a-f]{8}(-[0-9a-f]{8})?")  # (Run and) attempt.

TIERSTORE_KINDS = ("run", "checkpoint", "plain checkpoint")


def unfinished_at(root: Path) -> str | None:
    """Return "unfinished checkpoint" or "unfinished conversion" if a directory is one; or None."""
    if temporary := _TEMPORARY.fullmatch(root.absolute().name):
        return "unfinished checkpoint" if temporary[1] else "unfinished conversion"
    if root.is_dir():
        names = os.listdir(root)
        if METADATA_NAME not in names and any(name.endswith(".distcp") for name in names):
            return "unfinished checkpoint"
    return None


def kind_of(root: Path) -> str:
    """Return "run", "checkpoint", or "plain checkpoint" if tierstore did not publish it.

    Raises:
        CheckpointError: the directory is neither a run nor a checkpoint; the message says what
            it is.
    """
    with storage_errors("list", root), Reader(root).permission_errors(root):
        try:
            names = set(os.listdir(root))
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            reason = "" if error.errno == errno.ENOTDIR else f" ({error.strerror})"
            raise CheckpointError(
                f"{root} is not a directory{reason}: name a run or a checkpoint"
            ) from error
    temporary = _TEMPORARY.fullmatch(root.absolute().name)
    if temporary and temporary[1]:  # A conversion reads its files before it is complete.
        raise CheckpointError(
            f"{root} is an unfinished checkpoint, because publishing was stopped: publish again. "
            "Publishing removes it"
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
            f"{root} is an unfinished checkpoint: its {METADATA_NAME} is missing, which is written "
            "last. Use the checkpoint before it"
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
