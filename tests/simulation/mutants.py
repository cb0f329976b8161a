"""Protocols with one thing wrong each: see docs/internals/simulation.md."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulation import resting_faults
from tests.simulation.fault_simulation import FaultSimulation, WriteBackSimulation
from tests.simulation.log import Weakening
from tests.simulation.moves import MoveSimulation, PlacedStorage
from tests.simulation.session import Memory, Protocol, Settings
from tests.simulation.simulator import RecoverySimulation, Simulation
from tests.simulation.storage import RecordedStorage
from tests.support.faults import FaultyStorage
from tierstore.checkpoint import directory, publish, retention, verification
from tierstore.checkpoint.directory import CheckpointDirectory
from tierstore.checkpoint.verification import Verifier
from tierstore.errors import CorruptionError, StorageError
from tierstore.paging.page import Page, PageFiles
from tierstore.paging.pager import Pager
from tierstore.paging.sweep import Sweep
from tierstore.run import committer, file_names, manifest, opening, page_files, recovery
from tierstore.run.file_names import manifest_revision

SITE_SEEDS = 12
"""Seeds whose schedules meet every site: the first eight do, and a missing one fails a test."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A protocol that is wrong in one point."""

    name: str
    protocol: Protocol = field(default_factory=Protocol)
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    simulated_by: type[Simulation] = Simulation
    settings: Settings | None = None
    """Settings of its simulations; None for those that a seed draws."""

    def simulation(self, seed: int) -> Simulation:
        if self.simulated_by is Simulation:
            return Simulation(seed, protocol=self.protocol, settings=self.settings)
        return self.simulated_by(seed, settings=self.settings)

    @property
    def unchanged(self) -> Mutant:
        """The protocol as it is, in the same kind of simulation."""
        return dataclasses.replace(
            self, name="nothing wrong", protocol=Protocol(), patched=nullcontext
        )


BEGINNING = Settings(
    world_size=3, commit_every=1, keep_last=None, actions=1, kinds=("synchronize",)
)
"""A run that is hardly more than its first commit."""

SYNCHRONIZING = Settings(
    world_size=1, commit_every=1, keep_last=None, actions=6, kinds=("synchronize",)
)
"""A run that does little else than commit."""

SHARING = Settings(world_size=3, commit_every=1, keep_last=None, actions=8, kinds=("synchronize",))
"""A run of several ranks that does little else than commit."""

REOPENING = Settings(world_size=1, commit_every=1, keep_last=None, actions=8, kinds=("reopen",))
"""A run that is closed often."""

REPLACING = Settings(
    world_size=1,
    commit_every=None,
    keep_last=None,
    actions=12,
    kinds=("replace", "synchronize"),
)
"""A run that keeps one copy and commits a step more than once."""

PUBLISHING = Settings(world_size=1, commit_every=1, keep_last=1, actions=8, kinds=("checkpoint",))
"""A run that removes old checkpoints often."""

RETAINING = dataclasses.replace(PUBLISHING, actions=18)
"""The same for a run that has removed some before it is crashed."""

PUBLISHING_TOGETHER = dataclasses.replace(PUBLISHING, world_size=3)
"""The same for a run of several ranks."""

FEW_FILES = Settings(
    world_size=1,
    commit_every=1,
    keep_last=None,
    actions=4,
    kinds=("synchronize",),
    page_bytes=2**20,
)
"""A run whose manifests are many of its files."""

REWINDING = Settings(
    world_size=1, commit_every=1, keep_last=None, actions=20, kinds=("synchronize", "rewind")
)
"""A run that does little else than commit and go back to its checkpoints."""

RETAINING_REWOUND = dataclasses.replace(REWINDING, keep_last=2, kinds=("checkpoint", "rewind"))
"""The same for a run that removes old checkpoints."""

SPECIAL = {"recovery.erase_commits": BEGINNING, "retention.remove_leftovers": RETAINING}

