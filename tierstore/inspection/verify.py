"""Verification of a run or a checkpoint: every byte, every chunk and every path.

Nothing is changed or executed, and a fault does not end the check. The checks of each kind are
listed in docs/guide/commands.md.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from tierstore.errors import CheckpointError, CorruptionError, RunLockedError
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.page_file import check_page
from tierstore.inspection.reader import Reader, Report
from tierstore.inspection.run_reader import (
    Rank,
    commits_in,
    committed_in,
    holder_of,
    newest_commit,
    read_marker,
    read_published,
    read_ranks,
)
from tierstore.inspection.slices import Slices
from tierstore.run.commit import Commit, CommittedPage
from tierstore.run.committer import read_mark
from tierstore.run.file_names import (
    DIRTY_NAME,
    MARKER_NAME,
    METADATA_NAME,
    Revision,
    folder_rank,
    published_manifest,
    published_page,
    rank_folder,
)
from tierstore.storage.paths import storage_errors

_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_TEMPORARY = re.compile(r"\..*\.tmp-[0-9a-f]{8}-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the files of a checkpoint hold that has no fault; each of them was parsed once."""

    metadata: Metadata
    slices: Slices
    """The slices that ``metadata`` names."""
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
        on_progress: called with the number of bytes that were checked, and that will be.
        rank: which of several processes this is that check it together: each reads a part of
            the pages and values, and finds what is wrong with that part.
        world_size: the number of these processes.

    Raises:
        CheckpointError: ``path`` is neither, or this user may not read it.
        RunLockedError: it is a run in use.
        StorageError: the disk cannot even list it.
    """
    report, _ = verify_contents(path, on_progress, rank=rank, world_size=world_size)
    return report


def verify_contents(
    path: str | os.PathLike[str],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Report, Contents | None]:
    """Check as verify() does; return also what a checkpoint without faults holds."""
    root = Path(path)
    kind = kind_of(root)
    reader = Reader(root, on_progress, rank=rank, world_size=world_size)
    step: int | None = None
    contents: Contents | None = None
    try:
        if kind == "run":
            step = _verify_run(reader)
        else:
            kind, step, contents = _verify_checkpoint(reader)
    except OSError as error:  # Of the directory itself: errors of files are recorded.
        reader.fault(str(root), f"cannot be read: {error.strerror} (errno {error.errno})")
    report = Report(
        path=str(root),
        kind=kind,
        step=step,
        files=reader.files,
        bytes_checked=reader.bytes_done,
        faults=tuple(reader.faults),
        notes=tuple(reader.notes),
    )
    return report, contents if report.good else None


def kind_of(root: Path) -> str:
    """Return whether a directory is a "run" or a "checkpoint".

    Raises:
        CheckpointError: it is neither; the message says what it is instead.
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
    if {METADATA_NAME, MARKER_NAME, published_manifest(0)} & names:
        return "checkpoint"
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


def _refuse_in_use(reader: Reader) -> None:
    holder = holder_of(reader)
    if holder is not None:
        raise RunLockedError(
            f"{reader.root} is in use by {holder}: stop that process first, or let it publish a "
            "checkpoint and name that"
        )


# --------------------------------------------------------------------------------- a run


def _verify_run(reader: Reader) -> int | None:
    _refuse_in_use(reader)
    ranks = read_ranks(reader)
    newest = newest_commit(ranks)
    _check_ranks(reader, ranks, newest)
    if newest is not None:
        commits = committed_in(reader, ranks, newest)
        if commits and len(commits) == commits[0].manifest.world_size:
            reader.faults += coverage_faults(commits)
        folders = {rank.rank: rank for rank in ranks}
        pages = _Pages(reader)
        for commit in commits:
            rank = folders[commit.manifest.rank]
            entries = commit.manifest.entries.items()
            pages.add(commit, {page: rank.page_path(page, entry.slot) for page, entry in entries})
        pages.check()
    _refuse_in_use(reader)
    for rank in ranks:
        if rank.commits != commits_in(reader.list(rank.folder)):
            raise RunLockedError(
                f"{reader.root} was changed during the check: stop what uses it first"
            )
    return newest[0] if newest else None


def _check_ranks(reader: Reader, ranks: Sequence[Rank], newest: Revision | None) -> None:
    """Record ranks that are absent or of different runs; note commits that a restart removes."""
    identities = [rank.identity for rank in ranks if rank.identity]
    world_size = max((identity.world_size for identity in identities), default=1)
    for absent in sorted(set(range(world_size)) - {rank.rank for rank in ranks}):
        reader.fault(
            rank_folder(absent),
            f"is missing, and the run has {world_size} ranks: if it is on the disk of another "
            "machine, copy the folders of all ranks into one directory first",
        )
    if len({(identity.run_id, identity.world_size) for identity in identities}) > 1:
        reader.fault(str(reader.root), "holds ranks of different runs")
    for rank in ranks:
        _check_dirty(reader, rank, newest)
    if newest is None and any(not m.first for rank in ranks for m in rank.manifests.values()):
        reader.fault(str(reader.root), "the ranks have no committed step in common")
    elif newest is None and not any(rank.commits for rank in ranks):
        reader.note("nothing was committed yet, so there is nothing to check")
    elif newest is None:
        reader.note("no commit is whole on all ranks")
    elif newer := [rank.folder for rank in ranks if max(rank.manifests) > newest]:
        reader.note(
            f"{', '.join(newer)} committed more than step {newest[0]}, which is the newest that "
            "all ranks committed: a restart resumes from there"
        )


