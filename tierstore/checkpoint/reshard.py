"""Resume on another number of ranks, and removal of the files of ranks that are no longer there.

The committed step is published as ``RUN/resharded``, which moves no data. Then the commits are
removed and a new run begins from that checkpoint. The first commit of the new run ends the reshard.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.checkpoint.retention import remove
from tierstore.errors import RunDirectoryError, StorageError, TierstoreError
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import Rank, newest_commit, parse_marker, read_ranks
from tierstore.ranks.peers import Peers, agree, on_rank_0
from tierstore.run.directories import looking_into, rank_directory, striping_in, whole_run
from tierstore.run.file_names import (
    MARKER_NAME,
    RESHARDED_NAME,
    folder_rank,
    manifest_revision,
    rank_folder,
)
from tierstore.run.recovery import erase, erase_commits, find_whole_run
from tierstore.storage.base import Storage
from tierstore.storage.folder import LocalFolder
from tierstore.storage.paths import Entry, get_file, has_file, is_there

logger = logging.getLogger("tierstore")

_TEMPORARY_PREFIX = f".{RESHARDED_NAME}.tmp-"
"""Prefix of the temporary names of the checkpoint RESHARDED_NAME."""

_LEFTOVER = re.compile(
    rf"{RESHARDED_NAME}|{re.escape(_TEMPORARY_PREFIX)}[0-9a-f]{{8}}(-[0-9a-f]{{8}})?"
)


# ------------------------------------------------------------------- before a run is opened


def look_for_other_ranks(
    directories: Sequence[Path], peers: Peers, *, resume: bool, reshard: bool, overwrite: bool
) -> tuple[Path | None, list[Path]]:
    """Find the commits of other ranks in the directories of a run; all ranks call this.

    Args:
        directories: of the run, in any order.
        peers: all ranks.
        resume: whether the run is resumed.
        reshard: whether the run may have had another number of ranks; it is then published.
        overwrite: whether the run is removed.

    Returns:
        The checkpoint from which a new run must begin, or None, and the directories in the
        order of the run.

    Raises:
        RunDirectoryError: a directory cannot be used; or it has commits of a rank that this job
            starts elsewhere, or not at all; or a reshard did not end and ``reshard`` is False.
        RunLockedError, CheckpointError, StorageError, CorruptionError: the run cannot be
            published; see publish_run(). The run was not changed.
        PeerFailed: any of this on another rank.
    """
    given = [str(directory.absolute()) for directory in directories]

    def look() -> tuple[str | None, list[str]]:
        for directory in directories:
            rank_directory(directory, 0)  # Refuses a directory that cannot be used.
            if overwrite:
                has_resharded(directory)  # Refuses a directory that must not be removed.
        if overwrite:
            return None, given
        ordered = sorted(map(Path, given), key=_position)
        with looking_into(ordered[0]):
            checkpoint = _begin_reshard(ordered, peers.world_size, reshard=reshard)
        return checkpoint, list(map(str, ordered))

    checkpoint, ordered = on_rank_0(peers, "look into the run directories", look)
    if sorted(ordered) != sorted(given):
        ordered = given  # This rank has a disk of its own, under another path.
    if checkpoint is None and resume:
        _require_commits_of_same_ranks(ordered, peers)
    return Path(checkpoint) if checkpoint else None, list(map(Path, ordered))


def _position(directory: Path) -> tuple[int, bool]:
    """Return a sort key: the order of the run, and a directory with a reshard first."""
    striping = striping_in(rank_directory(directory, 0))
    return striping.index if striping else 0, not _leftovers(directory)


def _require_commits_of_same_ranks(directories: Sequence[str], peers: Peers) -> None:
    """Refuse to begin a run beside commits whose rank is not started where they are."""
    found = agree(peers, "look for commits", lambda: _commits_of_ranks(directories, peers.rank))
    no_rank_has_its_commits = not any(rank in ranks for rank, ranks in enumerate(found))
    for finder, ranks in enumerate(found):
        for rank, directory in ranks.items():
            started = rank < len(found)
            if rank not in found[rank] if started else no_rank_has_its_commits:
                raise RunDirectoryError(
                    f"rank {finder} finds commits of rank {rank} in {directory}, and "
                    + (f"rank {rank} does not" if started else "no rank of this job finds its own")
                    + ": start each rank on the machine and with the directories that it had, or "
                    "pass overwrite=True to begin anew"
                )


def _commits_of_ranks(directories: Sequence[str], rank: int) -> dict[int, str]:
    """Return the directory that has commits of this rank, or else of every other rank."""
    found = {}
    for directory in map(Path, directories):
        with looking_into(directory):
            if _has_commits(directory / rank_folder(rank)):
                return {rank: str(directory)}  # A search for other ranks takes time.
            for folder in sorted(directory.iterdir()) if is_there(directory) else ():
                other = folder_rank(folder.name)
                if other is not None and _has_commits(folder):
                    found[other] = str(directory)
    return found


def _has_commits(folder: Path) -> bool:
    if not is_there(folder) or not stat.S_ISDIR(os.lstat(folder).st_mode):
        return False
    return any(manifest_revision(path.name) for path in folder.iterdir())


# ---------------------------------------------------------------------------- the reshard

# A crash leaves                 the next job with reshard=True
#
# the old run                    publishes it as resharded, removes its commits
# the old run and resharded      the same, after removing resharded
# resharded                      begins the new run from it
# resharded and the new run      removes resharded, resumes the new run
# the new run                    resumes it
#
# A run exists if all ranks of the run are in the directories and have a commit in common: the old
# run until its first commit is removed, which is after the name of resharded is durable; the new
# run from its first commit on.


def _begin_reshard(directories: Sequence[Path], world_size: int, *, reshard: bool) -> str | None:
    """Return the checkpoint to begin from; None if the run is opened as it is."""
    run = directories[0]
    if not _leftovers(run) and not (reshard and _is_of_other_ranks(run, world_size)):
        return None
    with whole_run(directories) as storages:  # Locked: no other job changes anything now.
        old_world_size = _world_size(read_ranks(Reader(run)))
        if old_world_size is not None:
            end_reshard(run)
            if not reshard or old_world_size == world_size:
                return None
            from tierstore.checkpoint.publish_stopped import publish_whole  # Imports much.

            publish_whole(list(storages.values()), run / RESHARDED_NAME, for_reshard=True)
        elif not has_resharded(run):
            if reshard:
                find_whole_run(list(storages.values()))  # Raises what the run lacks.
            return None
        elif not reshard:
            raise RunDirectoryError(
                f"{run} was about to go on with another number of ranks when the job ended: pass "
                "resume=True and reshard=True to go on, or overwrite=True to delete it"
            )
        for storage in storages.values():
            erase_commits(storage)
        _remove_ranks(directories, {r: s for r, s in storages.items() if r >= world_size})
    return str(run / RESHARDED_NAME)


def _world_size(ranks: Sequence[Rank]) -> int | None:
    """Return the number of ranks of a run if all are present and have a commit in common."""
    world_size = next((rank.identity.world_size for rank in ranks if rank.identity), None)
    return world_size if newest_commit(ranks) and world_size == len(ranks) else None


def _is_of_other_ranks(run: Path, world_size: int) -> bool:
    """Return whether rank 0 was in a job of another number of ranks that has commits."""
    ranks = read_ranks(Reader(run)) if has_file(Entry.of(run)) else []
    found = [(rank.identity, rank.commits) for rank in ranks if rank.identity]
    if not found or found[0][0].rank or found[0][0].world_size == world_size:
        return False
    return any(commits for identity, commits in found if identity.run_id == found[0][0].run_id)


def has_resharded(run: Path) -> bool:
    """Return whether a directory has the checkpoint that a resharded run begins from.

    Raises:
        RunDirectoryError: something else has its name.
        StorageError: it cannot be read.
    """
    path = run / RESHARDED_NAME
    if not has_file(Entry.of(path)):
        return False
    try:
        data = get_file(Entry.of(path / MARKER_NAME))
        name = parse_marker(data, f"{path}/{MARKER_NAME}")["name"]
    except TierstoreError as error:
        if isinstance(error, StorageError) and error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        name = error
    if name != RESHARDED_NAME:
        raise RunDirectoryError(
            f"{path} is not the checkpoint that reshard=True leaves under this name, but {name}: "
            "move it somewhere else"
        )
    return True


def end_reshard(run: Path) -> None:
    """Remove the checkpoint that the run began from, if there is one.

    Raises:
        RunDirectoryError, StorageError: it is something else, or keeps its name.
    """
    with contextlib.closing(LocalFolder(run)) as folder:
        if has_resharded(run):
            # Renamed first, so that a partly removed checkpoint does not look whole.
            folder.rename(RESHARDED_NAME, f"{_TEMPORARY_PREFIX}{secrets.token_hex(4)}")
            folder.sync_children()
        for name in _leftovers(run):
            try:
                remove(folder, name)
            except StorageError as error:
                logger.warning("a checkpoint that reshard=True no longer needs stays: %s", error)


def _leftovers(directory: Path) -> list[str]:
    """Return the names of checkpoints of a reshard in a directory, whole or not."""
    with looking_into(directory):
        names = os.listdir(directory) if is_there(directory) else []
    return [name for name in names if _LEFTOVER.fullmatch(name)]


# -------------------------------------------------------------------- after a run has begun


def remove_other_ranks(directories: Sequence[Path], peers: Peers, *, overwrite: bool) -> None:
    """Remove the files of further ranks where a new run begins; all ranks call this.

    A failure is logged: the new run does not need the space.

    Args:
        directories: of the run.
        peers: all ranks.
        overwrite: whether to remove also the commits of these ranks, and ``resharded``.

    Raises:
        RunDirectoryError, StorageError: ``resharded`` keeps its name, and would be taken for
            the run.
        PeerFailed: any of this on another rank.
    """

    def remove_surplus() -> None:
        if overwrite:
            for directory in directories:
                end_reshard(directory)
        try:
            with whole_run(
                directories, first_rank=peers.world_size, overwrite=overwrite
            ) as storages:
                removed = {
                    rank: storage
                    for rank, storage in storages.items()
                    if overwrite or not any(map(manifest_revision, storage.list()))
                }
                _remove_ranks(directories, removed)
        except (TierstoreError, OSError) as error:
            logger.warning("files of further ranks stay in %s: %s", directories[0], error)

    on_rank_0(peers, "remove the files of other ranks", remove_surplus)


def _remove_ranks(directories: Sequence[Path], storages: Mapping[int, Storage]) -> None:
    """Remove all files of some ranks in the directories of a run, commits first."""
    for storage in storages.values():
        erase_commits(storage)
        erase(storage)
    for directory in directories:
        for rank in storages:
            folder = directory / rank_folder(rank)
            if has_file(Entry.of(folder)):
                shutil.rmtree(folder)
