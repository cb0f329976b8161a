"""Names of the files of a run directory and of a published checkpoint.

``RUN/rank-00000/`` holds the files of one rank; a checkpoint is one flat directory.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_RANK_FOLDER = re.compile(r"rank-(\d{5})")

IDENTITY_NAME = "run.json"
"""The identity of a run."""

DIRTY_NAME = "dirty"
"""Dirty mark: the only slot of each page is being overwritten."""

STRIPING_NAME = "striping.json"
"""The striping of the pages of a rank over several directories."""

CLEAN_NAME = "clean"
"""Clean mark: the run was closed after its newest commit, with nothing in flight."""

RESHARDED_NAME = "resharded"
"""In a run directory: the checkpoint from which a run on another number of ranks begins. It exists
until the new run has a commit. No other checkpoint may have this name."""

MANIFEST_PATTERN = r"commit-(?:e([1-9]\d*)-)?(\d{10,})(?:\.([2-9]|[1-9]\d+))?"

LAYOUT_PATTERN = r"layout-([0-9a-f]{32})"

METADATA_NAME = ".metadata"
"""In a checkpoint: the file that DCP reads first, with the place of each tensor."""

MARKER_NAME = "tierstore.json"
"""In a checkpoint: the published run and step, and all files with their checksums."""

CONVERSION_NAME = "tierstore-conversion.json"
"""In a checkpoint that `tierstore convert` wrote: all files with their checksums."""

UNPAGED_NAME = "unpaged"
"""In a checkpoint: all tensors and values that are not paged."""


class Revision(NamedTuple):
    """The name of a commit. The newest commit has the largest revision."""

    epoch: int
    """Number of rewinds before the commit. A later epoch is newer, even if its step is smaller."""
    step: int
    number: int
    """1 for the first commit of the step in the epoch, 2 for the second."""


def rank_folder(rank: int) -> str:
    """Return the name of the folder that holds the files of a rank."""
    return f"rank-{rank:05d}"


def folder_rank(name: str) -> int | None:
    """Return the rank whose folder has this name, or None for any other name."""
    match = _RANK_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def manifest_name(revision: Revision) -> str:
    """Return the name of a manifest; an epoch of 0 and a number of 1 are left out."""
    epoch, step, number = revision
    prefix, suffix = f"e{epoch}-" if epoch else "", f".{number}" if number > 1 else ""
    return f"commit-{prefix}{step:010d}{suffix}"


def manifest_revision(name: str) -> Revision | None:
    """Return the revision whose manifest has this name, or None for any other file."""
    match = re.fullmatch(MANIFEST_PATTERN, name)
    return Revision(int(match[1] or 0), int(match[2]), int(match[3] or 1)) if match else None


def layout_name(digest: str) -> str:
    """Return the name of the file with a layout."""
    return f"layout-{digest}"


def layout_digest_in(name: str) -> str | None:
    """Return the digest of the layout whose file has this name, or None for any other file."""
    match = re.fullmatch(LAYOUT_PATTERN, name)
    return match[1] if match else None


def page_file(page: int, slot: str) -> str:
    """Return the name of slot "a" or "b" of a page."""
    return f"page-{page:06d}.{slot}"


def spare_file(page_file: str) -> str:
    """Return the name of the spare file that will replace a shared page file."""
    return f"{page_file}.next"


def page_number(name: str) -> int | None:
    """Return the page number of a slot, spare or partial copy; None for any other file."""
    match = re.fullmatch(r"page-(\d+)\.[ab](\.next|\.copying-[0-9a-f]+)?", name)
    return int(match[1]) if match else None


def published_manifest(rank: int) -> str:
    """Return the name of the manifest of a rank in a checkpoint."""
    return f"{rank_folder(rank)}.commit"


def published_layout(rank: int) -> str:
    """Return the name of the layout of a rank in a checkpoint."""
    return f"{rank_folder(rank)}.layout"


def published_page(rank: int, page: int) -> str:
    """Return the name of a page file of a rank in a checkpoint."""
    return f"{rank_folder(rank)}.page-{page:06d}"


def published_mark(rank: int) -> str:
    """Return the name of the mark that a rank puts into a checkpoint that it has verified."""
    return f"{rank_folder(rank)}.whole"
