"""A run directory: who may use it, what it holds, and what a restart finds in it.

``<directory>/rank-00000/`` holds the files of one rank: ``run.json`` (identity), ``lock``,
``commit-<step>`` (manifests), ``page-<number>.a`` and ``.b``, and while a run that keeps
one copy of each page is between commits, ``dirty``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import weakref
from pathlib import Path

import torch

from tierstore.commit import DIRTY_NAME, clear_dirty, write_durably
from tierstore.errors import CorruptionError, RunDirectoryError
from tierstore.manifest import IDENTITY_NAME, Manifest, RunIdentity, manifest_step
from tierstore.storage.base import Storage

logger = logging.getLogger("tierstore")

LOCK_TIMEOUT_S = 30.0

_DAMAGED = ".damaged"
_OWN_NAMES = re.compile(
    rf"{re.escape(IDENTITY_NAME)}|{DIRTY_NAME}|commit-\d+({re.escape(_DAMAGED)})?|page-\d+\.[ab]"
)
_TEMPORARY_NAME = re.compile(rf"(?:{_OWN_NAMES.pattern})\.tmp")
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


_storages_in_use: weakref.WeakSet[Storage] = weakref.WeakSet()


def abandon_in_children(storage: Storage) -> None:
    """Have every child forked from now on drop the descriptors of a storage.

    A child that kept them would keep the lock of a parent that was killed.
    """
    _storages_in_use.add(storage)


def _abandon_all() -> None:
    for storage in list(_storages_in_use):
        storage.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def refuse_several_ranks() -> None:
    """Refuse to run in one of several processes of a job.

    Raises:
        ValueError: torch.distributed is initialized with more than one rank.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
        if world_size > 1:
            raise ValueError(
                f"torch.distributed runs with {world_size} ranks; this version of tierstore "
                "works in one process only"
            )


def rank_directory(directory: Path, rank: int) -> Path:
    """Return the directory of one rank's files, after checking that it may be one.

    Raises:
        RunDirectoryError: ``directory`` is not a directory, may not be entered, belongs to
            someone else, lies in memory, or holds something that is not a run.
    """
    path = directory / f"rank-{rank:05d}"
    try:
        if path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a symbolic link: remove it, or name another directory"
            )
        for place in (directory, path):
            if place.exists():
                _check_place(place)
        if directory.exists() and not path.exists():
            _check_empty(directory)
        _check_filesystem(directory)
    except OSError as error:
        raise RunDirectoryError(
            f"{directory} cannot be looked into: {error.strerror} (errno {error.errno}); make "
            "it accessible for this user, or name another directory"
        ) from error
    return path


def _check_empty(directory: Path) -> None:
    strange = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.name != "lost+found" and not re.fullmatch(r"rank-\d{5}", entry.name)
    )
    if strange:
        raise RunDirectoryError(
            f"{directory} holds no tierstore run but other files ({', '.join(strange[:3])}"
            f"{', ...' if len(strange) > 3 else ''}): name an empty or a new directory"
        )


def _check_place(place: Path) -> None:
    if not place.is_dir():
        raise RunDirectoryError(f"{place} is not a directory: name an empty or a new one")
    owner = place.stat().st_uid
    if owner != os.geteuid():
        raise RunDirectoryError(
            f"{place} belongs to user {owner}, this process runs as user {os.geteuid()}: "
            "run as its owner, or name another directory"
        )


def _check_filesystem(directory: Path) -> None:
    """Refuse filesystems that live in memory: nothing on them survives a restart."""
    existing = next(place for place in (directory, *directory.absolute().parents) if place.exists())
    device = existing.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # Not Linux: no such list, and no tmpfs under a usual path.
        return
    for mount in mounts:
        fields, _, kind = mount.partition(" - ")
        if fields.split()[2] == number and kind.split()[0] in _MEMORY_FILESYSTEMS:
            raise RunDirectoryError(
                f"{directory} is on {kind.split()[0]}, which is memory and does not survive a "
                "restart: name a directory on a disk"
            )


def open_run(
    storage: Storage,
    *,
    resume: bool,
    overwrite: bool,
    page_bytes: int,
    rank: int,
    world_size: int,
) -> tuple[RunIdentity, Manifest | None]:
    """Lock a rank's directory and find its run in it, or begin a new one.

    Returns:
        The identity, and the manifest of the committed step to go on from; None where the
        run is new.

    Raises:
        RunLockedError: another process uses the directory.
        RunDirectoryError: it holds a run and neither ``resume`` nor ``overwrite`` was
            given, or a run that cannot be resumed.
    """
    storage.lock(LOCK_TIMEOUT_S)
    names = storage.list()
    steps = [step for name in names if (step := manifest_step(name)) is not None]
    holds_work = bool(steps) or DIRTY_NAME in names
    if holds_work and not resume and not overwrite:
        state = f"committed at step {max(steps)}" if steps else "not committed"
        raise RunDirectoryError(
            f"{storage.location} holds a run {state}: pass resume=True to go on with it, or "
            "overwrite=True to delete it and start over"
        )
    if holds_work and resume:
        identity = _read_identity(storage, names, rank, world_size)
        return identity, recover(storage, identity)
    _erase(storage)
    identity = RunIdentity(
        run_id=secrets.token_hex(16), rank=rank, world_size=world_size, page_bytes=page_bytes
    )
    write_durably(storage, IDENTITY_NAME, identity.to_bytes())
    return identity, None


