"""A run that goes on with another number of ranks, in the directory that it is in.

Its committed step is published within the directory, which moves nothing. Then its commits are
removed, and a new run begins there from the checkpoint, which is removed when that run has a
commit of its own. So there is a whole run, or a checkpoint of it, whenever a crash comes.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from tierstore.checkpoint.commits import newest_commit, read_ranks
from tierstore.checkpoint.publish import publish_whole, whole_run
from tierstore.checkpoint.reading import Reader
from tierstore.checkpoint.retention import remove
from tierstore.directories import RESHARDED_NAME
from tierstore.errors import RunDirectoryError, TierstoreError
from tierstore.run import erase, erase_commits
from tierstore.storage.folder import LocalFolder

logger = logging.getLogger("tierstore")


def begin_reshard(run: Path, world_size: int, *, reshard: bool, overwrite: bool) -> Path | None:
    """Have a checkpoint to begin from in place of a run of another number of ranks.

    One rank calls this before any of them opens the run.

    Args:
        run: the directory of all its ranks; it may be absent.
        world_size: number of ranks that go on with it.
        reshard: whether they may, if it had another.
        overwrite: whether the run is of no use any more.

    Returns:
        The checkpoint, where the run has no commit any more; None where it is to be opened as
        it is.

    Raises:
        RunDirectoryError: there is such a checkpoint, and ``reshard`` is False.
        RunDirectoryError, RunLockedError, CheckpointError, StorageError, CorruptionError: the
            run cannot be published, see publish_run(). It is as it was.
    """
    checkpoint = run / RESHARDED_NAME
    if not run.exists():
        return None
    if overwrite:
        end_reshard(run)
        return None
    of_run = _world_size_of(run)
    if of_run is not None:
        end_reshard(run)  # What it led to has a commit, or it was not begun from.
        if not reshard or of_run == world_size:
            return None
    elif not checkpoint.exists():
        return None
    elif not reshard:
        raise RunDirectoryError(
            f"{run} was about to go on with another number of ranks when the job ended: pass "
            "resume=True and reshard=True to go on, or overwrite=True to delete it"
        )
    with whole_run(run) as storages:
        if of_run is not None:
            publish_whole(list(storages.values()), checkpoint)
        for storage in storages.values():
            erase_commits(storage)
        surplus = [rank for rank in storages if rank >= world_size]
        for rank in surplus:
            erase(storages[rank])
    for rank in surplus:
        shutil.rmtree(run / f"rank-{rank:05d}")
    return checkpoint


def remove_surplus(run: Path, world_size: int) -> None:
    """Remove what ranks had in a directory that a run of fewer has overwritten.

    Where that fails the log says so: it is of no use, and in nobody's way.
    """
    try:
        with whole_run(run, first_rank=world_size) as storages:
            for storage in storages.values():
                erase_commits(storage)
                erase(storage)
        for rank in storages:
            shutil.rmtree(run / f"rank-{rank:05d}")
    except (TierstoreError, OSError) as error:
        logger.warning("what further ranks had in %s stays there: %s", run, error)


def end_reshard(run: Path) -> None:
    """Remove the checkpoint, if there is one."""
    if (run / RESHARDED_NAME).exists():
        folder = LocalFolder(run)
        remove(folder, RESHARDED_NAME)
        folder.sync_children()


def _world_size_of(run: Path) -> int | None:
    """Return the number of ranks of a run if all of them are here and have a commit in common."""
    ranks = read_ranks(Reader(run))
    identities = [rank.identity for rank in ranks if rank.identity]
    if newest_commit(ranks) is None or not identities:
        return None
    return identities[0].world_size if len(ranks) == identities[0].world_size else None