MOVING = Settings(
    world_size=1,
    commit_every=3,
    keep_last=None,
    actions=12,
    kinds=("move",),
    memories=(Memory(host_memory=2**20, device_memory=2**20),),
)
"""A run that moves pages from memory to memory."""


def mutants() -> list[Mutant]:
    """Return all mutants: each flush and sync left out or late, and those written below."""
    sites: set[str] = set()
    for seed in range(SITE_SEEDS):
        simulation = Simulation(seed, widths=(3, 1))
        for _ in simulation.schedules():
            pass
        sites |= simulation.sites
    found = []
    for name, site in sorted(_names(sites).items()):
        for change in ("left out", "too late"):
            chosen = frozenset({site})
            weakening = (
                Weakening(dropped=chosen) if change == "left out" else Weakening(delayed=chosen)
            )
            found.append(
                Mutant(
                    name=f"{name}: {change}",
                    protocol=Protocol(weakening=weakening),
                    settings=next((of for part, of in SPECIAL.items() if part in name), None),
                )
            )
    return found + WRITTEN + UNDER_FAULTS + AFTER_FAILURES + MOVED


def _names(sites: set[str]) -> dict[str, str]:
    """Return a name without line numbers for each site."""
    by_name: dict[str, list[str]] = {}
    for site in sorted(sites, key=lambda site: [int(n) for n in re.findall(r"\+(\d+)", site)]):
        operation, *functions = re.sub(r"\+\d+", "", site).split(" < ")
        by_name.setdefault(f"{operation} in {', called by '.join(functions)}", []).append(site)
    return {
        name if len(same) == 1 else f"{name} (number {number})": site
        for name, same in by_name.items()
        for number, site in enumerate(same, start=1)
    }


# -- Mutants that are more than a flush or a sync left out.


def _shared_is_ignored(storage: RecordedStorage) -> RecordedStorage:
    storage.is_shared = lambda name: False  # type: ignore[method-assign]
    return storage


@contextlib.contextmanager
def _needed_copy_is_overwritten() -> Iterator[None]:
    original = committer.Committer.claim_slot

    def claim_slot(self: committer.Committer, page: int) -> str:
        self.wait()
        needed = self._needed
        self._needed = {
            page: dataclasses.replace(entry, slot="b" if entry.slot == "a" else "a")
            for page, entry in needed.items()
        }
        try:
            return original(self, page)
        finally:
            self._needed = needed

    with mock.patch.object(committer.Committer, "claim_slot", claim_slot):
        yield


@contextlib.contextmanager
def _next_step_overtakes_commit() -> Iterator[None]:
    """A commit that is so slow that its pages are overwritten first, since nothing waits."""
    submit, claim_slot, wait = (
        committer.Committer._commit,
        committer.Committer.claim_slot,
        committer.Committer.wait,
    )
    late: dict[committer.Committer, tuple[Any, ...]] = {}

    def note(self: committer.Committer, *args: Any) -> None:
        late[self] = args

    def commit_now(self: committer.Committer) -> None:
        if self._pending is not None:
            self._pending.result()
        if self in late:
            submit(self, *late.pop(self))
        wait(self)

    def claim(self: committer.Committer, page: int) -> str:
        self.wait = lambda: None  # type: ignore[method-assign]
        try:
            return claim_slot(self, page)
        finally:
            del self.wait

    with (
        mock.patch.object(committer.Committer, "_commit", note),
        mock.patch.object(committer.Committer, "claim_slot", claim),
        mock.patch.object(committer.Committer, "wait", commit_now),
    ):
        yield


def _flushed_after_the_agreement(storage: RecordedStorage) -> RecordedStorage:
    """Flush pages when the committer next looks at the directory, all ranks having agreed."""
    flush, list_names = storage.flush, storage.list
    waiting: list[str] = []

    def listed() -> list[str]:
        if waiting:
            flush(waiting)
            waiting.clear()
        return list_names()

    storage.flush = waiting.extend  # type: ignore[method-assign,assignment]
    storage.list = listed  # type: ignore[method-assign]
    return storage


