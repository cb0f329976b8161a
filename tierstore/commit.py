"""Making one step durable after the other, in the background.

The order is what a crash cannot get wrong: pages written and looked at, page files
flushed, manifest under a temporary name, its final name, the directory. Until the last of
these the commit before is the one that a restart finds; the pages that it names are
untouched, because a step writes to the other copy of each page.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tierstore.errors import StoreFailedError
from tierstore.manifest import Manifest, manifest_name, manifest_step, page_file
from tierstore.storage.base import Storage, Transfer

DIRTY_NAME = "dirty"


def write_durably(storage: Storage, name: str, data: bytes) -> None:
    """Make a small file appear whole or not at all, whenever a crash comes."""
    storage.put(f"{name}.tmp", data)
    storage.rename(f"{name}.tmp", name)
    storage.sync_directory()


def mark_dirty(storage: Storage, step: int) -> None:
    """Say durably that the one copy of each page of commit ``step`` is being overwritten."""
    write_durably(storage, DIRTY_NAME, json.dumps({"overwriting_step": step}).encode())


def clear_dirty(storage: Storage) -> None:
    """Take the mark back, after a newer commit is durable."""
    storage.unlink(DIRTY_NAME)
    storage.sync_directory()


class Commits:
    """The commits of one rank's run: which is the last, and the next one on its way.

    Commits are made one at a time on a thread of their own. With ``single_copy`` each page
    has one file, so that a step overwrites what the last commit needs, under a mark.

    Args:
        storage: the rank's files.
        committed: the commit that the run goes on from, or None.
        single_copy: whether each page has one file instead of two.
    """

    def __init__(self, storage: Storage, committed: Manifest | None, *, single_copy: bool) -> None:
        self._storage = storage
        self._single_copy = single_copy
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tierstore-commit")
        self.go_on_from(committed)

    def go_on_from(self, manifest: Manifest | None) -> None:
        """Make a commit found by recovery the last one, in an attempt of its own."""
        self.attempt = secrets.token_hex(8)
        """Names this opening of the run in every manifest."""
        self.committed_step = manifest.step if manifest else 0
        """The newest durable step."""
        self.begun_step = self.committed_step
        """The newest step that begin() was called for."""
        entries = manifest.pages if manifest else ()
        self._copies = {index: entry.copy for index, entry in enumerate(entries)}
        self._files_written: set[str] = set()
        self._dirty = False
        self._pending: Future[None] | None = None
        self._begun = self._durable = 0  # Number of the last commit that was.

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
        if self._durable != self._begun:
            raise StoreFailedError("an interrupt came as a commit began, and it was never made")
        committed = self._copies.get(page)
        copy = "b" if committed == "a" and not self._single_copy else "a"
        if copy == committed and not self._dirty:
            mark_dirty(self._storage, self.committed_step)
            self._dirty = True
        self._files_written.add(page_file(page, copy))
        return copy

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
        self._begun += 1
        self.begun_step = manifest.step
        self._copies, self._files_written, self._dirty = copies, set(), False
        self._pending = self._executor.submit(self._commit, self._begun, manifest, writes, files)

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
        self, number: int, manifest: Manifest, writes: Sequence[Transfer], files: Sequence[str]
    ) -> None:
        for write in writes:
            write.wait()
        self._storage.flush(files)
        write_durably(self._storage, manifest_name(manifest.step), manifest.to_bytes())
        self.committed_step = manifest.step
        self._durable = number
        self._forget_older()

    def _forget_older(self) -> None:
        names = self._storage.list()
        steps = sorted(step for name in names if (step := manifest_step(name)) is not None)
        for step in steps[: -1 if self._single_copy else -2]:
            self._storage.unlink(manifest_name(step))
        if DIRTY_NAME in names:
            clear_dirty(self._storage)
