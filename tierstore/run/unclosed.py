"""Stores that a program does not close.

Their last step is committed as the process ends, or the log says what is lost. How a thread other
than the main thread ended is not known, so the log says that its last step is lost.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tierstore.run.committer import Committer
from tierstore.run.usability import Usability

logger = logging.getLogger("tierstore")


class Ending:
    """The end of a store that the program does not close.

    Args:
        close: the method of the store; neither the method nor the store is kept alive.
        committer: the commits of the run.
        usability: of the store.
        world_size: number of ranks.
        give_up: stops what a store that is not closed does in the background; must not refer to
            the store.
    """

    def __init__(
        self,
        close: Callable[[], None],
        committer: Committer,
        usability: Usability,
        world_size: int,
        *,
        give_up: Callable[[], None],
    ) -> None:
        self.has_extra = False
        """True if the program has called commit(), which may have an extra."""
        self._close = weakref.WeakMethod(close)
        self._committer = committer
        self._usability = usability
        self._give_up = give_up
        self._world_size = world_size
        self.note_step()
        store: Any = close.__self__  # type: ignore[attr-defined]
        # Keeps this object alive as long as the store.
        self._dropped = weakref.finalize(store, self._warn, "the store was dropped without close()")
        self._dropped.atexit = False
        _endings.add(self)

    def note_step(self) -> None:
        """Note that this thread did a step; no exception before this has ended the program."""
        self._thread = threading.current_thread()
        self._last_error = _last_error()

    def cancel(self) -> None:
        """Note that the store is closed."""
        self._dropped.detach()
        _endings.discard(self)

    def end(self) -> None:
        """Close the store if that can neither wait for ranks nor commit a step without its extra.

        Else warn of the steps that are lost. An error is logged, and so is an interrupt, after
        which the store is closed without a commit that has not begun.
        """
        close, usability = self._close(), self._usability
        if close is None or usability.is_forked:
            return
        self.cancel()
        obstacle = self._obstacle()
        if obstacle:
            self._give_up()
            self._warn(f"the process ends without close(), and {obstacle}")
            return
        try:
            close()
        except Exception as error:
            where = self._committer.storage.location
            logger.error("%s: the process ends without close(), which failed: %s", where, error)
        except KeyboardInterrupt:
            logger.error(
                "%s: the process ends without close(), which was interrupted: a restart finds "
                "step %d",
                self._committer.storage.location,
                self._committer.committed_step,
            )

    def _obstacle(self) -> str:
        """Return why the store cannot be closed now; "" if it can be."""
        committer, usability = self._committer, self._usability
        if usability.failure is not None:
            return "the store has failed"
        if usability.sweeping:
            return "a step is in progress"
        if self._world_size > 1:
            return "ranks commit together only"
        in_other_thread = self._thread is not threading.current_thread()
        if in_other_thread and self._thread.is_alive():
            return "the thread of the last step still runs"
        if committer.is_up_to_date:
            return ""
        if self.has_extra and not committer.has_extra:
            return "the program did not call commit(), which gives the step its extra"
        if in_other_thread:
            return "another thread did the last step, and an exception may have ended it"
        if _last_error() != self._last_error:
            return "an exception ended the program"
        if multiprocessing.parent_process() is not None:
            return "this is a process of multiprocessing, which an exception may have ended"
        return ""

    def _warn(self, reason: str) -> None:
        """Log a warning if steps are lost."""
        committer, usability = self._committer, self._usability
        if usability.is_forked or usability.awaits_restore or committer.is_up_to_date:
            return
        logger.warning(
            "%s: %s: everything after step %d is lost. Call close(), or open the store in a "
            "`with` block",
            committer.storage.location,
            reason,
            committer.begun_step,
        )


_endings: weakref.WeakSet[Ending] = weakref.WeakSet()


def _last_error() -> int:
    """Return the identity of the last exception that nothing caught."""
    return id(getattr(sys, "last_value", None))


def _end_all() -> None:
    for ending in list(_endings):
        ending.end()


# Not atexit: its hooks come after the threads of concurrent.futures have ended, which commit and
# which move bytes. These hooks come before that, the last one that was registered first; so this
# module comes after the import of concurrent.futures.thread in committer.py.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