def _agreed_before_it_is_written(peers: Any, call: str, act: Any) -> Any:
    if call == "commit":
        _together(peers, call, lambda: None)
        return act()
    return _together(peers, call, act)


def _without_the_last_page(self: committer.Committer, groups: Any, pages: Any) -> Any:
    return _layout(self, groups, pages[:-1] if self.identity.rank == 1 else pages)


def _replicas_before_parameters(self: Sweep, page: Any, view: Any, source: Any) -> None:
    """Send to replicas before the owner has written its parameters."""
    replication = self._table.replication
    if self._has_gradient(page):
        replication.begin(page, source, self._present)
    replication.begin = lambda *args: None  # type: ignore[method-assign,assignment]
    try:
        _finish(self, page, view, source)
    finally:
        del replication.begin


_together, _layout, _finish = committer.together, committer.Committer.layout, Sweep._finish
_forget_older, _write_durably = committer.Committer._forget_older, committer.write_durably


@contextlib.contextmanager
def _layout_after_manifest() -> Iterator[None]:
    original = committer.write_durably
    waiting: dict[int, tuple[str, bytes]] = {}

    def write(storage: Any, name: str, data: bytes) -> None:
        if file_names.layout_digest_in(name):
            waiting[id(storage)] = name, data
            return
        original(storage, name, data)
        if id(storage) in waiting:
            original(storage, *waiting.pop(id(storage)))

    with mock.patch.object(committer, "write_durably", write):
        yield


def _without_tmp(storage: Any, name: str, data: bytes) -> None:
    if manifest_revision(name) is None:
        _write_durably(storage, name, data)
        return
    storage.put(name, data)
    storage.sync_directory()


@contextlib.contextmanager
def _forgotten_before_gather() -> Iterator[None]:
    """Each rank removes all commits but its own newest before it knows of the others'."""
    original = committer.write_durably

    def write(storage: Any, name: str, data: bytes) -> None:
        original(storage, name, data)
        others = [other for other in storage.list() if manifest_revision(other)]
        for other in others if manifest_revision(name) else ():
            if other != name:
                storage.unlink(other)

    with mock.patch.object(committer, "write_durably", write):
        yield


@contextlib.contextmanager
def _mark_is_taken_back_first() -> Iterator[None]:
    original = committer.write_durably

    def write(storage: Any, name: str, data: bytes) -> None:
        if manifest_revision(name) is not None and file_names.DIRTY_NAME in storage.list():
            committer.clear_dirty(storage)
        original(storage, name, data)

    with mock.patch.object(committer, "write_durably", write):
        yield


@contextlib.contextmanager
def _each_rank_for_itself() -> Iterator[None]:
    """Recovery that takes what this rank has for what all have."""
    original = recovery.agree

    def agree(peers: Any, call: str, act: Any) -> list[Any]:
        everyone = original(peers, call, act)
        if call == "read the commits":
            return [everyone[peers.rank]] * len(everyone)
        return everyone

    with mock.patch.object(recovery, "agree", agree):
        yield


def _name_before_metadata(self: CheckpointDirectory, metadata: bytes) -> None:
    self.folder.rename(self.child, self.name)
    self.folder.put(self.name, file_names.METADATA_NAME, metadata)
    self.folder.sync(self.name)
    self.folder.sync_children()


def _removed_in_place(folder: Any, run_id: str, newest: str, keep_last: int, marked: Any) -> None:
    children = [child for child in folder.children() if not child.startswith(".")]
    steps = {
        child: json.loads(folder.get(child, file_names.MARKER_NAME).partition(b"\n")[2])["step"]
        for child in children
        if child != newest
    }
    for child in sorted(steps, key=lambda child: -steps[child])[keep_last:]:
        retention.remove(folder, child)
    folder.sync_children()


def _undone_at_once(self: CheckpointDirectory) -> None:
    with contextlib.suppress(StorageError):
        if self._state is directory.State.NAMED:
            self.folder.rename(self.name, self.child)
        if self._state in (directory.State.TEMPORARY, directory.State.NAMED):
            retention.remove(self.folder, self.child)


