"""The outcome of publishing a checkpoint, which may still be on its way."""

from __future__ import annotations

from concurrent.futures import Future, wait


class Publication:
    """A checkpoint that is being published, or was.

    Attributes:
        path: the directory.
        step: the step that it holds.
        bytes_linked: bytes of this rank's pages that were linked.
        bytes_total: bytes of those that are copied; of all where all were linked.
        bytes_copied: how many were copied until now.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = path
        self.step = step
        self.bytes_total = self.bytes_copied = self.bytes_linked = 0
        self.outcome: Future[None] = Future()

    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once."""
        return self.outcome.done()

    def wait(self) -> None:
        """Block until the checkpoint is there.

        Raises:
            StorageError, CorruptionError: it will never be; nothing is left of it.
        """
        self.outcome.result()

    def settle(self) -> None:
        """Block until nothing is done for it any more, whatever became of it."""
        wait([self.outcome])
