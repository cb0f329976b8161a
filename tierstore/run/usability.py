"""Whether a store may be used: open, in its own process, between steps, not failed, restored."""

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
    """The condition of one store, checked before every call.

    Args:
        ranks: all ranks, to be told of failures.
        has_directory: whether there is a commit, or will be, to go back to after a failure.
            Without a directory this rank stays usable, as optimizers of PyTorch do; others fail.
        awaits_restore: whether the directory holds a commit to be restored first.
    """

    def __init__(self, ranks: Ranks, *, has_directory: bool, awaits_restore: bool) -> None:
        self._ranks = ranks
        self._pid = os.getpid()
        self.has_directory = has_directory
        self.awaits_restore = awaits_restore
        self.closed = False
        self.failure: BaseException | None = None
        """The error that left parameters or pages between two steps."""
        self.sweeping = False
        """Whether a step is in progress, so that parameters and pages are of two steps."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the process that opened the store."""
        return self._pid != os.getpid()

    def fail(self, error: BaseException) -> None:
        """Refuse everything but restore() and close() from now on, and tell the other ranks."""
        if self.has_directory:
            self.failure = error
            logger.error("the store failed: %r", error)
        self._ranks.fail(error)

    def note_restored(self) -> None:
        """Allow everything again, after a commit was restored."""
        self.failure, self.awaits_restore = None, False

    @contextlib.contextmanager
    def failing(self, *, interrupts: bool) -> Iterator[None]:
        """Fail the store if anything fails in the block.

        Args:
            interrupts: whether an interrupt in the block also leaves something half done.
        """
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
        except BaseException as error:
            if interrupts:
                self.fail(error)
            raise

    def require_open(self) -> None:
        """Raise StoreClosedError unless the store is open in this process."""
        if self.is_forked:
            raise StoreClosedError(
                "this process is a fork of the one that opened the store: use it there only"
            )
        if self.closed:
            raise StoreClosedError("the store is closed: open another")
        if self.sweeping:
            raise SweepError(
                "a step is under way, and its pages are of two steps: call this after it. A "
                "signal handler should only note the signal"
            )

    def require_usable(self) -> None:
        """Raise StoreClosedError, or StoreFailedError if an earlier call failed the store."""
        self.require_open()
        if self.failure is not None:
            raise StoreFailedError(
                f"the store failed: {self.failure!r}. restore() goes back to the last commit, "
                "if there is one, unless several ranks share the parameters: then start the job "
                "again with resume=True. Nothing else works but close()"
            ) from self.failure

    def require_restored(self) -> None:
        """Raise as require_usable(), or RunDirectoryError if a commit is to be restored first."""
        self.require_usable()
        if self.awaits_restore:
            raise RunDirectoryError(
                "the directory holds a committed step: call restore() before anything else"
            )
