"""Verification of a run or a checkpoint: every byte, every chunk and every path.

Nothing is changed or executed, and a fault does not end the check. docs/guide/commands.md lists
the checks of each kind.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from tierstore.errors import CheckpointError, CorruptionError, RunLockedError
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.page_file import check_page
from tierstore.inspection.reader import Reader, Report
from tierstore.inspection.run_reader import (
    RANKS_MAX,
    Rank,
    committed_in,
    holder_of,
    is_marked_whole,
    missing_ranks,
    newest_commit,
    parse_conversion,
    read_published,
    read_ranks,
)
from tierstore.inspection.slices import Slices
from tierstore.layout.page_layout import BLOCK_BYTES
from tierstore.run.commit import Commit, CommittedPage
from tierstore.run.committer import read_mark
from tierstore.run.file_names import (
    CONVERSION_NAME,
    DIRTY_NAME,
    MARKER_NAME,
    METADATA_NAME,
    RESHARDED_NAME,
    Revision,
    folder_rank,
    layout_digest_in,
    published_manifest,
    published_mark,
    published_page,
)
from tierstore.storage.paths import storage_errors

_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_TEMPORARY = re.compile(r"\..*\.tmp-[0-9a-f]{8}-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parsed files of a checkpoint without faults; every file was parsed once."""

    slices: Slices
    """The metadata, and the slices that it names."""
    commits: Sequence[Commit]
    """The commits of all ranks, in order; empty if tierstore did not publish the checkpoint."""


