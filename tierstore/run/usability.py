"""Whether a store may be used: open, by its own process, between steps, not failed, restored."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from tierstore.errors import (
    RunDirectoryError,
    StoreClosedError,
    StoreFailedError,
    SweepError,
)

logger = logging.getLogger("tierstore")


class Guard:
    """The condition of one store, asked before every call."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        """Make the condition of a new store.

        Args:
            on_failure: told of what leaves the parameters or the pages between two steps.
        """
        self._on_failure = on_failure
        self._pid = os.getpid()
        self.closed = False
        self.failure: BaseException | None = None
        """What left the parameters or the pages between two steps."""
        self.awaits_restore = False
        """Whether there is a commit that was not restored yet."""
        self.sweeping = False
        """Whether a step is under way, so that parameters and pages are of two steps."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that opened the store."""
        return self._pid != os.getpid()

    def fail(self, error: BaseException) -> None:
        """Let nothing but restore() and close() work from now on."""
        self.failure = error
        logger.error("the store failed: %r", error)
        self._on_failure(error)

    @contextlib.contextmanager
    def failing(self, *, interrupts: bool) -> Iterator[None]:
        """Fail the store if anything fails in the block.

        Args:
            interrupts: whether an interrupt there leaves something half done, too.
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
        """Raise, as require_usable() or because there is a commit to restore first."""
        self.require_usable()
        if self.awaits_restore:
            raise RunDirectoryError(
                "the directory holds a committed step: call restore() before anything else"
            )
