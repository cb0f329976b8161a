"""Making one step durable after the other, in the background.

The order is what a crash cannot get wrong: pages written and looked at, page files
flushed, manifest under a temporary name, its final name, the directory. Until the last of
these the commit before is the one that a restart finds; the pages that it names are
untouched, because a step writes to the other copy of each page. Of several ranks each does
so with its own files, then tells the others; none overwrites anything before all have.

A file that is shared, with a published checkpoint for one, is never written again: a fresh
one, allocated ahead, takes its name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.profiler import record_function

from tierstore.errors import StorageError, StoreFailedError
from tierstore.layout.page_layout import PageLayout, layout_digest
from tierstore.layout.parameters import PagedGroup
from tierstore.ranks.peers import Peers, together
from tierstore.run import tagged_json
from tierstore.run.file_names import (
    DIRTY_NAME,
    Revision,
    manifest_name,
    manifest_revision,
    page_file,
    spare_file,
)
from tierstore.run.manifest import Manifest, PageEntry, RunIdentity
from tierstore.storage.base import Storage, Transfer


def write_durably(storage: Storage, name: str, data: bytes) -> None:
    """Make a small file appear whole or not at all, whenever a crash comes."""
    storage.put(f"{name}.tmp", data)
    storage.rename(f"{name}.tmp", name)
    storage.sync_directory()


def mark_dirty(storage: Storage, revision: Revision) -> None:
    """Say durably that the one copy of each page of this commit is being overwritten."""
    mark = {"overwriting": manifest_name(revision)}
    write_durably(storage, DIRTY_NAME, json.dumps(mark).encode())


def read_mark(data: bytes) -> Revision | None:
    """Return the commit that a dirty mark is about, or None where it is damaged."""
    try:
        return manifest_revision(json.loads(data)["overwriting"])
    except (ValueError, LookupError, TypeError):
        return None


def clear_dirty(storage: Storage) -> None:
    """Take the mark back, after a newer commit is durable: should it return, it is late."""
    storage.unlink(DIRTY_NAME)


class Commits:
    """The commits of one rank's run: which is the last, and the next one on its way.

    Commits are made one at a time on a thread of their own. With ``single_copy`` each page
    has one file, so that a step overwrites what the last commit needs, under a mark.

    Args:
        storage: the rank's files.
        peers: all ranks, to be told of each commit.
        committed: the commit that the run goes on from, or None.
        single_copy: whether each page has one file instead of two.
    """

    def __init__(
        self, storage: Storage, peers: Peers, committed: Manifest | None, *, single_copy: bool
    ) -> None:
        self._storage = storage
        self._peers = peers
        self._single_copy = single_copy
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tierstore-commit")
        self.go_on_from(committed)

    def go_on_from(self, manifest: Manifest | None) -> None:
        """Make a commit found by recovery the last one, in an attempt of its own."""
        self.attempt: str = self._peers.gather(secrets.token_hex(8))[0]
        """Names this opening of the run in every manifest, the same on all ranks."""
        self.committed = manifest
        """The newest durable commit."""
        self.begun = manifest
        """The newest commit that begin() was called for."""
        entries = manifest.pages if manifest else ()
        self._copies = {index: entry.copy for index, entry in enumerate(entries)}
        self._files_written: set[str] = set()
        self._spares: set[str] = set()
        self._dirty = self._renamed = False
        self._pending: Future[None] | None = None
        self._number_begun = self._number_durable = 0  # Number of the last commit that was.

    @property
    def committed_step(self) -> int:
        """The newest durable step, or 0."""
        return self.committed.step if self.committed else 0

    @property
    def begun_step(self) -> int:
        """The newest step that begin() was called for, or 0."""
        return self.begun.step if self.begun else 0

    @property
    def copies(self) -> str:
        """The files that each page has, by their last letter."""
        return "a" if self._single_copy else "ab"

    def claim_copy(self, page: int) -> str:
        """Return the copy of a page that may be overwritten now, and remember to flush it.

        Blocks until the last commit begun is durable: until then a crash needs both.

        Raises:
            StorageError, StoreFailedError: it is not, and never will be.
        """
        self.wait()
        if self._number_durable != self._number_begun:
            raise StoreFailedError("an interrupt came as a commit began, and it was never made")
        committed = self._copies.get(page)
        copy = "b" if committed == "a" and not self._single_copy else "a"
        name = page_file(page, copy)
        if self._storage.is_shared(name):
            self.provide_spares([name])
        if copy == committed and not self._dirty:
            assert self.committed is not None
            mark_dirty(self._storage, self.committed.revision)
            self._dirty = True
        # Also where it is not shared any more: who reads it from a checkpoint that was removed
        # meanwhile may have it open still.
        if name in self._spares:
            self._renamed = True
            self._storage.rename(spare_file(name), name)
            self._spares.discard(name)
        self._files_written.add(name)
        return copy

    def provide_spares(self, names: Iterable[str]) -> None:
        """Allocate what shall take the place of these page files, for all or for none.

        Raises:
            StorageError: the disk is full, say. Nothing was changed.
        """
        made: list[str] = []
        try:
            for name in names:
                if name not in self._spares:
                    self._storage.create(spare_file(name), self._storage.size(name))
                    self._spares.add(name)
                    made.append(name)
        except StorageError:
            for name in made:
                with contextlib.suppress(StorageError):  # The first error is the one to mend.
                    self._storage.unlink(spare_file(name))
                    self._spares.discard(name)
            raise

    def drop_spares(self) -> None:
        """Give back the space that nothing needs, because nothing is shared any more."""
        for name in list(self._spares):
            if not self._storage.is_shared(name):
                self._storage.unlink(spare_file(name))
                self._spares.discard(name)

    def forget_spares(self) -> None:
        """Note that recovery removed whatever was allocated ahead."""
        self._spares.clear()

    def begin(self, manifest: Manifest, writes: Sequence[Transfer]) -> None:
        """Start to make a step durable; the one before is waited for.

        Args:
            manifest: what the step holds; nothing in it may change any more.
            writes: transfers of its pages that were not yet seen to have succeeded.

        Raises:
            StorageError: the commit before failed.
        """
        self.wait()
        files = sorted(self._files_written)
        copies = {index: entry.copy for index, entry in enumerate(manifest.pages)}
        # Submitted last: an interrupt before that leaves a commit that is never durable,
        # and claim_copy() then lets nothing be overwritten.
        self._number_begun += 1
        self.begun = manifest
        self._copies, self._files_written, self._dirty = copies, set(), False
        renamed, self._renamed = self._renamed, False
        self._pending = self._executor.submit(
            self._commit, self._number_begun, manifest, writes, files, renamed
        )

    def wait(self) -> None:
        """Block until the step that was begun, if any, is durable.

        Raises:
            StorageError: it is not, and the commit before it is still the last one. Raised
                by every call until go_on_from().
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def settle(self) -> None:
        """Block until the thread has nothing left to do, whatever became of it."""
        self._executor.submit(lambda: None).result()

    def close(self) -> None:
        """End the thread, after the step that was begun."""
        self._executor.shutdown()

    def _commit(
        self,
        number: int,
        manifest: Manifest,
        writes: Sequence[Transfer],
        files: Sequence[str],
        renamed: bool,
    ) -> None:
        def commit_here() -> None:
            for write in writes:
                write.wait()
            self._storage.flush(files)
            if renamed:  # Else the manifest could name a page file that is still another.
                self._storage.sync_directory()
            write_durably(self._storage, manifest_name(manifest.revision), manifest.to_bytes())

        with record_function(f"tierstore::commit {manifest.step}"):
            together(self._peers, "commit", commit_here)
        self.committed = manifest
        self._number_durable = number
        self._forget_older()

    def _forget_older(self) -> None:
        names = self._storage.list()
        revisions = sorted(revision for name in names if (revision := manifest_revision(name)))
        for revision in revisions[: -1 if self._single_copy else -2]:
            self._storage.unlink(manifest_name(revision))
        if DIRTY_NAME in names:
            clear_dirty(self._storage)


