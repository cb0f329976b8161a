"""Recovery: finds the newest commit that all ranks of a run have, and removes everything newer.

A step is committed if every rank has a whole manifest of the step from the same attempt.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial

from tierstore.errors import CorruptionError, RunDirectoryError, StorageError
from tierstore.ranks.peers import Peers, agree, together
from tierstore.run.committer import clear_dirty, find_mark
from tierstore.run.file_names import (
    CLEAN_NAME,
    DIRTY_NAME,
    IDENTITY_NAME,
    LAYOUT_PATTERN,
    MANIFEST_PATTERN,
    Revision,
    layout_digest_in,
    manifest_name,
    manifest_revision,
)
from tierstore.run.manifest import Manifest, RunIdentity
from tierstore.storage.base import Storage

logger = logging.getLogger("tierstore")

_START_OVER = "start over with overwrite=True, from a checkpoint of the run if one exists"
_DAMAGED = ".damaged"
_RUN_FILES = re.compile(
    rf"{re.escape(IDENTITY_NAME)}|{DIRTY_NAME}|{CLEAN_NAME}|{LAYOUT_PATTERN}"
    rf"|{MANIFEST_PATTERN}({re.escape(_DAMAGED)})?|page-\d+\.[ab]"
)
_TEMPORARY_FILES = re.compile(
    rf"(?:{_RUN_FILES.pattern})\.tmp|page-\d+\.[ab]\.(next|copying-[0-9a-f]+)"
    r"|scratch-[0-9a-f]{16}\.tmp"
)


def find_run(storage: Storage, peers: Peers) -> tuple[RunIdentity, Manifest | None, bool]:
    """Return the run in a locked directory.

    Returns:
        The identity; the manifest that recover() finds; whether the run was closed after that
        commit, on all ranks, with nothing in flight.

    Raises:
        RunDirectoryError: no run exists, the run is of another rank, or as in recover().
        PeerFailed: another rank raised.
    """
    found = agree(peers, "read the identity", lambda: _identity_in(storage))
    for other in found:
        if other is not None and other.world_size != peers.world_size:
            raise RunDirectoryError(
                f"{storage.location} belongs to rank {(found[peers.rank] or other).rank} of "
                f"{other.world_size}, this is rank {peers.rank} of {peers.world_size}: start the "
                f"job with {other.world_size} ranks, or on a machine where rank 0 finds the "
                "directories of all ranks"
            )
    act = partial(_require_rank, found[peers.rank], storage, peers.rank)
    identity = together(peers, "check the identity", act)
    _require_one_run(found, identity, storage)
    marked = agree(peers, "read the mark", partial(_clean_mark, storage))
    manifest = recover(storage, identity, peers)
    was_closed = manifest is not None and set(marked) == {manifest.revision}
    return identity, manifest, was_closed


def _clean_mark(storage: Storage) -> Revision | None:
    """Return the commit after which the run was closed; None if absent or unreadable."""
    try:
        return find_mark(storage, CLEAN_NAME, "committed")
    except StorageError as error:
        logger.warning("the last end of the run is treated as not clean: %s", error)
        return None


def find_whole_run(storages: Sequence[Storage]) -> list[tuple[Storage, Manifest]]:
    """Return the commit of each rank of a run, given the locked directories of all ranks.

    Args:
        storages: of rank 0, 1, ...; storages after the last rank of the run hold no run.

    Raises:
        RunDirectoryError: a rank is missing, the ranks are of several runs, or as in recover().
    """
    first = _require_rank(_identity_in(storages[0]), storages[0], 0)
    ranks = storages[: first.world_size]
    for storage in storages[first.world_size :]:
        if any(map(_RUN_FILES.fullmatch, storage.list())):
            raise RunDirectoryError(
                f"{storage.location} is not a rank of the run of {first.world_size} ranks in "
                f"{storages[0].location}: remove the directory, if it is left from an older run"
            )
    if len(ranks) < first.world_size:
        raise RunDirectoryError(
            f"the run in {storages[0].location} has {first.world_size} ranks, but the directories "
            f"of {first.world_size - len(ranks)} ranks are missing beside it: if they are on disks "
            f"of other machines, resume on {first.world_size} ranks, or publish from the job, with "
            "store.checkpoint()"
        )
    identities = [
        _require_rank(_identity_in(storage), storage, rank) for rank, storage in enumerate(ranks)
    ]
    _require_one_run(identities, first, ranks[0])
    commits = list(map(_RankCommits, ranks, identities))
    newest = _newest([rank_commits.read() for rank_commits in commits], ranks[0])
    if newest is None:
        raise RunDirectoryError(
            f"no step was committed by all ranks of {storages[0].location} yet, so no step can be "
            "published or resumed on other ranks: start over with overwrite=True"
        )
    for rank_commits in commits:
        rank_commits.go_back_to(newest, to_write=False)
    return [
        (storage, rank_commits.whole[newest])
        for storage, rank_commits in zip(ranks, commits, strict=True)
    ]


def _identity_in(storage: Storage) -> RunIdentity | None:
    if IDENTITY_NAME not in storage.list():
        return None
    where = f"{storage.location}/{IDENTITY_NAME}"
    return RunIdentity.from_bytes(storage.get(IDENTITY_NAME), where)


def _require_rank(identity: RunIdentity | None, storage: Storage, rank: int) -> RunIdentity:
    """Return an identity, after checking that it exists and belongs to this rank."""
    where = f"{storage.location}/{IDENTITY_NAME}"
    if identity is None:
        raise RunDirectoryError(
            f"{where} is missing, though the run has commits: restore the directory from a "
            "copy, or pass overwrite=True to start over"
        )
    if identity.rank != rank:
        raise RunDirectoryError(
            f"{where} belongs to rank {identity.rank} of {identity.world_size}, this is rank "
            f"{rank}: give each rank its own directory"
        )
    return identity


def _require_one_run(
    identities: Sequence[RunIdentity | None], identity: RunIdentity, storage: Storage
) -> None:
    """Check that all ranks have the same run."""
    for rank, other in enumerate(identities):
        if other is not None and other.run_id != identity.run_id:
            raise RunDirectoryError(
                f"{storage.location} belongs to run {identity.run_id}, but rank {rank} has "
                f"run {other.run_id}: give each rank its own directory of one run"
            )


def recover(storage: Storage, identity: RunIdentity, peers: Peers) -> Manifest | None:
    """Return the newest step committed on all ranks, and remove every newer commit.

    A manifest gets its name after it is whole. A manifest that is not whole was therefore damaged
    later, and the commit before it is then the newest. Its pages are still checked when read.

    Returns:
        The manifest of this rank; None if some ranks have the first commit and others have no
        commit yet.

    Raises:
        RunDirectoryError: no commit is left, or the only slot of a page was being overwritten.
        PeerFailed: another rank raised.
    """
    commits = _RankCommits(storage, identity)
    newest = _newest(agree(peers, "read the commits", commits.read), storage)
    together(peers, "go back to a commit", lambda: commits.go_back_to(newest, to_write=True))
    return None if newest is None else commits.whole[newest]


Attempts = Mapping[Revision, str]
"""Revision of each whole commit of one rank -> the attempt that made the commit."""


def newest_in_common(ranks: Sequence[Attempts]) -> Revision | None:
    """Return the newest commit that every rank has from the same attempt, or None.

    When a job is killed, one rank may be ahead of the others. After the restart another rank may
    repeat the same step in another attempt::

        rank 0: step 7 of attempt x, step 8 of attempt x
        rank 1: step 7 of attempt x, step 8 of attempt y    -> step 7
    """
    common = set.intersection(*(set(attempts.items()) for attempts in ranks)) if ranks else set()
    return max((revision for revision, _ in common), default=None)


def _newest(ranks: Sequence[tuple[Attempts, bool]], storage: Storage) -> Revision | None:
    """Return the newest common commit, given the result of read() on each rank."""
    newest = newest_in_common([attempts for attempts, _ in ranks])
    if newest is None and not all(only_first for _, only_first in ranks):
        raise RunDirectoryError(
            f"the ranks of {storage.location} and beside it have no committed step in common "
            f"({[sorted(r.step for r in attempts) for attempts, _ in ranks]}): {_START_OVER}"
        )
    return newest


class _RankCommits:
    """The manifests in the directory of one rank."""

    def __init__(self, storage: Storage, identity: RunIdentity) -> None:
        self._storage = storage
        self._identity = identity
        self.whole: dict[Revision, Manifest] = {}
        self._damaged: dict[Revision, CorruptionError] = {}

    def read(self) -> tuple[Attempts, bool]:
        """Return the whole commits, and whether the run had no earlier commit.

        Raises:
            RunDirectoryError: no commit is whole, or the commits are missing.
        """
        location, identity = self._storage.location, self._identity
        for name in self._storage.list():
            if revision := manifest_revision(name):
                where = f"{location}/{name}"
                try:
                    self.whole[revision] = read_manifest(
                        self._storage.get(name),
                        where,
                        revision=revision,
                        rank=identity.rank,
                        identity=identity,
                    )
                except CorruptionError as error:
                    self._damaged[revision] = error
        if self._damaged and not self.whole:
            raise RunDirectoryError(f"no commit in {location} is whole: {_START_OVER}")
        if not self.whole:
            _refuse_dirty(self._storage, None)
            if CLEAN_NAME in self._storage.list():
                raise RunDirectoryError(
                    f"{location} was closed after a commit, but its commits are missing: restore "
                    f"the directory from a copy, or {_START_OVER}"
                )
            if identity.world_size == 1:
                raise RunDirectoryError(
                    f"no step was committed in {location} yet, so no step can be restored or "
                    "published: start over with overwrite=True"
                )
        attempts = {revision: manifest.attempt for revision, manifest in self.whole.items()}
        return attempts, all(manifest.first for manifest in self.whole.values())

    def go_back_to(self, newest: Revision | None, *, to_write: bool) -> None:
        """Remove or rename everything newer than a commit, and the leftovers of a crash.

        Args:
            newest: the commit; None removes all commits.
            to_write: whether pages will be written: then the clean mark is removed.

        Raises:
            RunDirectoryError: the pages of the commit may have been overwritten.
        """
        storage = self._storage
        _refuse_dirty(storage, newest)
        kept = {r: manifest for r, manifest in self.whole.items() if newest and r <= newest}
        damaged = {r: error for r, error in self._damaged.items() if not newest or r > newest}
        for error in damaged.values():
            logger.warning("%s; going back to the commit before it", error)
        for revision in damaged:  # Keep them under another name for an investigation.
            name = manifest_name(revision)
            storage.rename(name, f"{name}{_DAMAGED}")
        if to_write:
            _remove_clean_mark(storage)
        # The commit is visible, but after a kill its name may not be durable yet.
        storage.sync_directory()
        # A crash may restore the files that are removed below: a stale mark, a commit of another
        # attempt, a temporary file. These files are harmless.
        if DIRTY_NAME in storage.list():
            clear_dirty(storage)
        for revision in sorted(self.whole.keys() - kept):
            storage.unlink(manifest_name(revision))
        layouts = {manifest.layout for manifest in kept.values()}
        for name in storage.list():
            is_stale = layout_digest_in(name) not in (None, *layouts)
            if is_stale or _TEMPORARY_FILES.fullmatch(name):
                storage.unlink(name)


def _remove_clean_mark(storage: Storage) -> None:
    if CLEAN_NAME in storage.list():
        storage.unlink(CLEAN_NAME)


def read_manifest(
    data: bytes, where: str, *, revision: Revision, rank: int, identity: RunIdentity | None
) -> Manifest:
    """Return a manifest of a run.

    Args:
        data: the content of the file.
        where: names the file in errors.
        revision: the revision in the file name.
        rank: the rank whose directory has the file.
        identity: the identity in that directory; None if the identity cannot be read.

    Raises:
        CorruptionError: the manifest is damaged, or of another run, rank or step.
        RunDirectoryError: another version of tierstore wrote the manifest.
    """
    manifest = Manifest.from_bytes(data, where)
    belongs = (manifest.revision, manifest.rank) == (revision, rank)
    if identity is not None:
        run = (identity.run_id, identity.world_size)
        belongs = belongs and (manifest.run_id, manifest.world_size) == run
    if not belongs:
        raise CorruptionError(
            f"{where} is of step {manifest.step} and rank {manifest.rank} of "
            f"{manifest.world_size} of run {manifest.run_id}: it does not belong here"
        )
    return manifest


def _refuse_dirty(storage: Storage, newest: Revision | None) -> None:
    if DIRTY_NAME not in storage.list():
        return
    overwritten = find_mark(storage, DIRTY_NAME, "overwriting")
    if newest and overwritten and overwritten < newest:
        return  # The mark is stale: the crash came just before clear_dirty().
    commit = f"step {overwritten.step}" if overwritten else "a commit"
    raise RunDirectoryError(
        f"{storage.location} has one slot of each page (commit_every=None) and was stopped while "
        f"overwriting {commit}: its pages come from different steps: {_START_OVER}"
    )


def erase_commits(storage: Storage) -> None:
    """Remove the commits of a run before its other files, so that no partial run is found."""
    names = storage.list()
    if CLEAN_NAME in names:
        storage.unlink(CLEAN_NAME)
    commits = sorted((revision, name) for name in names if (revision := manifest_revision(name)))
    # Remove the newest commit last, after a sync. If a power loss restored only an older commit, a
    # restart would resume from it although its pages were overwritten.
    for removed in (commits[:-1], commits[-1:]):
        for _, name in removed:
            storage.unlink(name)
        storage.sync_directory()


def erase(storage: Storage) -> None:
    """Remove every file of a run whose commits were removed on all ranks."""
    for name in storage.list():
        if _RUN_FILES.fullmatch(name) or _TEMPORARY_FILES.fullmatch(name):
            storage.unlink(name)
    storage.sync_directory()
