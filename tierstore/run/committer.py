"""The committer: makes steps durable in the background, one at a time.

A commit writes and flushes pages, and the layout file if it is new. It then writes the manifest
under a temporary name, renames it, and syncs the directory. Until then a restart finds the previous
commit. The pages of that commit are intact, because a step writes to the other slot of each page.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.profiler import record_function
from typing_extensions import override

from tierstore.errors import CorruptionError, StorageError, StoreFailedError
from tierstore.layout.page_layout import PageLayout
from tierstore.layout.parameters import PagedGroup, ParameterSpec
from tierstore.ranks.peers import Peers, together
from tierstore.run import tagged_json
from tierstore.run.file_names import (
    CLEAN_NAME,
    DIRTY_NAME,
    IDENTITY_NAME,
    Revision,
    layout_digest_in,
    layout_name,
    manifest_name,
    manifest_revision,
    page_file,
    spare_file,
)
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest, PageEntry, RunIdentity, pack_scalars, unpack_scalars
from tierstore.run.page_files import create_all, create_files, remove_other_files
from tierstore.run.sealed import checksum_of, parse_json
from tierstore.storage.base import Storage, Transfer
from tierstore.threads import Result, Threads
from tierstore.units import format_bytes


def write_durably(storage: Storage, name: str, data: bytes) -> None:
    """Write a small file that a crash leaves either whole or absent."""
    storage.put(f"{name}.tmp", data)
    storage.rename(f"{name}.tmp", name)
    storage.sync_directory()


def mark_dirty(storage: Storage, revision: Revision) -> None:
    """Durably mark that the only slot of a page of this commit is being overwritten."""
    mark = {"overwriting": manifest_name(revision)}
    write_durably(storage, DIRTY_NAME, json.dumps(mark).encode())


def read_mark(data: bytes, field: str) -> Revision | None:
    """Return the commit that the single field of a mark names; None if the mark is damaged."""
    try:
        return manifest_revision(parse_json(data)[field])
    except (ValueError, LookupError, TypeError):
        return None


def find_mark(storage: Storage, name: str, field: str) -> Revision | None:
    """Return the commit in the mark of this name; None if the mark is absent or damaged."""
    if name not in storage.list():
        return None
    try:
        return read_mark(storage.get(name), field)
    except CorruptionError:  # The file is larger than any mark.
        return None


def clear_dirty(storage: Storage) -> None:
    """Remove the mark after a newer commit is durable. A crash may restore the stale mark."""
    storage.unlink(DIRTY_NAME)


def mark_clean(storage: Storage, revision: Revision) -> None:
    """Durably mark that the run was closed after a commit with nothing in flight."""
    mark = {"committed": manifest_name(revision)}
    write_durably(storage, CLEAN_NAME, json.dumps(mark).encode())


class Progress:
    """The steps of a store, and the changes since the last commit.

    A store without a directory has no Committer: no commit is ever due.
    """

    def __init__(self) -> None:
        self.step = 0
        """Number of the last step."""
        self.scalars: dict[str, dict[str, float]] = {}
        """Parameter name -> scalar name -> value."""
        self.changed = False
        """True if pages were changed since the last commit was begun."""
        self.groups_written = 0
        """Number of groups with pages. Commits leave out groups that were attached later."""

    @property
    def is_due(self) -> bool:
        """True if the last step must be committed before the next step begins."""
        return False

    @property
    def makes_commits(self) -> bool:
        """True if the store has a directory and therefore makes commits."""
        return False

    @property
    def adds_parameters(self) -> bool:
        """True if a commit writes the parameter values that steps did not write."""
        return False

    @property
    def slots(self) -> str:
        """Names of the files of each page."""
        return ""

    @property
    def has_states(self) -> bool:
        """True if keep_states() was called for this step. The next commit then has these states."""
        return False

    @property
    def keeps_commit(self) -> bool:
        """True if a step leaves a commit intact for restore()."""
        return False

    def note_written(self, groups: int) -> None:
        """Note that pages were changed and that the first ``groups`` groups have pages."""
        self.changed, self.groups_written = True, groups

    def claim_slot(self, page: int) -> str:
        """Never called: without a directory no page is written."""
        raise AssertionError(f"page {page} has no file")

    def allocate(self, layouts: Mapping[int, PageLayout]) -> None:
        """Allocate nothing."""

    def close(self) -> None:
        """Do nothing."""


class Committer(Progress):
    """The commits of one rank: the last durable one, the one in flight, and the next one.

    A thread makes commits one at a time. Each rank commits its files and then tells the other
    ranks. No rank overwrites a page before all ranks have committed.

    A shared file, for example of a published checkpoint, is never written again. A spare file that
    was allocated ahead takes its name.

    Args:
        storage: the rank's files.
        peers: all ranks. They agree on each commit.
        identity: the run.
        commit_every: steps from one commit to the next. None: no commit is ever due, and each page
            has one slot instead of two. A step then overwrites the pages of the last commit, under
            a dirty mark.
    """

    def __init__(
        self, storage: Storage, peers: Peers, identity: RunIdentity, *, commit_every: int | None
    ) -> None:
        super().__init__()
        self.identity = identity
        self.rewound_step: int | None = None
        """The step to which this process has rewound."""
        """The run."""
        self.committed: Manifest | None = None
        """The newest durable commit."""
        self.storage = storage
        """The rank's files."""
        self._peers = peers
        self._commit_every = commit_every
        self._thread = Threads(1, "tierstore-commit")
        self._layout: RankLayout | None = None  # The layout of the last begun commit.
        self._layout_data = b""
        self.is_clean = True
        """True if no page was written since the run was closed, or since all page files that the
        commit does not name were replaced by new files."""
        self.marks_clean_end = False
        """True if close() marks the run as closed with nothing in flight."""

    def begin_attempt(self, manifest: Manifest | None) -> None:
        """Begin a new attempt after a commit that recovery has found. All ranks call this."""
        # decisions: Attempts make a barrier unnecessary.
        self._attempt: str = self._peers.gather(secrets.token_hex(8))[0]
        self.committed = self._begun = manifest
        self._epoch = 0 if manifest is None else manifest.epoch
        # A step and the states of registered objects at that step. At first no step.
        self._asked: tuple[int, dict[str, Any]] = (-1, {})
        self._needed = {} if manifest is None else manifest.entries
        self._durable_layout = ""  # Digest of the layout that this attempt has written.
        self._files_written: set[str] = set()
        self._spares: set[str] = set()
        self._dirty = self._renamed = False
        self._replaces_files = not self.is_clean
        self._pending: Result[None] | None = None

    def restore(
        self, manifest: Manifest, groups: Sequence[PagedGroup], renamed: Mapping[str, str]
    ) -> None:
        """Go back to a commit and set the hyperparameters of the groups. All ranks call this.

        Args:
            manifest: the commit.
            groups: the groups of the commit.
            renamed: parameter name -> its name in the commit, if the names differ. The step is
                then committed again under the new names.
        """
        self.begin_attempt(manifest)
        for group, saved in zip(groups, manifest.hyperparameters, strict=True):
            group.hyperparameters.update(tagged_json.decode(saved))
        self.scalars = scalars_in(manifest, groups, renamed)
        self.step = manifest.step
        self.groups_written = len(groups)
        self.keep_states(manifest.states)
        self.changed = bool(renamed)

    def begin_epoch(self, manifest: Manifest) -> None:
        """Order the next commit after ``manifest``, even if its step is smaller. All ranks call."""
        self.begin_attempt(manifest)
        # decisions: A commit is ordered by epoch, then by step.
        self._epoch += 1

    @property
    def committed_step(self) -> int:
        """The newest durable step, or 0."""
        return self.committed.step if self.committed else 0

    @property
    @override
    def is_due(self) -> bool:
        every = self._commit_every
        return every is not None and self.step - self.begun_step >= every

    @property
    def begun_step(self) -> int:
        """The step of the last begun commit, or 0."""
        return self._begun.step if self._begun else 0

    @property
    def was_begun(self) -> bool:
        """True if a commit of the last step was begun."""
        return self._begun is not None and self.step == self._begun.step

    @property
    @override
    def makes_commits(self) -> bool:
        return True

    @property
    @override
    def adds_parameters(self) -> bool:
        return self._commit_every != 1

    @property
    @override
    def keeps_commit(self) -> bool:
        return self._commit_every is not None and self._begun is not None

    @property
    def is_up_to_date(self) -> bool:
        """True if the last begun commit has all changes, including kept states."""
        if self.changed:
            return False
        if self._begun is None or not self.has_states:
            return True
        return tagged_json.are_equal(self._asked[1], self._begun.states)

    @property
    def lost_commit(self) -> bool:
        """True if a restart finds no step: no commit exists, or its only slots are replaced."""
        return self._begun is None or (self._commit_every is None and self._dirty)

    @property
    @override
    def has_states(self) -> bool:
        return self._asked[0] == self.step

    @property
    def begins_commit(self) -> bool:
        """True if commit() begins a commit: the step is due, or has changed since its commit."""
        if self.was_begun:
            return not self.is_up_to_date
        return self.is_due or (self.changed and not self.step)  # Step 0: initial values of a run.

    @property
    @override
    def slots(self) -> str:
        return "a" if self._commit_every is None else "ab"

    # -- Before a commit: the files that steps may write.

    @override
    def allocate(self, layouts: Mapping[int, PageLayout]) -> None:
        """Allocate the files of pages. A full disk then fails before a step.

        If the attempt did not begin clean, new files replace the files that the commit does not
        name. All ranks have then gone back to the commit.

        Args:
            layouts: page number -> layout of the page.

        Raises:
            StorageError: for example, the disk is full. The files of the commit are unchanged.
        """
        # decisions: Page files are made anew after an end that was not clean.
        if self._replaces_files:
            needed = [page_file(page, entry.slot) for page, entry in self._needed.items()]
            remove_other_files(self.storage, needed)
            self._replaces_files, self.is_clean = False, True
        names = create_files(self.storage, layouts, self.slots)
        shared = [name for name in names if self.storage.is_shared(name)]
        try:
            self.provide_spares(shared)
        except StorageError as error:
            nbytes = sum(map(self.storage.size, shared))
            error.add_note(
                f"{len(shared)} page files are shared with checkpoints and need new files of "
                f"{format_bytes(nbytes)} in {self.storage.location}: free that much, or remove the "
                f"checkpoints. No new file was kept; step {self.committed_step} is committed and "
                "intact."
            )
            raise

    @override
    def claim_slot(self, page: int) -> str:
        """Return the slot of a page that may be overwritten now, and remember to flush it.

        Blocks until the last begun commit is durable. Until then a restart after a crash may need
        either slot. Example, for a page that every step writes:

            step  slot  needed by
            1     a     commit 1
            2     b     commit 2; the claim waits for commit 1, which needs a
            3     a     commit 3; the claim waits for commit 2, which needs b

        Raises:
            StorageError, StoreFailedError: the last commit never becomes durable.
        """
        self.wait()
        assert not self._replaces_files, "files are allocated before a step may write them"
        self.is_clean = False
        needed = self._needed[page].slot if page in self._needed else None
        slot = "b" if needed == "a" and "b" in self.slots else "a"
        name = page_file(page, slot)
        # Check before each write: a checkpoint may have been published or removed meanwhile.
        if self.storage.is_shared(name):
            self.provide_spares([name])
        if slot == needed and not self._dirty:
            assert self.committed is not None
            mark_dirty(self.storage, self.committed.revision)
            self._dirty = True
        # Use the spare even if the file is not shared any more: a reader of a removed checkpoint
        # may still have the file open.
        if name in self._spares:
            self._renamed = True
            self.storage.rename(spare_file(name), name)
            self._spares.discard(name)
        self._files_written.add(name)
        return slot

    def provide_spares(self, names: Iterable[str]) -> None:
        """Allocate the missing spare files of these page files: all of them, or none.

        Raises:
            StorageError: for example, the disk is full. Nothing was changed.
        """
        sizes = {name: self.storage.size(name) for name in names if name not in self._spares}
        create_all(self.storage, {spare_file(name): nbytes for name, nbytes in sizes.items()})
        self._spares.update(sizes)

    def drop_spares(self) -> None:
        """Remove the spare files of page files that are not shared any more."""
        for name in list(self._spares):
            if not self.storage.is_shared(name):
                self.storage.unlink(spare_file(name))
                self._spares.discard(name)

    def forget_spares(self) -> None:
        """Note that recovery removed all spare files."""
        self._spares.clear()

    # -- A commit.

    def keep_states(self, states: dict[str, Any]) -> None:
        """Keep the states of registered objects for the commits of this step."""
        self._asked = (self.step, states)

    def layout(
        self, groups: Sequence[Sequence[ParameterSpec]], pages: Sequence[PageLayout]
    ) -> RankLayout:
        """Return the layout for commits from now on.

        Args:
            groups: the specs of all groups; groups without pages are left out.
            pages: the layouts of all pages.
        """
        if self._layout is None or len(self._layout.groups) != self.groups_written:
            count = self.groups_written
            written = [page for page in pages if page.subgroup.group < count]
            layout = RankLayout.from_pages(groups[:count], written)
            # Assign both together: an interrupt of to_bytes() then leaves both unchanged.
            self._layout, self._layout_data = layout, layout.to_bytes()
        return self._layout

    def manifest(
        self,
        layout: RankLayout,
        groups: Sequence[PagedGroup],
        pages: Sequence[PageEntry | None],
    ) -> Manifest:
        """Return the manifest of this step. It copies everything that later steps change.

        Args:
            layout: the current result of layout().
            groups: all groups; groups without pages are left out.
            pages: content of the file of each page, in order. None is allowed for pages of groups
                that are left out.

        Raises:
            TypeError, ValueError: a commit cannot hold a hyperparameter or a scalar.
        """
        assert self.has_states, "what is registered is asked before each commit"
        entries = [entry for entry in pages[: len(layout.subgroups)] if entry is not None]
        assert len(entries) == len(layout.subgroups), (
            "a group counts as written once all of its pages are"
        )
        names = [[spec.name for spec in group] for group in layout.groups]
        groups = groups[: self.groups_written]
        before = self._begun
        now = (self._epoch, self.step)
        return Manifest(
            run_id=self.identity.run_id,
            attempt=self._attempt,
            rank=self.identity.rank,
            world_size=self.identity.world_size,
            epoch=self._epoch,
            step=self.step,
            number=before.number + 1 if before and before.revision[:2] == now else 1,
            first=before is None,
            page_bytes=self.identity.page_bytes,
            layout=checksum_of(self._layout_data),
            pages=entries,
            scalars=pack_scalars(self.scalars, names),
            hyperparameters=[encode_hyperparameters(i, group) for i, group in enumerate(groups)],
            extra=self._asked[1],
        )

    def begin(self, manifest: Manifest, writes: Sequence[Transfer]) -> None:
        """Start to make a step durable, after the commit in flight.

        Args:
            manifest: the step. The caller does not change it any more.
            writes: writes of pages that may not have ended.

        Raises:
            StorageError: the previous commit failed.
        """
        self.wait()
        files = sorted(self._files_written)
        # Submit last: an interrupt before it leaves a commit that never becomes durable. wait()
        # then refuses every claim of a slot and every further commit.
        before, self._begun = self._begun, manifest
        self._needed = manifest.entries
        self._files_written, self._dirty = set(), False
        renamed, self._renamed = self._renamed, False
        self._pending = self._thread.submit(
            self._commit, before, manifest, self._layout_data, writes, files, renamed
        )
        self.changed = False

    def wait(self) -> None:
        """Block until the last begun commit, if any, is durable.

        Raises:
            StorageError: the commit failed, and the previous commit is still the last one. Every
                call raises this until restore().
            StoreFailedError: an interrupt came as the commit began. Raised in the same way.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        if self.committed is not self._begun:
            raise StoreFailedError("an interrupt came as a commit began: the commit was not made")

    def settle(self) -> None:
        """Block until the thread is idle, even if the commit failed."""
        self._thread.submit(lambda: None).result()

    @override
    def close(self) -> None:
        """End the thread after the commit in flight."""
        self._thread.close()
        if self.marks_clean_end and self.committed is not None:
            mark_clean(self.storage, self.committed.revision)

    def _commit(
        self,
        before: Manifest | None,
        manifest: Manifest,
        layout_data: bytes,
        writes: Sequence[Transfer],
        files: Sequence[str],
        renamed: bool,
    ) -> None:
        """Make a step durable on this rank, then on all ranks. Runs on the commit thread."""

        def commit_here() -> None:
            for write in writes:
                write.wait()
            self.storage.flush(files)
            if renamed:  # Without this, a crash could undo the renaming of a spare file.
                self.storage.sync_directory()
            # Check as late as possible: an acknowledged step must be where the user looks for it.
            # A copy of the run in its place also has the identity, but not the newest commit.
            self.storage.require_in_place(
                IDENTITY_NAME if before is None else manifest_name(before.revision)
            )
            if manifest.layout != self._durable_layout:  # Also syncs the names of new page files.
                write_durably(self.storage, layout_name(manifest.layout), layout_data)
                self._durable_layout = manifest.layout
            write_durably(self.storage, manifest_name(manifest.revision), manifest.to_bytes())

        # The step is committed when all ranks have it. If one rank lacks this commit, all ranks go
        # back to the commit before. The next claim of a slot destroys the commit before.
        with record_function(f"tierstore::commit {manifest.step}"):
            together(self._peers, "commit", commit_here)
        self.committed = manifest
        self._forget_older([manifest] if before is None else [before, manifest])

    def _forget_older(self, remaining: Sequence[Manifest]) -> None:
        """Remove manifests and layouts that a restart does not need any more, and the dirty mark.

        Args:
            remaining: the last commits. A restart may find any of them.
        """
        # Keep as many commits as a page has slots.
        # decisions: A damaged manifest gives way to the one before.
        names = self.storage.list()
        revisions = sorted(revision for name in names if (revision := manifest_revision(name)))
        stale = [manifest_name(revision) for revision in revisions[: -len(self.slots)]]
        layouts = {manifest.layout for manifest in remaining}
        digests = {name: layout_digest_in(name) for name in names}
        stale += [name for name, digest in digests.items() if digest and digest not in layouts]
        for name in stale:
            self.storage.unlink(name)
        if DIRTY_NAME in names:
            clear_dirty(self.storage)


def scalars_in(
    manifest: Manifest, groups: Sequence[PagedGroup], renamed: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Return parameter name -> scalar name -> value in a commit.

    Args:
        manifest: the commit.
        groups: the groups of the commit.
        renamed: parameter name -> its name in the commit, if the names differ.
    """
    names = [[parameter.name for parameter in group.parameters] for group in groups]
    former = {name: renamed.get(name, name) for group in names for name in group}
    scalars = unpack_scalars(
        manifest.scalars, [[former[name] for name in group] for group in names]
    )
    return {name: scalars[old] for name, old in former.items() if old in scalars}


def encode_hyperparameters(index: int, group: PagedGroup) -> Any:
    """Return the hyperparameters of a group in the form of a manifest.

    Raises:
        TypeError, ValueError: a commit cannot hold a hyperparameter; the message names it.
    """
    return tagged_json.encode(group.own_hyperparameters(), name=f"param_groups[{index}]")
