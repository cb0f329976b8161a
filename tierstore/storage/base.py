"""Storage protocol: named files of one directory, with asynchronous reads and writes.

A storage does not know the meaning of the bytes. Operations that a crash could separate are
separate methods: a simulator can then drop or reorder everything that is not yet durable.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from tierstore.units import Extent


class Transfer(Protocol):
    """One read or write in flight. Keeps its buffer alive until it has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the transfer has ended. May be called again, and by several threads.

        Raises:
            StorageError: not all bytes moved. Every call raises the same error.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once. Never blocks."""


class Folder(Protocol):
    """A directory whose children are directories of plain files, for publishing.

    Until close() it refers to the same directory, even if another one takes its place. Used by one
    thread. Names and errors are as in Storage.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """Path of the directory, for messages."""

    @abstractmethod
    def children(self) -> list[str]:
        """Return the names of all children, sorted."""

    @abstractmethod
    def files(self, child: str) -> list[str]:
        """Return all names in a child, sorted; ENOTDIR if the child is not a directory."""

    @abstractmethod
    def make(self, child: str) -> None:
        """Make an empty child; EEXIST if the name is taken."""

    @abstractmethod
    def put(self, child: str, name: str, data: bytes) -> None:
        """Make a file with content ``data``. The data is durable; the name is durable after sync().

        A fresh file (a new inode) replaces an existing one. EFBIG if ``data`` has more than
        WHOLE_FILE_BYTES_MAX bytes.
        """

    @abstractmethod
    def get(self, child: str, name: str) -> bytes:
        """Return the whole content of a small file.

        Raises:
            CorruptionError: the file has more than WHOLE_FILE_BYTES_MAX bytes.
        """

    @abstractmethod
    def read(self, child: str, name: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from a file; return the number of bytes, fewer only if the file ends.

        If the filesystem can bypass its cache, the bytes come from the disk.

        Args:
            child: the child.
            name: the file.
            offset: first byte in the file, a multiple of SECTOR_BYTES.
            buffer: as in Storage.read().
        """

    @abstractmethod
    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        """Give a file of a storage a second name in a child. Durable after sync().

        EXDEV if storage and folder are on different filesystems; EPERM, EMLINK or EOPNOTSUPP
        if the filesystem does not allow the link.
        """

    @abstractmethod
    def append(self, child: str, name: str, data: memoryview) -> None:
        """Append to a file, made if absent. Durable after flush() and sync()."""

    @abstractmethod
    def flush(self, child: str, name: str) -> None:
        """Make the data of a file durable."""

    @abstractmethod
    def unlink(self, child: str, name: str) -> None:
        """Remove a file. Not yet durable."""

    @abstractmethod
    def remove(self, child: str) -> None:
        """Remove an empty child. Not yet durable."""

    @abstractmethod
    def rename(self, child: str, new_child: str) -> None:
        """Rename a child; the new name must be free or name an empty child."""

    @abstractmethod
    def sync(self, child: str) -> None:
        """Make the names of a child's files durable."""

    @abstractmethod
    def sync_children(self) -> None:
        """Make the names of all children durable."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. No other method is called afterwards. May be called again."""


class Storage(Protocol):
    """Named files of one directory. All methods may be called from several threads.

    Names are plain file names without a slash. A method that fails raises StorageError
    with the errno of the operating system, and never retries an operation that may have
    happened in part. Until close() the directory stays the same, even if another takes its place.
    """

    @property
    @abstractmethod
    def engine(self) -> str:
        """Name of the engine: "io_uring", "libaio", "aiofiles" or "memory"."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Path of the directory, for messages."""

    def home(self, name: str) -> Storage:
        """Return the storage of the single directory that holds a file of this name."""
        return self

    @abstractmethod
    def lock(self, timeout_s: float) -> None:
        """Become the directory's only user until close().

        Raises:
            RunLockedError: another process still holds the lock after ``timeout_s`` seconds.
        """

    @abstractmethod
    def require_in_place(self, name: str) -> None:
        """Raise unless the location still leads to this directory.

        Args:
            name: a file whose content no other directory has. Read only if the directory seems to
                be another one.

        Raises:
            RunDirectoryError: the directory was moved, removed or replaced. The files are in the
                moved directory.
        """

    @abstractmethod
    def register(self, memory: memoryview) -> None:
        """Announce the memory that most transfers will use. Empty memory ends the registration.

        If the engine supports registration, transfers become cheaper. Nothing else changes.
        ``memory`` is writable and contiguous, and is kept alive until the next call or close().
        """

    @abstractmethod
    def list(self) -> list[str]:
        """Return the names of all files, sorted."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return a file's length in bytes."""

    @abstractmethod
    def create(self, name: str, nbytes: int) -> None:
        """Make a file of ``nbytes`` zero bytes with its disk space allocated.

        A fresh file (a new inode) replaces an existing one. The name is durable only after
        sync_directory().
        """

    @abstractmethod
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """Start reading ``extent`` of a file into ``buffer``.

        ``buffer`` is writable, contiguous, ``extent.nbytes`` long and starts at a
        multiple of SECTOR_BYTES in memory; ValueError otherwise.
        """

    @abstractmethod
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """Start writing ``buffer`` over ``extent`` of an existing file; ``buffer`` as in read().

        The data is durable only after flush().
        """

    @abstractmethod
    def flush(self, names: Sequence[str]) -> None:
        """Make the data of all these files durable."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Make a small file with content ``data``. The data is durable; the name is not yet.

        A fresh file (a new inode) replaces an existing one. If put() fails, the old file is lost:
        if its content must survive a crash, write under a temporary name and rename(). If ``data``
        has more than WHOLE_FILE_BYTES_MAX bytes, which get() would refuse, EFBIG is raised and the
        old file is unchanged.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the whole content of a small file.

        Raises:
            CorruptionError: the file has more than WHOLE_FILE_BYTES_MAX bytes.
        """

    @abstractmethod
    def rename(self, name: str, new_name: str) -> None:
        """Rename a file. Replaces a file called ``new_name``. Not yet durable."""

    @abstractmethod
    def link(self, name: str, new_name: str) -> None:
        """Give a file a second name; EEXIST if the name is taken. Not yet durable."""

    @abstractmethod
    def is_shared(self, name: str) -> bool:
        """Return whether a file has another name anywhere, or is mapped in this process.

        A write to a shared file changes the file for its other users.
        """

    @abstractmethod
    def map(self, name: str) -> memoryview:
        """Return the content of a file that is not empty as private memory.

        The file is read when the memory is first touched. The memory is writable, but writes do
        not reach the file. The memory keeps its content when another file takes the name. A write
        to this file itself may change the memory, see is_shared().
        """

    @abstractmethod
    def scratch(self, nbytes: int) -> memoryview:
        """Return zeroed memory whose content the system may keep in the directory.

        ``nbytes`` is at least 1. The disk space is allocated now, under no name, and is freed with
        the memory.
        """

    @abstractmethod
    def folder(self, path: str) -> Folder:
        """Return a directory on the same medium, made if absent, to publish in."""

    @abstractmethod
    def unlink(self, name: str) -> None:
        """Remove a file. Not yet durable."""

    @abstractmethod
    def sync_directory(self) -> None:
        """Make all names durable: every creation, renaming and removal until now."""

    @abstractmethod
    def drain(self) -> None:
        """Block until every transfer started so far has ended, successfully or not.

        For a caller that was interrupted after the start of a transfer and before it kept the
        transfer.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Drop every descriptor in a forked child. Changes no file and no lock."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all transfers, then release everything. May be called again."""