def _read_identity(storage: Storage, names: list[str], rank: int, world_size: int) -> RunIdentity:
    where = f"{storage.location}/{IDENTITY_NAME}"
    if IDENTITY_NAME not in names:
        raise RunDirectoryError(
            f"{where} is missing, though {storage.location} holds commits: restore the "
            "directory from a copy, or pass overwrite=True to start over"
        )
    identity = RunIdentity.from_bytes(storage.get(IDENTITY_NAME), where)
    if (identity.rank, identity.world_size) != (rank, world_size):
        raise RunDirectoryError(
            f"{where} belongs to rank {identity.rank} of {identity.world_size}, this is rank "
            f"{rank} of {world_size}: start the job with {identity.world_size} ranks"
        )
    return identity


def recover(storage: Storage, identity: RunIdentity) -> Manifest:
    """Return the newest committed step, and durably set aside whatever claims to be newer.

    A file under a manifest's name was renamed there after it was whole, so one that is not
    whole now was damaged later. The commit before it is then the newest: its pages are
    still checked one by one as they are read.

    Raises:
        RunDirectoryError: no commit is left, or the one copy of each page that this run
            keeps was being overwritten.
    """
    commits = {step: name for name in storage.list() if (step := manifest_step(name)) is not None}
    damaged: list[CorruptionError] = []
    for step in sorted(commits, reverse=True):
        try:
            manifest = _read_manifest(storage, commits[step], identity)
        except CorruptionError as error:
            logger.warning("%s; looking for the commit before it", error)
            damaged.append(error)
            continue
        _refuse_dirty(storage, manifest.step)
        if damaged and not all(page.checksums for page in manifest.pages):
            raise RunDirectoryError(
                f"{damaged[0]}. The commit before it cannot be told from what later steps "
                "wrote, because the run has no checksums: start over with overwrite=True"
            ) from damaged[0]
        # Out of the way, but still there for who wants to know what happened.
        for newer in [name for newer, name in commits.items() if newer > step]:
            storage.rename(newer, f"{newer}{_DAMAGED}")
        for name in storage.list():
            if _TEMPORARY_NAME.fullmatch(name):
                storage.unlink(name)
        storage.sync_directory()
        return manifest
    _refuse_dirty(storage, 0)
    if not commits:
        raise RunDirectoryError(
            f"no step was committed in {storage.location} yet, so there is none to go back to: "
            "start over with a new model and a new store"
        )
    raise RunDirectoryError(
        f"no commit in {storage.location} is whole: start over with overwrite=True, from a "
        "checkpoint of the run if there is one"
    )


def _read_manifest(storage: Storage, name: str, identity: RunIdentity) -> Manifest:
    where = f"{storage.location}/{name}"
    manifest = Manifest.from_bytes(storage.get(name), where)
    if manifest.run_id != identity.run_id or manifest.step != manifest_step(name):
        raise CorruptionError(
            f"{where} is of step {manifest.step} of run {manifest.run_id}, expected run "
            f"{identity.run_id}"
        )
    return manifest


def _refuse_dirty(storage: Storage, newest_step: int) -> None:
    if DIRTY_NAME not in storage.list():
        return
    try:
        overwritten = json.loads(storage.get(DIRTY_NAME))["overwriting_step"]
    except ValueError:  # Damaged: then no commit is known to be newer.
        overwritten = newest_step
    if overwritten < newest_step:  # The crash came between a commit and clear_dirty().
        clear_dirty(storage)
        return
    raise RunDirectoryError(
        f"{storage.location} keeps one copy of each page (commit_every=None) and was stopped "
        f"while overwriting step {overwritten}: its pages are of mixed steps. Start over with "
        "overwrite=True, from a checkpoint of the run if there is one"
    )


def _erase(storage: Storage) -> None:
    """Remove every file of a run, its commits first, so that no half of it looks whole."""
    names = storage.list()
    for name in names:
        if manifest_step(name) is not None:
            storage.unlink(name)
    storage.sync_directory()
    for name in names:
        if manifest_step(name) is None and (
            _OWN_NAMES.fullmatch(name) or _TEMPORARY_NAME.fullmatch(name)
        ):
            storage.unlink(name)
    storage.sync_directory()
