"""Verification of every byte and every chunk of a checkpoint, published by tierstore or not.

Nothing is changed or executed, and a fault does not end the check. docs/reference/commands.md lists
the checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from tierstore.errors import CorruptionError
from tierstore.inspection.committed_pages import check_pages, pages_to_check
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import RANKS_MAX, parse_conversion, read_published
from tierstore.inspection.slices import Slices
from tierstore.layout.page_layout import BLOCK_BYTES
from tierstore.run.commit import Commit
from tierstore.run.file_names import (
    CONVERSION_NAME,
    MARKER_NAME,
    METADATA_NAME,
    folder_rank,
    published_mark,
    published_page,
)


@dataclass(slots=True, kw_only=True)
class Contents:
    """The parsed files of a checkpoint. Each file is parsed once."""

    marker: Mapping[str, Any] | None = None
    """The content of tierstore.json; None if the file is damaged, or tierstore did not publish the
    checkpoint."""
    commits: Sequence[Commit] = ()
    """The whole commits of all ranks, in order, if tierstore published the checkpoint."""
    slices: Slices | None = None
    """The slices of files that ``.metadata`` names; None if ``.metadata`` is damaged."""


def verify_checkpoint(reader: Reader, *, published: bool) -> Contents:
    """Record the faults of a checkpoint; return its whole files.

    Args:
        reader: a new reader of the directory.
        published: whether tierstore published the checkpoint.

    Raises:
        CheckpointError: this user may not read the checkpoint.
    """
    contents = Contents()
    with reader.record_faults(str(reader.root)):
        names = reader.list()
        has_checksums = published or CONVERSION_NAME in names
        if published:
            _check_published(reader, names, contents)
        elif has_checksums:  # `tierstore convert` writes a file with the checksums of all files.
            with reader.record_faults(CONVERSION_NAME):
                files = reader.parse(CONVERSION_NAME, parse_conversion)
                _check_files(reader, names, files, set(), lister=CONVERSION_NAME)
        else:
            reader.notes.append(
                "tierstore did not publish it, so files have no checksums: data was compared with "
                "the CRC-32 that torch.save may leave in each record"
            )
        with reader.record_faults(METADATA_NAME):
            slices = Slices(reader, read_metadata(reader.get(METADATA_NAME), METADATA_NAME))
            if not has_checksums:  # Else all bytes were read already.
                reader.expect(slices.nbytes)
            slices.check(whole=not has_checksums)
            contents.slices = slices
    return contents


def _check_published(reader: Reader, names: Sequence[str], contents: Contents) -> None:
    """Check all files of a published checkpoint, and keep the parsed ones."""
    marker, commits = read_published(reader, names)
    contents.marker, contents.commits = marker, commits
    reader.faults += coverage_faults(commits)
    pages = pages_to_check(reader, commits, lambda rank, page: published_page(rank, page.number))
    if marker is not None:
        _note_parts(reader, names, marker["world_size"])
        page_names = {
            published_page(commit.manifest.rank, page)
            for commit in commits
            for page in commit.manifest.entries
        }
        _check_files(reader, names, marker["files"], page_names)
    check_pages(reader, pages)


def _note_parts(reader: Reader, names: Sequence[str], world_size: int) -> None:
    """Note ranks whose files are absent: they may be in another part of the checkpoint."""
    present = {folder_rank(name.partition(".")[0]) for name in names}
    absent = sorted(set(range(min(world_size, RANKS_MAX))) - present)
    if absent:
        some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        reader.notes.append(
            f"files of ranks {some} are absent: if this is one part of a checkpoint on several "
            "disks, copy all parts into one directory"
        )


def _check_files(
    reader: Reader,
    names: Sequence[str],
    files: Mapping[str, Mapping[str, Any]],
    pages: set[str],
    lister: str = MARKER_NAME,
) -> None:
    """Compare every file except pages with its digest in the file ``lister``."""
    for name in (METADATA_NAME, *sorted(pages)):
        if name not in files:
            reader.fault(lister, f"does not list {name}")
    marks = {published_mark(rank) for rank in range(len(names))}
    unknown = sorted(set(names) - {lister, *files} - marks)
    if unknown:
        reader.notes.append(f"not part of the checkpoint: {', '.join(unknown)}")
    # Pages are checked later, by the checksums in the manifests.
    others = {n: file for n, file in files.items() if n not in pages and reader.takes_next()}
    reader.expect(sum(file["nbytes"] for file in others.values()))
    for name, file in others.items():
        nbytes = file["nbytes"]
        with reader.record_faults(name), reader.advancing(nbytes), reader.open(name) as opened:
            if opened.nbytes != nbytes:
                raise CorruptionError(f"has {opened.nbytes} bytes, expected {nbytes}")
            if file["xxh3_128"] is None:
                raise CorruptionError("has no checksum and is not a page of a manifest")
            digest = xxhash.xxh3_128()
            opened.drop_cached()
            for start in range(0, nbytes, BLOCK_BYTES):
                piece = opened.piece(start, min(BLOCK_BYTES, nbytes - start))
                digest.update(piece)
                reader.advance(len(piece))
            if digest.hexdigest() != file["xxh3_128"]:
                raise CorruptionError("is not what was published: its checksum differs")
