"""The directory of one checkpoint, from its temporary name to its final one."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Collection, Mapping
from enum import Enum

from tierstore.checkpoint.retention import (
    is_replaced,
    is_taken,
    marked_by_ranks,
    remove,
    remove_leftovers,
    retain,
    temporary_prefix,
    withdraw,
)
from tierstore.errors import CheckpointError, StorageError, TierstoreError
from tierstore.run.file_names import METADATA_NAME
from tierstore.storage.base import Folder

logger = logging.getLogger("tierstore")

_REMOVE_TIMEOUT_S = 1.0


class State(Enum):
    """The state of the directory. It decides what a failure removes."""

    ABSENT = "this rank did not make the directory"
    TEMPORARY = "it has its temporary name"
    NAMED = "it has its final name, which may not be durable yet"
    KEPT = "the checkpoint is published, or may be"


class CheckpointDirectory:
    """The directory of a checkpoint, as one rank sees it.

    One rank makes the directory. Other ranks that see it put files into it. On the rank that made
    it, the states are::

        make()       ABSENT    -> TEMPORARY
        take_name()  TEMPORARY -> NAMED
        keep()       NAMED     -> KEPT        remove() does nothing from here on
        withdraw()   KEPT      -> NAMED       called if another rank did not publish its part
        remove()     TEMPORARY: removes it
                     NAMED: gives it the temporary name again, durably, then removes it

    Args:
        folder: the directory above the checkpoint.
        name: the final name.
        run_id: the run that is published.
        token: 8 hexadecimal digits that identify this attempt, the same on all ranks.
        age: epoch and step that are published.
    """

    def __init__(
        self, folder: Folder, name: str, run_id: str, token: str, age: tuple[int, int]
    ) -> None:
        self.folder = folder
        self.name = name
        self.child = f"{temporary_prefix(name, run_id)}{token}"
        """The temporary name."""
        self._run_id = run_id
        self._age = age
        self._state = State.ABSENT

    @property
    def made_here(self) -> bool:
        """True if this rank made the directory."""
        return self._state is not State.ABSENT

    def make(self) -> None:
        """Make the directory under its temporary name, after removing leftovers of attempts.

        Raises:
            CheckpointError: the final name is taken, except by a checkpoint of steps that the run
                has abandoned.
            StorageError: the disk refuses.
        """
        if is_taken(self.folder, self.name) and not self._replaces():
            raise CheckpointError(
                f"{self.folder.location}/{self.name} already exists: name another directory, or "
                "remove this one first"
            )
        remove_leftovers(self.folder, self._run_id)
        self.folder.make(self.child)
        self._state = State.TEMPORARY

    def is_visible(self) -> bool:
        """Return whether this rank sees the directory. Any rank may have made it."""
        return self.made_here or self.child in self.folder.children()

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. Its data is durable, but not its name."""
        self.folder.put(self.child, name, data)

    def take_name(self, metadata: bytes) -> None:
        """Write ``.metadata``, make names in the directory durable, then take the final name."""
        self.put(METADATA_NAME, metadata)
        self.folder.sync(self.child)
        doomed = None
        if is_taken(self.folder, self.name) and self._replaces():
            doomed = withdraw(self.folder, self.name, self._run_id)
        self.folder.rename(self.child, self.name)
        self._state = State.NAMED
        self.folder.sync_children()
        if doomed is not None:
            try:
                remove(self.folder, doomed)
            except StorageError as error:  # The next checkpoint() removes them.
                logger.warning("files of the replaced checkpoint stay: %s", error)

    def _replaces(self) -> bool:
        return is_replaced(self.folder, self.name, self._run_id, *self._age)

    def keep(self) -> None:
        """Protect the directory from remove()."""
        self._state = State.KEPT

    def withdraw(self) -> None:
        """Allow remove() to remove a kept directory."""
        if self._state is State.KEPT:
            self._state = State.NAMED

    def marked_by_ranks(self) -> dict[str, set[int]]:
        """Return for each checkpoint of the run beside this one the ranks that verified it."""
        return marked_by_ranks(self.folder, self._run_id)

    def retain(self, keep_last: int | None, marked: Mapping[str, Collection[int]]) -> None:
        """Remove the oldest checkpoints of the run beside this one. Log failures.

        Args:
            keep_last: number of checkpoints to keep; None: all.
            marked: as in retention.retain().
        """
        if keep_last is None:
            return
        try:
            retain(self.folder, self._run_id, self.name, keep_last, marked)
        except Exception as error:  # The new checkpoint is published in any case.
            logger.warning("older checkpoints beside %s stay: %r", self.name, error)

    def remove(self) -> None:
        """Remove the directory if this rank made it and it is not kept.

        Raises no error: the user has to fix the error that ended publishing, and the next
        checkpoint of the run removes the rest.
        """
        with contextlib.suppress(TierstoreError):
            if self._state is State.NAMED:
                self.folder.rename(self.name, self.child)
                self.folder.sync_children()  # Else the final name may name a partial checkpoint.
                self._state = State.TEMPORARY
            if self._state is State.TEMPORARY:
                self._remove_child()

    def _remove_child(self) -> None:
        """Remove files until the directory is empty. Other ranks may still link files into it."""
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        while True:
            try:
                return remove(self.folder, self.child)
            except StorageError as error:
                if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline:
                    raise
