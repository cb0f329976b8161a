"""Usability of a store: open, in its process, between steps, not failed, restored."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from tierstore.errors import (
    RunDirectoryError,
    StoreClosedError,
    StoreFailedError,
    SweepError,
)
from tierstore.ranks.peers import Ranks

logger = logging.getLogger("tierstore")


class Usability:
    """The condition of one store. Every call checks it first.

    Args:
        ranks: all ranks; failures are published to them.
        has_directory: whether restore() can go back to a commit after a failure. Without a
            directory this rank stays usable, like a PyTorch optimizer. The other ranks fail.
        awaits_restore: whether the directory holds a commit that must be restored first.
    """

    def __init__(self, ranks: Ranks, *, has_directory: bool, awaits_restore: bool) -> None:
        self._ranks = ranks
        self._pid = os.getpid()
        self.has_directory = has_directory
        self.awaits_restore = awaits_restore
        self.closed = False
        self.failure: BaseException | None = None
        """The error that left a mix of two steps in parameters or pages."""
        self.sweeping = False
        """True if a step is in progress: parameters and pages are then a mix of two steps."""

    @property
    def is_forked(self) -> bool:
        """True if this process is a child of the process that opened the store."""
        return self._pid != os.getpid()

    @property
    def remarks(self) -> list[str]:
        """Words on the condition of the store; empty if every call works."""
        remarks = ["opened by another process"] if self.is_forked else []
        if self.closed:
            return [*remarks, "closed"]
        if self.failure is not None:
            remarks.append(f"failed: {type(self.failure).__name__}")
        if self.sweeping:
            remarks.append("in a step")
        if self.awaits_restore:
            remarks.append("needs restore()")
        return remarks

    def fail(self, error: BaseException) -> None:
        """From now on refuse all calls except restore() and close(), and fail the other ranks."""
        if self.has_directory:
            self.failure = error
            logger.error("the store failed: %r", error)
        self._ranks.fail(error)

    def note_restored(self) -> None:
        """Allow all calls again after a commit was restored."""
        self.failure, self.awaits_restore = None, False

    @contextlib.contextmanager
    def failing(self, *, interrupts: bool) -> Iterator[None]:
        """Fail the store if the block raises.

        Args:
            interrupts: whether an interrupt in the block also fails the store.
        """
        try:
            yield
        except BaseException as error:
            if interrupts or isinstance(error, Exception):
                self.fail(error)
            raise

    def require_open(self) -> None:
        """Raise StoreClosedError unless the store is open in this process."""
        if self.is_forked:
            raise StoreClosedError(
                "this process is a fork of the process that opened the store: use the store there"
            )
        if self.closed:
            raise StoreClosedError("the store is closed: open another")
        if self.sweeping:
            raise SweepError(
                "a step is in progress, and some pages are still from the step before: make this "
                "call after the step. A signal handler should only note the signal"
            )

    def require_usable(self) -> None:
        """Raise StoreClosedError, or StoreFailedError if an earlier call failed the store."""
        self.require_open()
        if self.failure is not None:
            raise StoreFailedError(
                f"the store failed: {self.failure!r}. restore() goes back to the last commit, "
                "if one exists, unless several ranks share the parameters: then start the job "
                "again with resume=True. Otherwise only close() works"
            ) from self.failure

    def require_restored(self) -> None:
        """Raise like require_usable(); raise RunDirectoryError if a commit must be restored."""
        self.require_usable()
        if self.awaits_restore:
            raise RunDirectoryError(
                "the directory holds a committed step: call restore() before anything else"
            )
