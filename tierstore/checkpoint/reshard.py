"""Resume on another number of ranks, and removal of the files of ranks that the job lacks.

Opening the run publishes the committed step as ``RUN/resharded``, without moving data. restore()
then begins a new run from that checkpoint. The first commit of the new run ends the reshard.
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
from dataclasses import dataclass
from pathlib import Path

from tierstore.checkpoint.retention import remove
from tierstore.errors import RunDirectoryError, StorageError, TierstoreError
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import Rank, newest_commit, parse_marker, read_ranks
from tierstore.ranks.peers import Peers, agree, on_rank_0, together
from tierstore.run.committer import Committer
from tierstore.run.directories import looking_into, rank_directory, striping_in, whole_run
from tierstore.run.file_names import (
    MARKER_NAME,
    RESHARDED_NAME,
    folder_rank,
    manifest_revision,
    published_manifest,
    rank_folder,
)
from tierstore.run.manifest import Manifest
from tierstore.run.opening import begin_run
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


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """A run of another number of ranks, published in its directory. restore() begins from it."""

    directories: Sequence[Path]
    """The directories of the run, in order. The first has the checkpoint."""
    manifests: Sequence[Manifest]
    """The commit of each rank of the run."""

    @property
    def checkpoint(self) -> Path:
        """The published run."""
        return self.directories[0] / RESHARDED_NAME

    def begin_anew(self, committer: Committer, peers: Peers) -> None:
        """Remove the commits of the run and begin a new run; all ranks call this.

        The checkpoint keeps the committed step until end_reshard().

        Raises:
            StorageError, RunDirectoryError, RunLockedError, PeerFailed: removal failed. The next
                job begins from the checkpoint.
        """

        def remove_further() -> None:
            # Before the first commit of the new run, because the new run lacks these ranks.
            with whole_run(self.directories, first_rank=peers.world_size) as storages:
                _remove_ranks(self.directories, storages)

        on_rank_0(peers, "remove the commits of further ranks", remove_further)
        begin_run(committer.storage, peers, committer.identity)


def look_for_other_ranks(
    directories: Sequence[Path], peers: Peers, *, resume: bool, overwrite: bool
) -> tuple[OtherRanks | None, list[Path]]:
    """Find the commits of other ranks in the directories of a run; all ranks call this.

    Args:
        directories: the directories of the run, in any order.
        peers: all ranks.
        resume: whether the run is resumed. A run of another number of ranks is then published.
        overwrite: whether the run is removed.

    Returns:
        The run from which a new run must begin, or None; and the directories in the order of the
        run.

    Raises:
        RunDirectoryError: a directory cannot be used; it has commits of a rank that this job
            starts elsewhere or not at all; or a reshard did not end and ``resume`` is False.
        RunLockedError, CheckpointError, StorageError, CorruptionError: the run cannot be
            published; see publish_run(). The run was not changed.
        PeerFailed: any of this on another rank.
    """
    given = [str(directory.absolute()) for directory in directories]

    def look() -> tuple[bool, list[str]]:
        for directory in directories:
            rank_directory(directory, 0)  # Refuses a directory that cannot be used.
            if overwrite:
                has_resharded(directory)  # Refuses a directory that must not be removed.
        if overwrite:
            return False, given
        ordered = sorted(map(Path, given), key=_position)
        with looking_into(ordered[0]):
            is_published = _publish_other_ranks(ordered, peers.world_size, resume=resume)
        return is_published, list(map(str, ordered))

    is_published, of_rank_0 = on_rank_0(peers, "look into the run directories", look)
    # If the names differ, this rank has its own disk under another path.
    ordered = of_rank_0 if sorted(of_rank_0) == sorted(given) else given
    if is_published:
        found = list(map(Path, of_rank_0))
        manifests = together(
            peers, "read the commits of other ranks", lambda: _manifests_in(found[0])
        )
        return OtherRanks(found, manifests), list(map(Path, ordered))
    if resume:
        _require_commits_of_same_ranks(ordered, peers)
    return None, list(map(Path, ordered))


def _manifests_in(run: Path) -> list[Manifest]:
    """Return the commit of each rank of a run, from the checkpoint in its directory."""
    manifests: list[Manifest] = []
    while not manifests or len(manifests) < manifests[0].world_size:
        path = run / RESHARDED_NAME / published_manifest(len(manifests))
        manifests.append(Manifest.from_bytes(get_file(Entry.of(path)), str(path)))
    return manifests


def _position(directory: Path) -> tuple[int, bool]:
    """Return a sort key: the order in the run. A directory with a reshard comes first."""
    striping = striping_in(rank_directory(directory, 0))
    return striping.index if striping else 0, not _leftovers(directory)


def _require_commits_of_same_ranks(directories: Sequence[str], peers: Peers) -> None:
    """Refuse to begin a run beside commits of a rank that is started elsewhere or not at all."""
    found = agree(peers, "look for commits", lambda: _commits_of_ranks(directories, peers.rank))
    no_rank_has_its_commits = not any(rank in ranks for rank, ranks in enumerate(found))
    for finder, ranks in enumerate(found):
        for rank, directory in ranks.items():
            started = rank < len(found)
            if rank not in found[rank] if started else no_rank_has_its_commits:
                raise RunDirectoryError(
                    f"rank {finder} finds commits of rank {rank} in {directory}, but "
                    + (f"rank {rank} does not" if started else "no rank of this job finds its own")
                    + ": start each rank on the machine and with the directories that it had, or "
                    "pass overwrite=True to begin anew"
                )


def _commits_of_ranks(directories: Sequence[str], rank: int) -> dict[int, str]:
    """Return rank -> directory with its commits: for this rank, or else for every other rank."""
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

# In the directory               the next job with resume=True, on another number of ranks
#
# the old run                    publishes it as resharded; restore() removes the commits of the
#                                old run, and begins the new run
# the old run and resharded      the same, after removing resharded
# resharded                      begins the new run from it, on any number of ranks
# resharded and the new run      removes resharded, resumes the new run
# the new run                    resumes it
#
# A run exists if all its ranks are in the directories and have a commit in common. The old run
# exists until its first commit is removed, after the name of resharded is durable. The new run
# exists from its first commit on.


def _publish_other_ranks(directories: Sequence[Path], world_size: int, *, resume: bool) -> bool:
    """Return whether a new run must begin from the checkpoint in the first of the directories."""
    run = directories[0]
    if not _leftovers(run) and not (resume and _is_of_other_ranks(run, world_size)):
        return False
    with whole_run(directories) as storages:  # Locked: no other job changes anything now.
        old_world_size = _world_size(read_ranks(Reader(run)))
        if old_world_size is not None:
            end_reshard(run)
            if not resume or old_world_size == world_size:
                return False
            from tierstore.checkpoint.publish_stopped import publish_whole  # A slow import.

            publish_whole(list(storages.values()), run / RESHARDED_NAME, for_reshard=True)
        elif not has_resharded(run):
            if resume:
                find_whole_run(list(storages.values()))  # Raises an error if the run lacks a part.
            return False
        elif not resume:
            raise RunDirectoryError(
                f"{run} was being resharded to another number of ranks when the job ended: pass "
                "resume=True to continue, or overwrite=True to delete it"
            )
    return True


def _world_size(ranks: Sequence[Rank]) -> int | None:
    """Return the number of ranks of a run if all are present and have a commit in common."""
    world_size = next((rank.identity.world_size for rank in ranks if rank.identity), None)
    return world_size if newest_commit(ranks) and world_size == len(ranks) else None


def _is_of_other_ranks(run: Path, world_size: int) -> bool:
    """Return whether rank 0 has commits of a job with another number of ranks."""
    striping = striping_in(rank_directory(run, 0))
    if striping is not None and striping.index:
        return False  # open_directories() names the directories that are missing.
    ranks = read_ranks(Reader(run)) if has_file(Entry.of(run)) else []
    found = [(rank.identity, rank.commits) for rank in ranks if rank.identity]
    if not found or found[0][0].rank or found[0][0].world_size == world_size:
        return False
    return any(commits for identity, commits in found if identity.run_id == found[0][0].run_id)


def has_resharded(run: Path) -> bool:
    """Return whether a directory has the checkpoint from which a resharded run begins.

    Raises:
        RunDirectoryError: something else has the name of the checkpoint.
        StorageError: the checkpoint cannot be read.
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
            f"{path} is not the checkpoint of a run that continues on other ranks, but {name}: "
            "move it somewhere else"
        )
    return True