def _leftovers_removed_at_once(folder: Any, run_id: str) -> None:
    for child in folder.children():
        if child.startswith(".") and f".tmp-{run_id[:8]}-" in child:
            retention.remove(folder, child)


_read_mark, _refuse_dirty = committer.read_mark, recovery._refuse_dirty


def _about_a_step(data: bytes, field: str) -> file_names.Revision | None:
    overwritten = _read_mark(data, field)
    return None if overwritten is None else overwritten._replace(number=sys.maxsize)


def _cleared_at_once(storage: Any, newest: Any) -> None:
    _refuse_dirty(storage, newest)
    if file_names.DIRTY_NAME in storage.list():
        committer.clear_dirty(storage)


def _patch(place: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(place, name, value)


_take_name = publish._Publishing._take_name


def _retained_first(self: Any, marked: Any) -> None:
    """Remove what is too much before the new one is there to take its place."""
    if self._keep_last is not None:
        run_id = self._manifest.run_id
        _without_one_more(self._directory.folder, run_id, "", self._keep_last, {})
    _take_name(self, marked)


_retain, _verify, _marked_ranks = retention.retain, Verifier._verify, retention.marked_ranks


def _without_one_more(folder: Any, run_id: str, newest: str, keep_last: int, marked: Any) -> None:
    with mock.patch.object(retention, "compress", return_value=iter([()])):
        _retain(folder, run_id, newest, keep_last, marked)


def _marked_first(
    self: Verifier, page_files: Any, publication: Any, folder: Any, child: str, *args: Any
) -> None:
    publication.settle()
    verification._mark(page_files, folder, child)
    _verify(self, page_files, publication, folder, child, *args)


def _all_ranks_if_any(marker: Any, get: Any) -> set[int]:
    marked = _marked_ranks(marker, get)
    return set(range(marker["world_size"])) if marked else marked


WRITTEN = [
    Mutant(
        name="the attempt id is the same in all attempts",
        patched=_patch(committer, "secrets", SimpleNamespace(token_hex=lambda n: "0" * 2 * n)),
        settings=SHARING,
    ),
    Mutant(
        name="a manifest is put under its final name",
        patched=_patch(committer, "write_durably", _without_tmp),
    ),
    Mutant(
        name="whether a file is shared is ignored: published files are overwritten in place",
        protocol=Protocol(storage=_shared_is_ignored),
    ),
    Mutant(
        name="the gather of a commit is left out",
        patched=_patch(committer, "together", lambda peers, call, act: act()),
    ),
    Mutant(
        name="the ranks agree on a commit before they have written it",
        patched=_patch(committer, "together", _agreed_before_it_is_written),
        settings=SHARING,
    ),
    Mutant(
        name="the owner's page is not flushed before the agreement",
        protocol=Protocol(storage=_flushed_after_the_agreement),
        settings=SHARING,
    ),
    Mutant(
        name="a subgroup is missing in one rank's manifest",
        patched=_patch(committer.Committer, "layout", _without_the_last_page),
        settings=SHARING,
    ),
    Mutant(
        name="replicas are told before the owner's write",
        patched=_patch(Sweep, "_finish", _replicas_before_parameters),
        settings=SHARING,
    ),
    Mutant(
        name="a layout is written after the manifest that names it",
        patched=_layout_after_manifest,
        settings=SYNCHRONIZING,
    ),
    Mutant(
        name="a layout is removed while a manifest names it",
        patched=_patch(
            committer.Committer, "_forget_older", lambda self, layouts: _forget_older(self, ())
        ),
    ),
    Mutant(
        name="the mark of a clean end stays when the run is opened",
        patched=_patch(recovery, "_remove_clean_mark", lambda storage: None),
        settings=REOPENING,
    ),
    Mutant(
        name="the copy that the last commit needs is overwritten",
        patched=_needed_copy_is_overwritten,
    ),
    Mutant(
        name="a step overwrites pages before the commit before it is durable",
        patched=_next_step_overtakes_commit,
    ),
    Mutant(name="older commits are forgotten before the gather", patched=_forgotten_before_gather),
    Mutant(
        name="the dirty mark is left out",
        patched=_patch(committer, "mark_dirty", lambda storage, revision: None),
    ),
    Mutant(
        name="the dirty mark is about a step, whichever of its commits",
        patched=_patch(committer, "read_mark", _about_a_step),
        settings=REPLACING,
    ),
    Mutant(
        name="a late dirty mark is taken back before the commit is durable",
        patched=_patch(recovery, "_refuse_dirty", _cleared_at_once),
        settings=REPLACING,
    ),
    Mutant(
        name="the dirty mark is taken back before the manifest is there",
        patched=_mark_is_taken_back_first,
    ),
    Mutant(name="recovery takes the newest commit of each rank", patched=_each_rank_for_itself),
    Mutant(
        name="a checkpoint has its name before .metadata is in it",
        patched=_patch(CheckpointDirectory, "take_name", _name_before_metadata),
    ),
    Mutant(
        name="an old checkpoint is removed under its final name",
        patched=_patch(directory, "retain", _removed_in_place),
    ),
    Mutant(
        name="old checkpoints are removed before the new one is there",
        patched=_patch(publish._Publishing, "_take_name", _retained_first),
    ),
    Mutant(
        name="leftovers of publishing are removed while their name may come back",
        patched=_patch(directory, "remove_leftovers", _leftovers_removed_at_once),
        settings=RETAINING,
    ),
]


WRITTEN += [
    Mutant(name=name, patched=patched)
    for name, patched in (
        ("a commit leaves out pages that rest in memory", resting_faults.left_out_of_commits),
        (
            "a commit leaves pages without the values of parameters",
            _patch(Pager, "_add_parameters", lambda pager, page: None),
        ),
        (
            "a page that rests in memory is not known to be newer than its file",
            _patch(Pager, "_keep", resting_faults.kept_as_stored),
        ),
        (
            "a move forgets what is newer than its file",
            _patch(Pager, "make_way", resting_faults.changes_dropped),
        ),
        (
            "a move writes pages over what the last commit needs",
            _patch(Pager, "make_way", resting_faults.written_over_itself),
        ),
    )
]

WRITTEN.append(
    Mutant(
        name="a page moved from memory to memory is read from its file",
        patched=_patch(Pager, "_move_to_memory", resting_faults.read_again),
        settings=MOVING,
    )
)


_write_page = Pager._write


def _without_free_states(self: Pager, page: Page) -> None:
    """Write zeros in the place of states that do not lie along their parameter."""
    for (name, _), records in page.layout.records.items():
        for state in page.parameters[name].spec.free_states:
            for record in records[state]:
                record.view(page.memory).zero_()
    _write_page(self, page)


WRITTEN.append(
    Mutant(
        name="a page is written without its free states",
        patched=_patch(Pager, "_write", _without_free_states),
    )
)


_begin_epoch, _published = committer.Committer.begin_epoch, retention._published


def _by_step(revision: file_names.Revision) -> tuple[int, ...]:
    return revision.step, revision.epoch, revision.number


def _newest_step(ranks: Any) -> file_names.Revision | None:
    common = set.intersection(*(set(attempts.items()) for attempts in ranks))
    return max((revision for revision, _ in common), key=_by_step, default=None)


def _sorted_by_step(values: Any) -> list[Any]:
    """Sort revisions by step, and anything else as it is sorted."""
    values = list(values)
    are_revisions = all(isinstance(value, file_names.Revision) for value in values)
    return sorted(values, key=_by_step if are_revisions else None)


def _needs_no_slot(self: committer.Committer, found: Any) -> None:
    _begin_epoch(self, found)
    self._needed = {}


def _of_one_epoch(folder: Any, run_id: str) -> dict[str, Any]:
    return {child: {**marker, "epoch": 0} for child, marker in _published(folder, run_id).items()}


WRITTEN += [
    Mutant(name=name, patched=patched, settings=settings)
    for name, patched, settings in (
        (
            "recovery takes the commit of the latest step, whatever its epoch",
            _patch(recovery, "newest_in_common", _newest_step),
            REWINDING,
        ),
        (
            "older commits are those of earlier steps, whatever their epochs",
            lambda: mock.patch.object(committer, "sorted", _sorted_by_step, create=True),
            REWINDING,
        ),
        (
            "a rewind overwrites the pages that the last commit needs",
            _patch(committer.Committer, "begin_epoch", _needs_no_slot),
            REWINDING,
        ),
        (
            "retention orders checkpoints by step, whatever their epochs",
            _patch(retention, "_published", _of_one_epoch),
            RETAINING_REWOUND,
        ),
    )
]


_wait = Pager._wait


def _only_reads(self: Pager, *args: Any) -> None:
    with contextlib.suppress(StorageError):
        _wait(self, *args)


def _ignored(operation: str) -> Callable[[], AbstractContextManager[Any]]:
    """Let the errors of an operation of the storage pass unseen."""
    original = getattr(FaultyStorage, operation)

    def act(self: FaultyStorage, *args: Any) -> None:
        with contextlib.suppress(StorageError):
            original(self, *args)

    return _patch(FaultyStorage, operation, act)


def _unsealed(kind: str, data: bytes, where: str) -> Any:
    try:
        return json.loads(data.partition(b"\n")[2])
    except ValueError as error:
        raise CorruptionError(where) from error


UNDER_FAULTS = [
    Mutant(name=name, patched=patched, simulated_by=FaultSimulation, settings=settings)
    for name, patched, settings in (
        (
            "pages are not checked when they are read",
            _patch(PageFiles, "_check", lambda self, page, memory, sections: None),
            None,
        ),
        (
            "the checksum of a manifest is not looked at",
            _patch(manifest, "unseal", _unsealed),
            FEW_FILES,
        ),
        ("errors of flush are ignored", _ignored("flush"), None),
        ("errors of rename are ignored", _ignored("rename"), None),
        (
            "errors of reading and writing are ignored while a step goes on",
            _patch(Pager, "_wait", _only_reads),
            None,
        ),
        (
            "restore() keeps what rests in memory",
            _patch(Pager, "reset", resting_faults.memory_kept),
            None,
        ),
        (
            "a failed checkpoint is removed while its final name may come back",
            _patch(CheckpointDirectory, "remove", _undone_at_once),
            PUBLISHING,
        ),
        ("errors of sync_directory are ignored", _ignored("sync_directory"), SYNCHRONIZING),
        (
            "retention forgets the newest whole checkpoint",
            _patch(directory, "retain", _without_one_more),
            PUBLISHING,
        ),
        (
            "a checkpoint is marked before it was read",
            _patch(Verifier, "_verify", _marked_first),
            PUBLISHING,
        ),
        (
            "a checkpoint counts as whole once one rank has marked it",
            _patch(retention, "marked_ranks", _all_ranks_if_any),
            PUBLISHING_TOGETHER,
        ),
        (
            "what verification finds is not raised",
            _patch(Verifier, "wait", lambda self, *args: True),
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
        patched=_patch(committer.Committer, "claim_slot", _clean_after_a_claim),
        simulated_by=WriteBackSimulation,
        settings=RESTORING,
    ),
    Mutant(
        name="page files are kept after an end that was not clean",
        patched=_patch(opening, "find_run", _always_closed),
        simulated_by=WriteBackSimulation,
    ),
    Mutant(
        name="page files are made anew before all ranks went back",
        patched=_patch(recovery._RankCommits, "go_back_to", _removed_at_once),
        simulated_by=RecoverySimulation,
    ),
]

MOVED = [
    Mutant(
        name="the place is not looked at before a commit",
        patched=_patch(PlacedStorage, "require_in_place", lambda self, name: None),
        simulated_by=MoveSimulation,
    ),
    Mutant(
        name="files are opened by path",
        patched=_patch(PlacedStorage, "by_path", True),
        simulated_by=MoveSimulation,
    ),
]
