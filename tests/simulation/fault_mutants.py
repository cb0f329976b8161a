"""Protocols that are wrong when a disk or a write-back fails, or a run is moved."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.simulation import resting_faults
from tests.simulation.fault_simulation import FaultSimulation, WriteBackSimulation
from tests.simulation.moves import MoveSimulation, PlacedStorage
from tests.simulation.mutant import (
    FEW_FILES,
    PUBLISHING,
    PUBLISHING_TOGETHER,
    SYNCHRONIZING,
    Mutant,
    patch,
    without_one_more,
)
from tests.simulation.session import Settings
from tests.simulation.simulator import RecoverySimulation
from tests.support.faults import FaultyStorage
from tierstore.checkpoint import directory, retention, verification
from tierstore.checkpoint.directory import CheckpointDirectory
from tierstore.checkpoint.verification import Verifier
from tierstore.errors import CorruptionError, StorageError
from tierstore.paging.page import PageFiles
from tierstore.paging.pager import Pager
from tierstore.run import committer, file_names, manifest, opening, page_files, recovery

_wait = Pager._wait


def _undone_at_once(self: CheckpointDirectory) -> None:
    with contextlib.suppress(StorageError):
        if self._state is directory.State.NAMED:
            self.folder.rename(self.name, self.child)
        if self._state in (directory.State.TEMPORARY, directory.State.NAMED):
            retention.remove(self.folder, self.child)


def _only_reads(self: Pager, *args: Any) -> None:
    with contextlib.suppress(StorageError):
        _wait(self, *args)


def _ignored(operation: str) -> Callable[[], AbstractContextManager[Any]]:
    """Let the errors of an operation of the storage pass unseen."""
    original = getattr(FaultyStorage, operation)

    def act(self: FaultyStorage, *args: Any) -> None:
        with contextlib.suppress(StorageError):
            original(self, *args)

    return patch(FaultyStorage, operation, act)


def _unsealed(kind: str, data: bytes, where: str) -> Any:
    try:
        return json.loads(data.partition(b"\n")[2])
    except ValueError as error:
        raise CorruptionError(where) from error


_verify, _marked_ranks = Verifier._verify, retention.marked_ranks


def _marked_first(
    self: Verifier, page_files: Any, publication: Any, folder: Any, child: str, *args: Any
) -> None:
    publication.settle()
    verification._mark(page_files, folder, child)
    _verify(self, page_files, publication, folder, child, *args)


def _all_ranks_if_any(marker: Any, get: Any) -> set[int]:
    marked = _marked_ranks(marker, get)
    return set(range(marker["world_size"])) if marked else marked


UNDER_FAULTS = [
    Mutant(name=name, patched=patched, simulated_by=FaultSimulation, settings=settings)
    for name, patched, settings in (
        (
            "pages are not checked when they are read",
            patch(PageFiles, "_check", lambda self, page, memory, sections: None),
            None,
        ),
        (
            "the checksum of a manifest is not looked at",
            patch(manifest, "unseal", _unsealed),
            FEW_FILES,
        ),
        ("errors of flush are ignored", _ignored("flush"), None),
        ("errors of rename are ignored", _ignored("rename"), None),
        (
            "errors of reading and writing are ignored while a step goes on",
            patch(Pager, "_wait", _only_reads),
            None,
        ),
        (
            "restore() keeps what rests in memory",
            patch(Pager, "reset", resting_faults.memory_kept),
            None,
        ),
        (
            "a failed checkpoint is removed while its final name may come back",
            patch(CheckpointDirectory, "remove", _undone_at_once),
            PUBLISHING,
        ),
        ("errors of sync_directory are ignored", _ignored("sync_directory"), SYNCHRONIZING),
        (
            "retention forgets the newest whole checkpoint",
            patch(directory, "retain", without_one_more),
            PUBLISHING,
        ),
        (
            "a checkpoint is marked before it was read",
            patch(Verifier, "_verify", _marked_first),
            PUBLISHING,
        ),
        (
            "a checkpoint counts as whole once one rank has marked it",
            patch(retention, "marked_ranks", _all_ranks_if_any),
            PUBLISHING_TOGETHER,
        ),
        (
            "what verification finds is not raised",
            patch(Verifier, "wait", lambda self, *args: True),
            PUBLISHING,
        ),
    )
]


# -- Page files that a failed write-back has spoiled.

_claim_slot, _find_run = committer.Committer.claim_slot, opening.find_run
_go_back_to = recovery._RankCommits.go_back_to


def _clean_after_a_claim(self: committer.Committer, page: int) -> str:
    slot = _claim_slot(self, page)
    self.is_clean = True
    return slot


def _always_closed(storage: Any, peers: Any) -> Any:
    return (*_find_run(storage, peers)[:2], True)


def _removed_at_once(self: Any, newest: Any, *, to_write: bool) -> None:
    """Each rank removes what it does not need as soon as it went back itself."""
    storage = self._storage
    if newest is not None:
        entries = self.whole[newest].entries.items()
        needed = [file_names.page_file(page, entry.slot) for page, entry in entries]
        page_files.remove_other_files(storage, needed)
    _go_back_to(self, newest, to_write=to_write)


RESTORING = Settings(
    world_size=1, commit_every=1, keep_last=None, actions=6, kinds=("synchronize", "checkpoint")
)
"""A run of one rank, which goes back to its last commit without a restart."""

AFTER_FAILURES = [
    Mutant(
        name="page files are kept after an error",
        patched=patch(committer.Committer, "claim_slot", _clean_after_a_claim),
        simulated_by=WriteBackSimulation,
        settings=RESTORING,
    ),
    Mutant(
        name="page files are kept after an end that was not clean",
        patched=patch(opening, "find_run", _always_closed),
        simulated_by=WriteBackSimulation,
    ),
    Mutant(
        name="page files are made anew before all ranks went back",
        patched=patch(recovery._RankCommits, "go_back_to", _removed_at_once),
        simulated_by=RecoverySimulation,
    ),
]

MOVED = [
    Mutant(
        name="the place is not looked at before a commit",
        patched=patch(PlacedStorage, "require_in_place", lambda self, name: None),
        simulated_by=MoveSimulation,
    ),
    Mutant(
        name="files are opened by path",
        patched=patch(PlacedStorage, "by_path", True),
        simulated_by=MoveSimulation,
    ),
]