def _check_dirty(reader: Reader, rank: Rank, newest: Revision | None) -> None:
    """Record a run that has one slot of each page and was stopped while overwriting it."""
    if DIRTY_NAME not in rank.names:
        return
    where = f"{rank.folder}/{DIRTY_NAME}"
    overwritten = None
    with reader.record_faults(where):
        overwritten = read_mark(reader.get(where))
    # A mark of an older commit is stale: the crash came after the next commit.
    if newest is None or overwritten is None or overwritten >= newest:
        reader.fault(
            where,
            "says that the run was stopped while the only slot of each page "
            "(commit_every=None) was being overwritten: its pages are of mixed steps",
        )


# ----------------------------------------------------------------------------- the pages


class _Pages:
    """The pages of some commits, checked after all of them were added."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._work: list[tuple[str, str, CommittedPage]] = []  # File, run, page.

    def add(self, commit: Commit, names: Mapping[int, str | None]) -> None:
        """Add the pages of a commit.

        Args:
            commit: the commit.
            names: page number -> name of its file; None in a directory that cannot be read.
        """
        with self._reader.record_faults(f"the commit of rank {commit.manifest.rank}"):
            for page in commit.pages():
                name = names[page.number]
                if name is not None and self._reader.takes_next():
                    self._work.append((name, commit.manifest.run_id, page))
                    self._reader.expect(page.layout.nbytes)

    def check(self) -> None:
        """Record the faults of all pages."""
        for name, run_id, page in self._work:
            check_page(self._reader, name, run_id, page)
        if not all(page.entry.checksums for _, _, page in self._work):
            self._reader.note(
                "the run was trained with checksums=False: only the lengths and framing of its "
                "pages can be checked"
            )


# -------------------------------------------------------------------------- a checkpoint


def _verify_checkpoint(reader: Reader) -> tuple[str, int | None, Contents | None]:
    """Return the kind of checkpoint, its step, and what of it could be parsed."""
    names = reader.list()
    published = MARKER_NAME in names or published_manifest(0) in names
    step: int | None = None
    commits: list[Commit] = []
    contents: Contents | None = None
    if published:
        step, commits = _check_published(reader, names)
    with reader.record_faults(METADATA_NAME):
        metadata = read_metadata(reader.get(METADATA_NAME), METADATA_NAME)
        slices = Slices(reader, metadata)
        if not published:  # Else all bytes were read already.
            reader.expect(slices.nbytes)
        slices.check(whole=not published)
        contents = Contents(metadata=metadata, slices=slices, commits=commits)
    if published:
        return "checkpoint", step, contents
    reader.note(
        "tierstore did not publish it, so there are no checksums of whole files: data was "
        "compared with the CRC-32 that torch.save left in each record, where it did"
    )
    return "plain checkpoint", None, contents


def _check_published(reader: Reader, names: Sequence[str]) -> tuple[int | None, list[Commit]]:
    """Check all files of a published checkpoint; return its step, and the commits."""
    marker: Mapping[str, Any] | None = None
    with reader.record_faults(MARKER_NAME):
        marker = read_marker(reader)
    commits = read_published(reader, names, marker)
    pages = _Pages(reader)
    page_names: set[str] = set()
    for commit in commits:
        manifest = commit.manifest
        files = {page: published_page(manifest.rank, page) for page in manifest.entries}
        pages.add(commit, files)
        page_names.update(files.values())
    step = commits[0].manifest.step if commits else None
    if marker is not None:
        if len(commits) == marker["world_size"]:
            reader.faults += coverage_faults(commits)
        _note_parts(reader, names, marker["world_size"])
        _check_files(reader, names, marker["files"], page_names)
        step = cast(int, marker["step"])
    pages.check()
    return step, commits


def _note_parts(reader: Reader, names: Sequence[str], world_size: int) -> None:
    """Note ranks whose files are absent: they may be in another part of the checkpoint."""
    prefixes = {name.partition(".")[0] for name in names if "." in name}
    here = {rank for prefix in prefixes if (rank := folder_rank(prefix)) is not None}
    absent = sorted(set(range(min(world_size, 10**5))) - here)
    if absent:
        some = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        reader.note(
            f"there is no file of ranks {some}: if this is one part of a "
            "checkpoint on several disks, copy all parts into one directory"
        )


def _check_files(
    reader: Reader, names: Sequence[str], files: Mapping[str, Mapping[str, Any]], pages: set[str]
) -> None:
    """Compare every file but the pages with its digest in tierstore.json."""
    for name in (METADATA_NAME, *sorted(pages)):
        if name not in files:
            reader.fault(MARKER_NAME, f"does not list {name}")
    unknown = sorted(set(names) - {MARKER_NAME, *files})
    if unknown:
        reader.note(f"not part of the checkpoint: {', '.join(unknown)}")
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
            for piece in opened.pieces(0, opened.nbytes):
                digest.update(piece)
                reader.advance(len(piece))
            if digest.hexdigest() != file["xxh3_128"]:
                raise CorruptionError("is not what was published: its checksum differs")