class History:
    """What changed since the last commit, and what the next one will hold."""

    def __init__(self) -> None:
        self.step = 0
        self.scalars: dict[str, dict[str, float]] = {}
        """Parameter name -> scalar name -> value."""
        self.extra: Any = None
        """What was given to the commit that was restored."""
        self.changed = False
        """Whether a page was written since a commit was begun."""
        self.groups_written = 0
        """Groups attached later have no pages yet and are in no commit."""
        self._next_extra: tuple[int, Any] = (0, None)  # A step, and what to commit with it.

    def wrote(self, groups: int) -> None:
        """Note that pages were written, those of so many groups being all there now."""
        self.changed, self.groups_written = True, groups

    def annotate(self, extra: Any) -> None:
        """Keep a copy of what the commit of this step shall hold.

        Raises:
            TypeError, ValueError: no commit can hold it.
        """
        self._next_extra = (self.step, tagged_json.encode(extra, name="extra"))

    @property
    def is_committed(self) -> bool:
        """Whether a commit of everything was begun: there is nothing new to say."""
        return not self.changed and not (self.step and self._next_extra[0] == self.step)

    def manifest(
        self,
        identity: RunIdentity,
        *,
        attempt: str,
        before: Manifest | None,
        groups: Sequence[PagedGroup],
        pages: Sequence[tuple[PageLayout, PageEntry | None]],
        shared: bool,
    ) -> Manifest:
        """Return the manifest of this step: a copy of all that later steps will change.

        Args:
            identity: the run.
            attempt: this opening of it.
            before: the commit before it, if there is one.
            groups: all groups; those without pages are left out.
            pages: the layout of every page, and where its content was written last.
            shared: whether other ranks have a part of the groups.

        Raises:
            TypeError, ValueError: a hyperparameter or a scalar that no commit can hold.
        """
        groups = groups[: self.groups_written]
        written = [
            (layout, entry)
            for layout, entry in pages
            if entry is not None and layout.subgroup.group < len(groups)
        ]
        layouts = [layout for layout, _ in written]
        extra_step, extra = self._next_extra
        return Manifest(
            run_id=identity.run_id,
            attempt=attempt,
            rank=identity.rank,
            world_size=identity.world_size,
            step=self.step,
            number=before.number + 1 if before and before.step == self.step else 1,
            first=before is None,
            page_bytes=identity.page_bytes,
            groups=[[parameter.spec for parameter in group.parameters] for group in groups],
            layout=layout_digest(layouts),
            pages=[entry for _, entry in written],
            subgroups=[layout.subgroup for layout in layouts] if shared else None,
            scalars=tagged_json.encode(self.scalars, name="scalars"),
            hyperparameters=[encode_hyperparameters(i, group) for i, group in enumerate(groups)],
            extra=extra if extra_step == self.step else None,
        )

    def committed(self) -> None:
        """Note that a commit of everything was begun."""
        self._next_extra = (0, None)
        self.changed = False

    def go_on_from(self, manifest: Manifest, groups: Sequence[PagedGroup]) -> None:
        """Make a commit the present, and give the groups their hyperparameters back."""
        for group, saved in zip(groups, manifest.hyperparameters, strict=True):
            group.hyperparameters.update(tagged_json.decode(saved))
        self.scalars = tagged_json.decode(manifest.scalars)
        self.extra = tagged_json.decode(manifest.extra)
        self.step = manifest.step
        self.groups_written = len(groups)
        self.committed()


def encode_hyperparameters(index: int, group: PagedGroup) -> Any:
    """Return the hyperparameters of a group as a manifest holds them.

    Raises:
        TypeError, ValueError: one that no commit can hold, by name.
    """
    return tagged_json.encode(group.own_hyperparameters(), name=f"param_groups[{index}]")