def end_reshard(run: Path) -> None:
    """Remove the checkpoint from which the run began, if it exists.

    Raises:
        RunDirectoryError, StorageError: the name is taken by something else, or cannot be removed.
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
                logger.warning("a checkpoint that the run does not need any more stays: %s", error)


def _leftovers(directory: Path) -> list[str]:
    """Return the names of whole and partial checkpoints of a reshard in a directory."""
    with looking_into(directory):
        names = os.listdir(directory) if is_there(directory) else []
    return [name for name in names if _LEFTOVER.fullmatch(name)]


# -------------------------------------------------------------------- after a run has begun


def remove_other_ranks(directories: Sequence[Path], peers: Peers, *, overwrite: bool) -> None:
    """Remove the files of further ranks in the directories of a new run; all ranks call this.

    A failure is logged: the new run does not need the space.

    Args:
        directories: the directories of the run.
        peers: all ranks.
        overwrite: whether to also remove the commits of these ranks, and ``resharded``.

    Raises:
        RunDirectoryError, StorageError: ``resharded`` keeps its name. It would be taken for the
            run.
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
    """Remove all files of some ranks in the directories of a run. Commits are removed first."""
    for storage in storages.values():
        erase_commits(storage)
        erase(storage)
    for directory in directories:
        for rank in storages:
            folder = directory / rank_folder(rank)
            if has_file(Entry.of(folder)):
                shutil.rmtree(folder)
