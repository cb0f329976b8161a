"""Verification of a run: the files of every rank, and every byte of the committed pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierstore.errors import RunLockedError
from tierstore.inspection.committed_pages import check_pages, pages_to_check
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.kinds import refuse_in_use
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import (
    Rank,
    committed_in,
    missing_ranks,
    newest_commit,
    read_ranks,
)
from tierstore.run.committer import read_mark
from tierstore.run.file_names import DIRTY_NAME, RESHARDED_NAME, Revision, layout_digest_in


def verify_run(reader: Reader) -> int | None:
    """Check a run; return its committed step."""
    refuse_in_use(reader)
    ranks = read_ranks(reader)
    newest = newest_commit(ranks)
    _check_ranks(reader, ranks, newest)
    if newest is not None:
        commits = committed_in(reader, ranks, newest)
        reader.faults += coverage_faults(commits)
        folders = {rank.rank: rank for rank in ranks}
        check_pages(
            reader, pages_to_check(reader, commits, lambda rank, page: folders[rank].path(page))
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
            "(commit_every=None) was being overwritten: some of its pages are of a later step",
        )
