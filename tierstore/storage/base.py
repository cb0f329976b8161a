"""What a storage is: named files of one directory, with asynchronous page transfers.

A storage knows nothing of tensors, pages or commits. Each operation that a crash could
separate from another is a method of its own, so that a simulator can drop or reorder
whatever was not yet made durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierstore.units import Extent


class Transfer(Protocol):
    """One read or write in flight. Keeps its buffer alive until it has ended."""

    def wait(self) -> None:
        """Block until the transfer has ended. May be called again, and by several threads.

        Raises:
            StorageError: some byte did not move; the same error at every call.
        """

    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once. Never blocks."""


class Storage(Protocol):
    """Named files of one directory. All methods may be called from several threads.

    Names are plain file names without a slash. A method that fails raises StorageError
    with the errno of the operating system, and never retries what may have half happened.
    """

    @property
    def engine(self) -> str:
        """How bytes move: "io_uring", "aiofiles" or "memory"."""

    @property
    def location(self) -> str:
        """Where the files are, for messages."""

    def lock(self, timeout_s: float) -> None:
        """Become the directory's only user until close().

        Raises:
            RunLockedError: another process still holds it after ``timeout_s`` seconds.
        """

    def list(self) -> list[str]:
        """Return the names of all files, sorted."""

    def size(self, name: str) -> int:
        """Return a file's length in bytes."""

    def create(self, name: str, nbytes: int) -> None:
        """Make a file of ``nbytes`` zero bytes whose disk space is allocated already.

        An existing file of that name is replaced by a fresh one (a new inode). The name
        is durable only after sync_directory().
        """

    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """Start reading ``extent`` of a file into ``buffer``.

        ``buffer`` is writable, contiguous, ``extent.nbytes`` long and starts at a
        multiple of SECTOR_BYTES in memory; ValueError otherwise.
        """

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """Start writing ``buffer`` over ``extent`` of an existing file; ``buffer`` as in read().

        The data is durable only after flush().
        """

    def flush(self, names: Sequence[str]) -> None:
        """Make the data of these files durable, all of them together."""

    def put(self, name: str, data: bytes) -> None:
        """Make a small file that holds ``data``, durable itself; its name is not yet.

        An existing file of that name is truncated first: write under a temporary name
        and rename() where the old content must survive a crash.
        """

    def get(self, name: str) -> bytes:
        """Return the whole content of a small file."""

    def rename(self, name: str, new_name: str) -> None:
        """Give a file a new name, replacing a file of that name. Not yet durable."""

    def unlink(self, name: str) -> None:
        """Remove a file. Not yet durable."""

    def sync_directory(self) -> None:
        """Make all names durable: what was created, renamed or removed until now."""

    def drain(self) -> None:
        """Block until every transfer begun so far has ended, whether or not it succeeded.

        For a caller that was interrupted between the start of a transfer and keeping it.
        """

    def abandon(self) -> None:
        """Drop every descriptor at once, in a forked child, touching no file and no lock."""

    def close(self) -> None:
        """Wait for all transfers, then release everything. May be called again."""