def verify(
    path: str | os.PathLike[str],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Report:
    """Check a run directory or a checkpoint, published by tierstore or not.

    Args:
        path: the directory.
        on_progress: called with the number of bytes that were checked, and the number of all
            bytes to check.
        rank: the number of this process among several that share the check. Every process reads
            a part of the pages and values, and reports the faults of that part.
        world_size: the number of these processes.

    Raises:
        CheckpointError: ``path`` is neither, or this user may not read it.
        RunLockedError: it is a run in use.
        StorageError: the disk cannot list it.
    """
    reader = Reader(Path(path), on_progress, rank=rank, world_size=world_size)
    report, _ = verify_contents(reader)
    return report


def verify_contents(reader: Reader) -> tuple[Report, Contents | None]:
    """Check as verify() does; return also the contents of a checkpoint without faults.

    Args:
        reader: a new reader of the directory.
    """
    kind = kind_of(reader.root)
    step: int | None = None
    contents: Contents | None = None
    is_marked: bool | None = None
    with reader.record_faults(str(reader.root)):
        if kind == "run":
            step = _verify_run(reader)
        else:
            published = kind == "checkpoint"
            step, is_marked, contents = _verify_checkpoint(reader, published=published)
    report = Report(
        path=str(reader.root),
        kind=kind,
        step=step,
        files=len(reader.opened),
        bytes_checked=reader.bytes_done,
        marked_whole=is_marked,
        faults=tuple(reader.faults),
        notes=tuple(reader.notes),
    )
    return report, contents if report.good else None


def kind_of(root: Path) -> str:
    """Return the kind of a directory, as in Report.

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
    if _TEMPORARY.fullmatch(root.absolute().name):
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


# --------------------------------------------------------------------------------- a run


def _verify_run(reader: Reader) -> int | None:
    """Check a run; return its committed step."""
    refuse_in_use(reader)
    ranks = read_ranks(reader)
    newest = newest_commit(ranks)
    _check_ranks(reader, ranks, newest)
    if newest is not None:
        commits = committed_in(reader, ranks, newest)
        reader.faults += coverage_faults(commits)
        folders = {rank.rank: rank for rank in ranks}
        _check_pages(
            reader, _pages_to_check(reader, commits, lambda rank, page: folders[rank].path(page))
        )
    refuse_in_use(reader)
    for rank in ranks:
        if rank.commits != replace(rank, names=reader.list(rank.folder)).commits:
            raise RunLockedError(
                f"{reader.root} was changed during the check: stop what uses it first"
            )
    return newest.step if newest else None


def _check_ranks(reader: Reader, ranks: Sequence[Rank], newest: Revision | None) -> None:
    """Record ranks that are absent or of different runs; note commits that a restart removes."""
    identities = [rank.identity for rank in ranks if rank.identity]
    missing = missing_ranks(ranks)
    if missing is not None:
        reader.faults.append(missing)
    if len({(identity.run_id, identity.world_size) for identity in identities}) > 1:
        reader.fault(str(reader.root), "holds ranks of different runs")
    for rank in ranks:
        check_dirty(reader, rank, newest)
    if newest is not None:
        newer = [rank.folder for rank in ranks if max(rank.manifests) > newest]
        if newer:
            reader.notes.append(
                f"{', '.join(newer)} committed more than step {newest.step}, which is the newest "
                "that all ranks committed: a restart resumes from there"
            )
    elif any(not m.first for rank in ranks for m in rank.manifests.values()):
        reader.fault(str(reader.root), "the ranks have no committed step in common")
    elif any(rank.commits for rank in ranks):
        reader.notes.append("no commit is whole on all ranks")
    else:
        reader.notes.append("nothing was committed yet, so there is nothing to check")
        _check_uncommitted(reader, ranks)


def _check_uncommitted(reader: Reader, ranks: Sequence[Rank]) -> None:
    """Record commits that were removed, unless a reshard keeps a checkpoint.

    The first commit writes a layout file before its manifest; a run without commits has none.
    """
    if RESHARDED_NAME in reader.list():
        return
    for rank in ranks:
        if any(layout_digest_in(name) for name in rank.names):
            reader.fault(
                rank.folder,
                "has a layout but no commit: the commits were removed, or the run was stopped "
                "during its first commit",
            )


def check_dirty(reader: Reader, rank: Rank, newest: Revision | None) -> None:
    """Record a run with one slot of each page that was stopped while overwriting it."""
    if DIRTY_NAME not in rank.names:
        return
    where = f"{rank.folder}/{DIRTY_NAME}"
    overwritten = None
    with reader.record_faults(where):
        overwritten = read_mark(reader.get(where), "overwriting")
    # A mark of an older commit is stale: the crash came after the next commit.
    if newest is None or overwritten is None or overwritten >= newest:
        reader.fault(
            where,
            "says that the run was stopped while the only slot of each page "
            "(commit_every=None) was being overwritten: its pages are of mixed steps",
        )


# ----------------------------------------------------------------------------- the pages


def _pages_to_check(
    reader: Reader,
    commits: Sequence[Commit],
    path_of: Callable[[int, CommittedPage], str | None],
) -> list[tuple[str, CommittedPage]]:
    """Return (path, page) of the pages that this reader checks; announce their bytes.

    Args:
        reader: of the run or checkpoint.
        commits: one commit of some ranks.
        path_of: returns the path of a page of a rank; None in a directory that cannot be read.
    """
    found = []
    for commit in commits:
        rank = commit.manifest.rank
        with reader.record_faults(f"the commit of rank {rank}"):
            for page in commit.pages():
                path = path_of(rank, page)
                if path is not None and reader.takes_next():
                    found.append((path, page))
                    reader.expect(page.layout.nbytes)
    return found


def _check_pages(reader: Reader, pages: Sequence[tuple[str, CommittedPage]]) -> None:
    """Record the faults of pages, given as _pages_to_check() returns them."""
    for path, page in pages:
        check_page(reader, path, page)


# -------------------------------------------------------------------------- a checkpoint


def _verify_checkpoint(
    reader: Reader, *, published: bool
) -> tuple[int | None, bool | None, Contents | None]:
    """Check a checkpoint.

    Returns:
        Its step; whether all ranks marked it as whole, None unless tierstore published it; and the
        parsed files, None if .metadata is damaged.
    """
    step: int | None = None
    is_marked: bool | None = None
    commits: Sequence[Commit] = ()
    contents: Contents | None = None
    if published:
        step, is_marked, commits = _check_published(reader)
    names = reader.list()
    # `tierstore convert` writes a file with the checksums of all files.
    converted = not published and CONVERSION_NAME in names
    if converted:
        with reader.record_faults(CONVERSION_NAME):
            files = reader.parse(CONVERSION_NAME, parse_conversion)
            _check_files(reader, names, files, set(), lister=CONVERSION_NAME)
    with reader.record_faults(METADATA_NAME):
        slices = Slices(reader, read_metadata(reader.get(METADATA_NAME), METADATA_NAME))
        has_checksums = published or converted  # All bytes were read already.
        if not has_checksums:
            reader.expect(slices.nbytes)
        slices.check(whole=not has_checksums)
        contents = Contents(slices=slices, commits=commits)
    if not published and not converted:
        reader.notes.append(
            "tierstore did not publish it, so there are no checksums of whole files: data was "
            "compared with the CRC-32 that torch.save left in each record, where it did"
        )
    return step, is_marked, contents


def _check_published(reader: Reader) -> tuple[int | None, bool, list[Commit]]:
    """Check all files of a published checkpoint; return its step, its mark, and the commits."""
    names = reader.list()
    marker, commits = read_published(reader, names)
    reader.faults += coverage_faults(commits)
    pages = _pages_to_check(reader, commits, lambda rank, page: published_page(rank, page.number))
    step: int | None = commits[0].manifest.step if commits else None
    if marker is not None:
        _note_parts(reader, names, marker["world_size"])
        page_names = {
            published_page(commit.manifest.rank, page)
            for commit in commits
            for page in commit.manifest.entries
        }
        _check_files(reader, names, marker["files"], page_names)
        step = marker["step"]
    _check_pages(reader, pages)
    return step, is_marked_whole(marker, reader.get), commits


def _note_parts(reader: Reader, names: Sequence[str], world_size: int) -> None:
    """Note ranks whose files are absent: they may be in another part of the checkpoint."""
    present = {folder_rank(name.partition(".")[0]) for name in names}
    absent = sorted(set(range(min(world_size, RANKS_MAX))) - present)
    if absent:
        some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        reader.notes.append(
            f"there is no file of ranks {some}: if this is one part of a "
            "checkpoint on several disks, copy all parts into one directory"
        )


def _check_files(
    reader: Reader,
    names: Sequence[str],
    files: Mapping[str, Mapping[str, Any]],
    pages: set[str],
    lister: str = MARKER_NAME,
) -> None:
    """Compare every file but the pages with its digest in the file ``lister``."""
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
