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


class Folder(Protocol):
    """A directory of checkpoints: of children, each a directory of plain files.

    Used by one thread. Names and errors are as in Storage.
    """

    @property
    def location(self) -> str:
        """Where the children are, for messages."""

    def children(self) -> list[str]:
        """Return the names of all children, sorted."""

    def files(self, child: str) -> list[str]:
        """Return the names of everything in a child, sorted; ENOTDIR where it is none."""

    def make(self, child: str) -> None:
        """Make an empty child; EEXIST where there is something of that name."""

    def put(self, child: str, name: str, data: bytes) -> None:
        """Make a file that holds ``data``, durable itself; its name is after sync()."""

    def get(self, child: str, name: str) -> bytes:
        """Return the whole content of a small file."""

    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        """Give a file of a storage a second name in a child. Durable after sync().

        EXDEV where the two are not on one filesystem, EPERM, EMLINK or EOPNOTSUPP where
        the filesystem does not allow it.
        """

    def append(self, child: str, name: str, data: memoryview) -> None:
        """Add to the end of a file, made if absent. Durable after flush() and sync()."""

    def flush(self, child: str, name: str) -> None:
        """Make the data of a file durable."""

    def unlink(self, child: str, name: str) -> None:
        """Remove a file. Not yet durable."""

    def remove(self, child: str) -> None:
        """Remove an empty child. Not yet durable."""

    def rename(self, child: str, new_child: str) -> None:
        """Give a child a new name, which is free or that of an empty child."""

    def sync(self, child: str) -> None:
        """Make the names of a child's files durable."""

    def sync_children(self) -> None:
        """Make the names of all children durable."""


class Storage(Protocol):
    """Named files of one directory. All methods may be called from several threads.

    Names are plain file names without a slash. A method that fails raises StorageError
    with the errno of the operating system, and never retries what may have half happened.
    """

    @property
    def engine(self) -> str:
        """How bytes move: "io_uring", "libaio", "aiofiles" or "memory"."""

    @property
    def location(self) -> str:
        """Where the files are, for messages."""

    def home(self, name: str) -> Storage:
        """Return the storage of the one directory that a file of this name lies in."""

    def lock(self, timeout_s: float) -> None:
        """Become the directory's only user until close().

        Raises:
            RunLockedError: another process still holds it after ``timeout_s`` seconds.
        """

    def register(self, memory: memoryview) -> None:
        """Say that most transfers will use this memory, until the next call; empty: none.

        It only makes them cheaper, where the engine can. ``memory`` is writable and
        contiguous, and is kept alive until it is replaced or the storage is closed.
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

    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name; EEXIST where that is taken. Not yet durable."""

    def is_shared(self, name: str) -> bool:
        """Return whether a file has another name anywhere, or is mapped by somebody here.

        Writing into it would then change a published checkpoint, or what map() gave.
        """

    def map(self, name: str) -> memoryview:
        """Return the content of a file that is not empty as private memory.

        It is read when it is first touched. It is writable, but nothing reaches the file,
        and it stays what it is when another file takes the name; a write into this very
        file may show in it, see is_shared().
        """

    def scratch(self, nbytes: int) -> memoryview:
        """Return zeroed memory whose content the system may keep in the directory.

        It has one byte or more. The disk space is allocated now, under no name, and is
        given back with the memory.
        """

    def folder(self, path: str) -> Folder:
        """Return a directory on whatever holds this one, made if absent, to publish in."""

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
