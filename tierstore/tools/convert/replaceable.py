"""Checkpoints that a conversion may replace: of a format that is written, with no other files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.run.file_names import (
    CLEAN_NAME,
    CONVERSION_NAME,
    DIRTY_NAME,
    IDENTITY_NAME,
    LAYOUT_PATTERN,
    MANIFEST_PATTERN,
    MARKER_NAME,
    METADATA_NAME,
    STRIPING_NAME,
    UNPAGED_NAME,
)
from tierstore.storage.checks import LOCK_NAME
from tierstore.storage.paths import storage_errors
from tierstore.tools.convert.formats import FORMATS, recognized
from tierstore.tools.convert.options import Reading


def _pattern(*patterns: str, names: Sequence[str] = ()) -> str:
    return "|".join([*patterns, *map(re.escape, names)])


_PUBLISHED = _pattern(
    r"rank-\d{5}\.(commit|layout|whole|page-\d{6})",
    names=[METADATA_NAME, MARKER_NAME, UNPAGED_NAME],
)
_OF_A_RANK = _pattern(
    MANIFEST_PATTERN,
    LAYOUT_PATTERN,
    r"page-\d+\.[ab](\.next|\.copying-[0-9a-f]+)?",
    names=[LOCK_NAME, IDENTITY_NAME, CLEAN_NAME, DIRTY_NAME, STRIPING_NAME],
)
_FILES = {
    "tierstore": rf"rank-\d{{5}}/({_OF_A_RANK})|{_PUBLISHED}",
    "dcp": _pattern(r"[^/]+\.distcp", names=[METADATA_NAME, CONVERSION_NAME]),
    "safetensors": r"[^/]+\.safetensors(\.index\.json)?",
    "universal": r"latest_universal|([^/]+_universal/)?(zero/)?([^/]+/)?[^/]+\.pt",
}
"""Format -> paths of all its files, relative to the checkpoint."""


def refuse_to_replace(path: Path) -> None:
    """Refuse anything but a whole checkpoint that no process uses, of a format that is written.

    Raises:
        CheckpointError: the path is something else, or has files that a checkpoint does not have.
        RunLockedError: it is a run in use.
    """
    reason = _reason(path)
    if reason is not None:
        raise CheckpointError(f"{path} is not replaced: {reason}; name another destination")


def _reason(path: Path) -> str | None:
    if path.is_symlink():
        return "it is a link"
    try:
        name = recognized(path)
    except CheckpointError:
        return "it is not a checkpoint"
    format_ = FORMATS[name]
    if format_.write is None or format_.read is None:
        return f"it is a checkpoint of {name}, which conversions do not write"
    if not format_.file:
        for file in _files(path):
            if not re.fullmatch(_FILES[name], file):
                return f"it holds {file!r}, which is not a part of a checkpoint of {name}"
    try:
        format_.read([path], Reading(check=False, optimizer=False))
    except (CheckpointError, CorruptionError) as error:
        return f"it is not a checkpoint that can be read ({error})"
    return None


def _files(directory: Path) -> list[str]:
    """Return the relative paths of all files, and of all other things but directories."""
    found: list[str] = []
    with storage_errors("list", directory):
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                found += [f"{entry.name}/{inner}" for inner in _files(Path(entry.path))]
            else:
                found.append(entry.name)
    return found
