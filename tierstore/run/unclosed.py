"""Stores that a program does not close: a warning says which step a restart finds."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable

from tierstore.run.committer import Committer
from tierstore.run.usability import Usability

logger = logging.getLogger("tierstore")


class Unclosed:
    """A store that the program has not closed.

    When the store is dropped, or when the process ends, a warning says which steps are lost. A
    commit in flight becomes durable; no other commit is made.

    Args:
        store: the store. It is referred to weakly.
        committer: the commits of the run.
        usability: the usability of the store.
        stop: ends other work in the background; must not refer to the store.
    """

    def __init__(
        self, store: object, committer: Committer, usability: Usability, stop: Callable[[], None]
    ) -> None:
        self._committer = committer
        self._usability = usability
        self._stop = stop
        # Keeps this object alive as long as the store.
        self._finalizer = weakref.finalize(store, self._drop)
        self._finalizer.atexit = False
        _unclosed.add(self)

    def cancel(self) -> None:
        """Note that the store is closed."""
        self._finalizer.detach()
        _unclosed.discard(self)

    def end(self) -> None:
        """Wait for the commit in flight, then warn. Called when the process ends."""
        if self._usability.is_forked:
            return
        self.cancel()
        self._stop()
        # After an interrupt the warning names a step at or before the one that a restart finds.
        with contextlib.suppress(KeyboardInterrupt):
            self._committer.settle()
        self._warn("the process ends without close()", self._committer.committed_step)

    def _drop(self) -> None:
        # The thread of the committer finishes the commit in flight.
        if not self._usability.is_forked:
            self._warn("the store was dropped without close()", self._committer.begun_step)

    def _warn(self, reason: str, step: int) -> None:
        """Log a warning if a restart does not find the last step.

        Args:
            reason: why the last step is not committed.
            step: the step that a restart finds; 0 without a commit.
        """
        committer = self._committer
        if committer.is_up_to_date and step == committer.begun_step:
            return
        logger.warning(
            "%s: %s: %s. Call close(), or open the store in a `with` block",
            committer.storage.location,
            reason,
            "the run is lost"
            if committer.lost_commit
            else f"a restart finds step {step} of {committer.step}",
        )


_unclosed: weakref.WeakSet[Unclosed] = weakref.WeakSet()


def _end_all() -> None:
    for store in list(_unclosed):
        store.end()


# Not atexit: its hooks run after the threads that commit and move bytes have ended. This hook runs
# before the hook of tierstore.threads. That hook is registered first: committer.py imports it.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
