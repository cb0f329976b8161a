"""Opening a run directory: lock it, find its run or begin a new one, and make its committer."""

from __future__ import annotations

import os
import secrets
import weakref

from tierstore.errors import RunDirectoryError, RunLockedError, StorageError
from tierstore.ranks.peers import Peers, Ranks, agree, together
from tierstore.run.committer import Committer, write_durably
from tierstore.run.file_names import CLEAN_NAME, DIRTY_NAME, IDENTITY_NAME, manifest_revision
from tierstore.run.manifest import Manifest, RunIdentity
from tierstore.run.recovery import erase, erase_commits, find_run
from tierstore.storage.base import Storage

LOCK_TIMEOUT_S = 30.0

_storages_in_use: weakref.WeakSet[Storage] = weakref.WeakSet()


def abandon_in_children(storage: Storage) -> None:
    """Drop the descriptors of a storage in every child that is forked later.

    Otherwise a child would hold the lock of a killed parent.
    """
    _storages_in_use.add(storage)


def close_storage(storage: Storage) -> None:
    """Close a storage. Another store of this process may then open its directory."""
    try:
        storage.close()
    except StorageError:  # The lock is released in any case.
        _storages_in_use.discard(storage)
        raise
    _storages_in_use.discard(storage)


def lock(storage: Storage) -> None:
    """Lock a rank's directory, after waiting for another process that holds the lock.

    Raises:
        RunLockedError: another process keeps the lock; or another store of this process holds it.
            This case is refused at once.
    """
    try:
        storage.lock(0)
    except RunLockedError:
        if any(_same_directory(storage, other) for other in _storages_in_use):
            raise RunLockedError(
                f"{storage.location} is open in this process already: run store.close() on the "
                "open store first (in a notebook, at the top of the cell), or continue with that "
                "store"
            ) from None
        storage.lock(LOCK_TIMEOUT_S)


def _same_directory(one: Storage, other: Storage) -> bool:
    try:
        return os.path.samefile(one.location, other.location)
    except OSError:  # One of them is not a directory of files.
        return False


def _abandon_all() -> None:
    for storage in list(_storages_in_use):
        storage.abandon()
    _storages_in_use.clear()


os.register_at_fork(after_in_child=_abandon_all)


def open_committer(
    storage: Storage,
    ranks: Ranks,
    *,
    resume: bool,
    overwrite: bool,
    page_bytes: int,
    commit_every: int | None,
    begins_later: bool = False,
) -> Committer:
    """Open the run in a rank's files; all ranks call this.

    Args:
        storage: the rank's files.
        ranks: all ranks.
        resume: continue the run in the directory.
        overwrite: delete the run in the directory.
        page_bytes: approximate size of the pages of a new run.
        commit_every: see Committer.
        begins_later: the caller begins a new run with begin_run(). The files do not change before.

    Returns:
        The committer; ``committed`` is the commit to restore, None in a new run.

    Raises:
        RunLockedError, RunDirectoryError, StorageError, PeerFailed: as in open_run().
    """
    identity, found, was_closed = open_run(
        storage,
        ranks,
        resume=resume,
        overwrite=overwrite,
        page_bytes=page_bytes,
        begins_later=begins_later,
    )
    committer = Committer(storage, ranks.commits, identity, commit_every=commit_every)
    committer.is_clean = was_closed
    committer.begin_attempt(found)
    abandon_in_children(storage)
    return committer


def open_run(
    storage: Storage,
    peers: Peers,
    *,
    resume: bool,
    overwrite: bool,
    page_bytes: int,
    begins_later: bool = False,
) -> tuple[RunIdentity, Manifest | None, bool]:
    """Lock a rank's directory and find its run in it, or begin a new one.

    Returns:
        As find_run(). A new run has no manifest and nothing in flight.

    Raises:
        RunLockedError: another process, or another store, uses the directory.
        RunDirectoryError: the directory holds a run, and neither ``resume`` nor ``overwrite`` was
            given, or the run cannot be resumed.
        PeerFailed: another rank raised.
    """

    def look() -> bool:
        lock(storage)
        names = storage.list()
        commits = [revision for name in names if (revision := manifest_revision(name))]
        holds_work = bool(commits) or DIRTY_NAME in names or CLEAN_NAME in names
        if holds_work and not resume and not overwrite:
            state = f"committed at step {max(commits).step}" if commits else "without a commit"
            raise RunDirectoryError(
                f"{storage.location} holds a run {state}: pass resume=True to resume it, or "
                "overwrite=True to delete it and start over"
            )
        return holds_work

    if any(agree(peers, "look for a run", look)) and resume and not begins_later:
        return find_run(storage, peers)
    if not begins_later:
        _erase_run(storage, peers)
    run_id = peers.gather(secrets.token_hex(16))[0]
    identity = RunIdentity(
        run_id=run_id, rank=peers.rank, world_size=peers.world_size, page_bytes=page_bytes
    )
    if not begins_later:
        _identify(storage, peers, identity)
    return identity, None, True


def begin_run(storage: Storage, peers: Peers, identity: RunIdentity) -> None:
    """Erase the files of another run, and begin a new one; all ranks call this.

    Raises:
        StorageError, PeerFailed: a file operation failed.
    """
    _erase_run(storage, peers)
    _identify(storage, peers, identity)


def _erase_run(storage: Storage, peers: Peers) -> None:
    together(peers, "erase the commits of the old run", lambda: erase_commits(storage))
    together(peers, "erase the old run", lambda: erase(storage))


def _identify(storage: Storage, peers: Peers, identity: RunIdentity) -> None:
    data = identity.to_bytes()
    together(peers, "write the identity", lambda: write_durably(storage, IDENTITY_NAME, data))
