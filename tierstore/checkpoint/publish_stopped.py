"""Publishing of the committed step of a stopped run, by one process for all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore.checkpoint.model_contents import paged_contents
from tierstore.checkpoint.page_links import PageLinks
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.publish import Committed, publish
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import missing_ranks, read_ranks
from tierstore.inspection.verify import kind_of, refuse_in_use
from tierstore.ranks.peers import Alone
from tierstore.run.commit import load_commit
from tierstore.run.directories import whole_run
from tierstore.run.recovery import find_whole_run
from tierstore.storage.base import Storage


def publish_run(
    run: Path, out: Path, *, on_progress: Callable[[int, int], None] = lambda copied, total: None
) -> Publication:
    """Publish the committed step of a run that no process uses; see publish().

    The checkpoint holds the paged parameters and states; a run does not have the rest of a model.

    Raises:
        CheckpointError: ``run`` is not a run or lacks ranks, or this user may not read it; or
            as in publish().
        RunDirectoryError: nothing was committed, or the directory cannot be used.
        RunLockedError: a process uses the run.
        StorageError, CorruptionError: as in publish().
    """
    if kind_of(run) != "run":
        raise CheckpointError(f"{run} is a checkpoint already: name a run directory")
    reader = Reader(run)
    refuse_in_use(reader)  # At once: a lock is waited for.
    missing = missing_ranks(read_ranks(reader))
    if missing is not None:
        raise CheckpointError(
            f"{run}: {missing.place} {missing.what}, or publish from the job, with "
            "store.checkpoint()"
        )
    with whole_run([run], find_others=True) as storages:
        return publish_whole(list(storages.values()), out, on_progress=on_progress)


def publish_whole(
    storages: Sequence[Storage],
    out: Path,
    *,
    for_reshard: bool = False,
    on_progress: Callable[[int, int], None] = lambda copied, total: None,
) -> Publication:
    """Publish the committed step of a run, given the locked storages of all its ranks.

    Raises:
        RunDirectoryError: they are not of one run, or the run has no committed step.
        CorruptionError: the commits of the ranks do not fit together.
        CheckpointError, StorageError, CorruptionError: as in publish().
    """
    found = find_whole_run(storages)
    commits = [load_commit(storage, manifest) for storage, manifest in found]
    for fault in coverage_faults(commits):
        raise CorruptionError(f"{storages[0].location} and beside it: {fault.place} {fault.what}")
    names = [spec.name for group in commits[0].groups for spec in group]
    committed = Committed(
        peers=Alone(),
        # The next job allocates spares when it overwrites a page.
        page_files=[
            PageLinks(storage, commit, commit.pages())
            for (storage, _), commit in zip(found, commits, strict=True)
        ],
        contents=lambda: paged_contents(names),
        model_prefix="model.",
        for_reshard=for_reshard,
    )
    publication = publish(committed, os.fspath(out), on_progress=on_progress)
    try:
        publication.wait()
    except BaseException:
        publication.settle()  # After an interrupt, the copy still uses the storages.
        raise
    return publication
