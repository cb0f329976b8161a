"""A run that goes on with another number of ranks, in the directory that it is in.

Its committed step is published within the directory, which moves nothing. Then its commits are
removed, and a new run begins there from the checkpoint, which is removed when that run has a
commit of its own. So there is a whole run, or a checkpoint of it, whenever a crash comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.checkpoint.publish_stopped import publish_whole
from tierstore.checkpoint.stopped_run import (
    end_reshard,
    has_resharded,
    remove_ranks,
    whole_run,
)
from tierstore.errors import RunDirectoryError
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import Rank, newest_commit, read_ranks
from tierstore.run.directories import left_by_reshard
from tierstore.run.file_names import RESHARDED_NAME
from tierstore.run.recovery import erase_commits, find_whole_run


def begin_reshard(directories: Sequence[Path], world_size: int, *, reshard: bool) -> Path | None:
    """Have a checkpoint to begin from in place of a run of another number of ranks.

    One rank calls this before any of them opens the run.

    Args:
        directories: those of all ranks, in order; the run may be absent.
        world_size: number of ranks that go on with it.
        reshard: whether they may, if it had another.

    Returns:
        The checkpoint, where the run has no commit any more; None where it is to be opened as
        it is.

    Raises:
        RunDirectoryError: there is such a checkpoint, and ``reshard`` is False.
        RunDirectoryError, RunLockedError, CheckpointError, StorageError, CorruptionError: the
            run cannot be published, see publish_run(). It is as it was.
    """
    run = directories[0]
    checkpoint = run / RESHARDED_NAME
    if not left_by_reshard(run) and not (reshard and _is_of_others(run, world_size)):
        return None
    with whole_run(directories) as storages:  # Nobody else changes anything from here on.
        ranks = read_ranks(Reader(run))
        of_run = _world_size_of(ranks)
        if of_run is not None:
            end_reshard(run)  # What it led to has a commit, or it was not begun from.
            if not reshard or of_run == world_size:
                return None
            publish_whole(list(storages.values()), checkpoint, for_reshard=True)
        elif not has_resharded(run):
            if reshard:
                find_whole_run(list(storages.values()))  # Says what it lacks.
            return None
        elif not reshard:
            raise RunDirectoryError(
                f"{run} was about to go on with another number of ranks when the job ended: pass "
                "resume=True and reshard=True to go on, or overwrite=True to delete it"
            )
        for storage in storages.values():
            erase_commits(storage)
        remove_ranks(directories, {r: each for r, each in storages.items() if r >= world_size})
    return checkpoint


def _world_size_of(ranks: Sequence[Rank]) -> int | None:
    """Return the number of ranks of a run if all of them are here and have a commit in common."""
    identities = [rank.identity for rank in ranks if rank.identity]
    if newest_commit(ranks) is None or not identities:
        return None
    return identities[0].world_size if len(ranks) == identities[0].world_size else None


def _is_of_others(run: Path, world_size: int) -> bool:
    """Return whether the first rank is of a run of others, of which any rank has commits."""
    ranks = read_ranks(Reader(run)) if run.exists() else []
    found = [(rank.identity, rank.commits) for rank in ranks if rank.identity]
    if not found or found[0][0].rank or found[0][0].world_size == world_size:
        return False
    return any(commits for other, commits in found if other.run_id == found[0][0].run_id)
