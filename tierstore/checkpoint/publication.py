"""Publication: the handle of a checkpoint that is being published."""

from __future__ import annotations

from tierstore.threads import Result
from tierstore.units import format_bytes


class Publication:
    """A checkpoint that is being published, or was published.

    Attributes:
        path: the directory.
        step: the committed step in it.
        bytes_linked: bytes of this rank's pages that were linked.
        bytes_total: bytes of this rank's pages to copy; if all pages are linked, of all pages.
        bytes_copied: bytes that were copied so far.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path = path
        self.step = step
        self.bytes_total = self.bytes_copied = self.bytes_linked = 0
        self.outcome: Result[None] = Result()

    def __repr__(self) -> str:
        """Return one line, without waiting: ``Publication('d/a', step 7, published, ...)``."""
        state = "in progress"
        if self.done():
            error = self.outcome.error
            state = "published" if error is None else f"failed: {type(error).__name__}"
        parts = [f"{self.path!r}", f"step {self.step}", state]
        if self.bytes_linked:
            parts.append(f"{format_bytes(self.bytes_linked)} linked")
        if self.bytes_copied or self.bytes_total != self.bytes_linked:
            copied, total = format_bytes(self.bytes_copied), format_bytes(self.bytes_total)
            parts.append(f"{copied} of {total} copied")
        return f"Publication({', '.join(parts)})"

    def done(self) -> bool:
        """Return whether wait() returns or raises at once."""
        return self.outcome.is_set

    def wait(self) -> None:
        """Block until the checkpoint is published.

        Raises:
            StorageError, CorruptionError: publishing failed. Nothing is left of the checkpoint.
        """
        self.outcome.result()

    def settle(self) -> None:
        """Block until publishing has ended; do not raise the error of a failure."""
        self.outcome.wait()
