"""Recovery: the newest commit that all ranks of a run have, and the removal of everything newer.

A step is committed if every rank has a whole manifest of it, of one same attempt.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from tierstore.errors import CorruptionError, RunDirectoryError
from tierstore.ranks.peers import Peers, agree, together
from tierstore.run.committer import clear_dirty, read_mark
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

_DAMAGED = ".damaged"
_OWN_NAMES = re.compile(
    rf"{re.escape(IDENTITY_NAME)}|{DIRTY_NAME}|{CLEAN_NAME}|{LAYOUT_PATTERN}"
    rf"|{MANIFEST_PATTERN}({re.escape(_DAMAGED)})?|page-\d+\.[ab]"
)
_TEMPORARY_NAME = re.compile(
    rf"(?:{_OWN_NAMES.pattern})\.tmp|page-\d+\.[ab]\.(next|copying-[0-9a-f]+)"
)


def find_run(storage: Storage, peers: Peers) -> tuple[RunIdentity, Manifest | None, bool]:
    """Return the run that a locked directory holds.

    Returns:
        The identity; the manifest that recover() finds; whether the run was closed after that
        commit, on all ranks, with nothing in flight.

    Raises:
        RunDirectoryError: there is no run, or it is another rank's.
        PeerFailed: either of these on another rank.
    """
    found = agree(peers, "read the identity", lambda: _identity_in(storage))
    for other in found:
        if other is not None and other.world_size != peers.world_size:
            raise RunDirectoryError(
                f"{storage.location} belongs to rank {(found[peers.rank] or other).rank} of "
                f"{other.world_size}, this is rank {peers.rank} of {peers.world_size}: start the "
                f"job with {other.world_size} ranks, or pass reshard=True to go on with "
                f"{peers.world_size}"
            )
    identities = agree(
        peers, "check the identity", lambda: _checked(found[peers.rank], storage, peers.rank)
    )
    identity = identities[peers.rank]
    for rank, other in enumerate(identities):
        if other.run_id != identity.run_id:
            raise RunDirectoryError(
                f"{storage.location} belongs to run {identity.run_id}, but rank {rank} has "
                f"run {other.run_id}: give each rank its own directory of one run"
            )
    was_closed = all(agree(peers, "look for the mark", lambda: CLEAN_NAME in storage.list()))
    return identity, recover(storage, identity, peers), was_closed


def find_whole_run(storages: Sequence[Storage]) -> list[tuple[Storage, Manifest]]:
    """Return the commit of each rank of a run whose locked directories are all here.

    Args:
        storages: of rank 0, 1, ...; storages after the last rank of the run hold no run.

    Raises:
        RunDirectoryError: a rank is missing, or the ranks are of several runs; or as in
            recover().
    """
    first = _checked(_identity_in(storages[0]), storages[0], 0)
    ranks = storages[: first.world_size]
    for storage in storages[first.world_size :]:
        if any(map(_OWN_NAMES.fullmatch, storage.list())):
            raise RunDirectoryError(
                f"{storage.location} is no rank of the run of {first.world_size} ranks in "
                f"{storages[0].location}: remove it, if it is what is left of an older run"
            )
    if len(ranks) < first.world_size:
        raise RunDirectoryError(
            f"the run in {storages[0].location} has {first.world_size} ranks, and of "
            f"{first.world_size - len(ranks)} of them there is no directory beside it: if they "
            "are on the disks of other machines, publish from the job, with store.checkpoint()"
        )
    commits = []
    for rank, storage in enumerate(ranks):
        identity = _checked(_identity_in(storage), storage, rank)
        if (identity.run_id, identity.world_size) != (first.run_id, first.world_size):
            raise RunDirectoryError(
                f"{storage.location} is of another run than {storages[0].location}: bring the "
                "directories of one run together"
            )
        commits.append(_RankCommits(storage, identity))
    newest = _newest([some.read() for some in commits], ranks[0])
    if newest is None:
        raise RunDirectoryError(
            f"no step was committed by all ranks of {storages[0].location} yet, so there is none "
            "to publish, or to go on from on other ranks: start over with overwrite=True"
        )
    for some in commits:
        some.go_back_to(newest, to_write=False)
    return [(storage, some.whole[newest]) for storage, some in zip(ranks, commits, strict=True)]


def _identity_in(storage: Storage) -> RunIdentity | None:
    if IDENTITY_NAME not in storage.list():
        return None
    where = f"{storage.location}/{IDENTITY_NAME}"
    return RunIdentity.from_bytes(storage.get(IDENTITY_NAME), where)


def _checked(identity: RunIdentity | None, storage: Storage, rank: int) -> RunIdentity:
    """Return an identity after checking that it exists and is of this rank."""
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


def recover(storage: Storage, identity: RunIdentity, peers: Peers) -> Manifest | None:
    """Return the newest step committed on all ranks, and remove every newer commit.

    A file under a manifest's name was renamed there after it was whole, so one that is not
    whole now was damaged later. The commit before it is then the newest: its pages are
    still checked one by one as they are read.

    Returns:
        The manifest of this rank, or None where some ranks have a first commit and others
        have none yet.

    Raises:
        RunDirectoryError: no commit is left, or the only slot of each page was being
            overwritten.
        PeerFailed: either of these on another rank.
    """
    commits = _RankCommits(storage, identity)
    newest = _newest(agree(peers, "read the commits", commits.read), storage)
    together(peers, "go back to a commit", lambda: commits.go_back_to(newest, to_write=True))
    return None if newest is None else commits.whole[newest]


Attempts = Mapping[Revision, str]
"""Revision of each whole commit of one rank -> the attempt that made it."""


def newest_in_common(ranks: Sequence[Attempts]) -> Revision | None:
    """Return the newest commit that every rank has, of one attempt; None if there is none.

    When a job is killed, a rank may have gone further than the others, and after the restart
    another rank comes to the same step again, in another attempt::

        rank 0: step 7 of attempt x, step 8 of attempt x
        rank 1: step 7 of attempt x, step 8 of attempt y    -> step 7
    """
    common = set.intersection(*(set(attempts.items()) for attempts in ranks)) if ranks else set()
    return max((revision for revision, _ in common), default=None)


def _newest(ranks: Sequence[tuple[Attempts, bool]], storage: Storage) -> Revision | None:
    """Return the newest commit in common, given what read() returned on each rank."""
    newest = newest_in_common([attempts for attempts, _ in ranks])
    if newest is None and not all(only_first for _, only_first in ranks):
        raise RunDirectoryError(
            f"the ranks of {storage.location} and beside it have no committed step in common "
            f"({[sorted(step for step, _ in attempts) for attempts, _ in ranks]}): start over "
            "with overwrite=True, from a checkpoint of the run if there is one"
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
        """Return the whole commits, and whether the run had no commit before these.

        Raises:
            RunDirectoryError: no commit is whole.
        """
        for name in self._storage.list():
            revision = manifest_revision(name)
            if revision is not None:
                where, data = f"{self._storage.location}/{name}", self._storage.get(name)
                try:
                    self.whole[revision] = read_manifest(
                        data,
                        where,
                        revision=revision,
                        rank=self._identity.rank,
                        identity=self._identity,
                    )
                except CorruptionError as error:
                    self._damaged[revision] = error
        if self._damaged and not self.whole:
            raise RunDirectoryError(
                f"no commit in {self._storage.location} is whole: start over with "
                "overwrite=True, from a checkpoint of the run if there is one"
            )
        if not self.whole:
            _refuse_dirty(self._storage, None)
            if self._identity.world_size == 1:
                raise RunDirectoryError(
                    f"no step was committed in {self._storage.location} yet: there is none to "
                    "go back to or to publish, so start over"
                )
        attempts = {revision: manifest.attempt for revision, manifest in self.whole.items()}
        return attempts, all(manifest.first for manifest in self.whole.values())

    def go_back_to(self, newest: Revision | None, *, to_write: bool) -> None:
        """Remove or rename all that is newer than a commit, and what a crash left.

        Args:
            newest: the commit.
            to_write: whether pages will be written: then the run is not cleanly closed any more.

        Raises:
            RunDirectoryError: the pages of the commit may have been overwritten.
        """
        _refuse_dirty(self._storage, newest)
        damaged = {r: error for r, error in self._damaged.items() if newest is None or r > newest}
        for error in damaged.values():
            logger.warning("%s; going back to the commit before it", error)
            if newest and not all(page.checksums for page in self.whole[newest].entries.values()):
                raise RunDirectoryError(
                    f"{error}. The commit before it cannot be told from what later steps wrote, "
                    "because the run has no checksums: start over with overwrite=True"
                ) from error
        for revision in damaged:  # Kept under another name, to find out what happened.
            name = manifest_name(revision)
            self._storage.rename(name, f"{name}{_DAMAGED}")
        if to_write:
            _remove_clean_mark(self._storage)
        # The commit is visible, but after a kill its name may not be durable yet.
        self._storage.sync_directory()
        # A crash may bring back what is removed below: a late mark, a commit of another
        # attempt, a temporary file. None of them matters.
        if DIRTY_NAME in self._storage.list():
            clear_dirty(self._storage)
        for revision in self.whole:
            if newest is None or revision > newest:
                self._storage.unlink(manifest_name(revision))
        named = {
            manifest.layout
            for revision, manifest in self.whole.items()
            if newest is not None and revision <= newest
        }
        for name in self._storage.list():
            is_stale = layout_digest_in(name) not in (None, *named)
            if is_stale or _TEMPORARY_NAME.fullmatch(name):
                self._storage.unlink(name)


def _remove_clean_mark(storage: Storage) -> None:
    if CLEAN_NAME in storage.list():
        storage.unlink(CLEAN_NAME)


def read_manifest(
    data: bytes, where: str, *, revision: Revision, rank: int, identity: RunIdentity | None
) -> Manifest:
    """Return a manifest of a run.

    Args:
        data: the content of the file.
        where: its name in errors.
        revision: what the file name says.
        rank: whose directory it is in.
        identity: the identity in that directory; None if it cannot be read.

    Raises:
        CorruptionError: it is damaged, or of another run, rank or step.
        RunDirectoryError: another version of tierstore wrote it.
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
    overwritten = read_mark(storage.get(DIRTY_NAME))
    if newest and overwritten and overwritten < newest:
        return  # The mark is stale: the crash came just before clear_dirty().
    what = f"step {overwritten[0]}" if overwritten else "it"
    raise RunDirectoryError(
        f"{storage.location} keeps one slot of each page (commit_every=None) and was stopped "
        f"while overwriting {what}: its pages are of mixed steps. Start over with "
        "overwrite=True, from a checkpoint of the run if there is one"
    )


def erase_commits(storage: Storage) -> None:
    """Remove the commits of a run, before its other files, so that no part of it looks whole."""
    names = storage.list()
    if CLEAN_NAME in names:
        storage.unlink(CLEAN_NAME)
    commits = sorted((revision, name) for name in names if (revision := manifest_revision(name)))
    # The newest last, after a sync: if a power loss brought back an older one alone, a restart
    # would resume from it, though its pages were overwritten.
    for doomed in (commits[:-1], commits[-1:]):
        for _, name in doomed:
            storage.unlink(name)
        storage.sync_directory()


def erase(storage: Storage) -> None:
    """Remove every file of a run whose commits were removed on all ranks."""
    for name in storage.list():
        if _OWN_NAMES.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name):
            storage.unlink(name)
    storage.sync_directory()
