"""Protocols with one thing wrong each: see docs/internals/simulation.md."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulation import resting_faults
from tests.simulation.fault_mutants import AFTER_FAILURES, MOVED, UNDER_FAULTS
from tests.simulation.log import Weakening
from tests.simulation.mutant import (
    BEGINNING,
    MOVING,
    REOPENING,
    REPLACING,
    RETAINING,
    RETAINING_REWOUND,
    REWINDING,
    SHARING,
    SYNCHRONIZING,
    Mutant,
    patch,
    without_one_more,
)
from tests.simulation.session import Protocol
from tests.simulation.simulator import Simulation
from tests.simulation.storage import RecordedStorage
from tierstore.checkpoint import directory, publish, retention
from tierstore.checkpoint.directory import CheckpointDirectory
from tierstore.paging.page import Page
from tierstore.paging.pager import Pager
from tierstore.paging.sweep import Sweep
from tierstore.run import committer, file_names, recovery
from tierstore.run.file_names import manifest_revision

SITE_SEEDS = 12
"""Seeds whose schedules meet every site: the first eight do, and a missing one fails a test."""


SPECIAL = {"recovery.erase_commits": BEGINNING, "retention.remove_leftovers": RETAINING}


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


_take_name = publish._Publishing._take_name


def _retained_first(self: Any, marked: Any) -> None:
    """Remove what is too much before the new one is there to take its place."""
    if self._keep_last is not None:
        run_id = self._manifest.run_id
        without_one_more(self._directory.folder, run_id, "", self._keep_last, {})
    _take_name(self, marked)


WRITTEN = [
    Mutant(
        name="the attempt id is the same in all attempts",
        patched=patch(committer, "secrets", SimpleNamespace(token_hex=lambda n: "0" * 2 * n)),
        settings=SHARING,
    ),
    Mutant(
        name="a manifest is put under its final name",
        patched=patch(committer, "write_durably", _without_tmp),
    ),
    Mutant(
        name="whether a file is shared is ignored: published files are overwritten in place",
        protocol=Protocol(storage=_shared_is_ignored),
    ),
    Mutant(
        name="the gather of a commit is left out",
        patched=patch(committer, "together", lambda peers, call, act: act()),
    ),
    Mutant(
        name="the ranks agree on a commit before they have written it",
        patched=patch(committer, "together", _agreed_before_it_is_written),
        settings=SHARING,
    ),
    Mutant(
        name="the owner's page is not flushed before the agreement",
        protocol=Protocol(storage=_flushed_after_the_agreement),
        settings=SHARING,
    ),
    Mutant(
        name="a subgroup is missing in one rank's manifest",
        patched=patch(committer.Committer, "layout", _without_the_last_page),
        settings=SHARING,
    ),
    Mutant(
        name="replicas are told before the owner's write",
        patched=patch(Sweep, "_finish", _replicas_before_parameters),
        settings=SHARING,
    ),
    Mutant(
        name="a layout is written after the manifest that names it",
        patched=_layout_after_manifest,
        settings=SYNCHRONIZING,
    ),
    Mutant(
        name="a layout is removed while a manifest names it",
        patched=patch(
            committer.Committer, "_forget_older", lambda self, layouts: _forget_older(self, ())
        ),
    ),
    Mutant(
        name="the mark of a clean end stays when the run is opened",
        patched=patch(recovery, "_remove_clean_mark", lambda storage: None),
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
        patched=patch(committer, "mark_dirty", lambda storage, revision: None),
    ),
    Mutant(
        name="the dirty mark is about a step, whichever of its commits",
        patched=patch(committer, "read_mark", _about_a_step),
        settings=REPLACING,
    ),
    Mutant(
        name="a late dirty mark is taken back before the commit is durable",
        patched=patch(recovery, "_refuse_dirty", _cleared_at_once),
        settings=REPLACING,
    ),
    Mutant(
        name="the dirty mark is taken back before the manifest is there",
        patched=_mark_is_taken_back_first,
    ),
    Mutant(name="recovery takes the newest commit of each rank", patched=_each_rank_for_itself),
    Mutant(
        name="a checkpoint has its name before .metadata is in it",
        patched=patch(CheckpointDirectory, "take_name", _name_before_metadata),
    ),
    Mutant(
        name="an old checkpoint is removed under its final name",
        patched=patch(directory, "retain", _removed_in_place),
    ),
    Mutant(
        name="old checkpoints are removed before the new one is there",
        patched=patch(publish._Publishing, "_take_name", _retained_first),
    ),
    Mutant(
        name="leftovers of publishing are removed while their name may come back",
        patched=patch(directory, "remove_leftovers", _leftovers_removed_at_once),
        settings=RETAINING,
    ),
]


WRITTEN += [
    Mutant(name=name, patched=patched)
    for name, patched in (
        ("a commit leaves out pages that rest in memory", resting_faults.left_out_of_commits),
        (
            "a commit leaves pages without the values of parameters",
            patch(Pager, "_add_parameters", lambda pager, page: None),
        ),
        (
            "a page that rests in memory is not known to be newer than its file",
            patch(Pager, "_keep", resting_faults.kept_as_stored),
        ),
        (
            "a move forgets what is newer than its file",
            patch(Pager, "make_way", resting_faults.changes_dropped),
        ),
        (
            "a move writes pages over what the last commit needs",
            patch(Pager, "make_way", resting_faults.written_over_itself),
        ),
    )
]

WRITTEN.append(
    Mutant(
        name="a page moved from memory to memory is read from its file",
        patched=patch(Pager, "_move_to_memory", resting_faults.read_again),
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
        patched=patch(Pager, "_write", _without_free_states),
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
            patch(recovery, "newest_in_common", _newest_step),
            REWINDING,
        ),
        (
            "older commits are those of earlier steps, whatever their epochs",
            lambda: mock.patch.object(committer, "sorted", _sorted_by_step, create=True),
            REWINDING,
        ),
        (
            "a rewind overwrites the pages that the last commit needs",
            patch(committer.Committer, "begin_epoch", _needs_no_slot),
            REWINDING,
        ),
        (
            "retention orders checkpoints by step, whatever their epochs",
            patch(retention, "_published", _of_one_epoch),
            RETAINING_REWOUND,
        ),
    )
]
