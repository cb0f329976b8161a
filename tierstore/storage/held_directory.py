"""A directory that is held open. It stays the same, even if another one takes its place."""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from pathlib import Path

from tierstore.errors import CorruptionError, RunDirectoryError, StorageError, StoreClosedError
from tierstore.storage.paths import (
    FILE_MODE,
    OPEN_FLAGS,
    Entry,
    get_file,
    make_directory,
    opened,
    storage_errors,
    sync_names,
    unusable_directory,
)

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS})
"""Errors of a filesystem or a kernel that cannot make a file without a name."""

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


class HeldDirectory:
    """A directory and a descriptor of it. Files are opened relative to the descriptor.

    Forked children close their copies of the descriptor.

    Args:
        path: made with mode 0700 if absent. Symbolic links are followed.

    Raises:
        RunDirectoryError: the directory cannot be made or opened, or is not a directory.
    """

    def __init__(self, path: Path) -> None:
        self._fds: list[int] = []
        self.path = path.absolute()
        """The path by which it was opened."""
        make_directory(self.path)
        try:
            # An interrupt loses no descriptor, because C code adds it to the list.
            self._fds.extend(map(os.open, [self.path], [_OPEN_FLAGS]))
        except OSError as error:
            raise unusable_directory(self.path, error) from error
        _held.add(self)

    def __del__(self) -> None:
        if hasattr(self, "_fds"):  # False after an early interrupt.
            self.close()

    @property
    def fd(self) -> int:
        """The descriptor.

        Raises:
            StoreClosedError: close() was called.
        """
        try:
            return self._fds[0]
        except IndexError:
            raise StoreClosedError(f"the directory {self.path} was closed") from None

    def entry(self, name: str) -> Entry:
        """Return a file or a directory in this directory."""
        return Entry(self.path / name, name, self.fd)

    def open_all(self, fds: list[int], names: Sequence[str], flags: int) -> None:
        """Open files and add their descriptors to a list, up to the first error.

        Raises:
            OSError: the next file in ``names`` cannot be opened.
        """
        # An interrupt loses no descriptor, because C code adds it to the list.
        fds.extend(map(partial(os.open, dir_fd=self.fd), names, repeat(flags)))

    @contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Yield the entries of the directory in any order. Errors are StorageErrors."""
        # Open it again: scans of one open file would share its position.
        with opened("list", self._itself, _OPEN_FLAGS) as fd, os.scandir(fd) as entries:
            yield entries

    def sync(self) -> None:
        """Make the names in the directory durable."""
        with storage_errors("sync directory", self.path):
            sync_names(self._itself)

    @contextmanager
    def nameless_file(self) -> Iterator[int]:
        """Keep a new file without a name open during the block; yield its descriptor.

        Raises:
            OSError: the disk refuses.
        """
        flags = os.O_RDWR | os.O_EXCL | OPEN_FLAGS
        try:
            fd = os.open(".", flags | os.O_TMPFILE, FILE_MODE, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            name = f"scratch-{secrets.token_hex(8)}.tmp"
            fd = os.open(name, flags | os.O_CREAT, FILE_MODE, dir_fd=self.fd)
        else:
            name = ""
        try:
            if name:
                os.unlink(name, dir_fd=self.fd)
            yield fd
        finally:
            os.close(fd)

    def require_in_place(self, name: str) -> None:
        """Raise unless the path still leads to this directory.

        Args:
            name: a file whose content no other directory has. It is compared if the path leads to
                another inode, because overlayfs and NFS may renumber a directory.

        Raises:
            RunDirectoryError: the path is absent, or leads to another directory.
            StorageError: the disk does not answer.
        """
        with storage_errors("look for", self.path):
            try:
                same = os.path.samestat(os.stat(self.path), os.fstat(self.fd))
                found = "another directory"
            except (FileNotFoundError, NotADirectoryError):
                same, found = False, "nothing"
        if not same and not self._has_same(name):
            raise RunDirectoryError(
                f"{self.path}: {found} is there now. The directory of the run was moved, removed "
                f"or replaced while a store used it. No further step is committed. {self._steps()}"
            )

    def close(self) -> None:
        """Close the descriptor. May be called again.

        Raises:
            StorageError: the system reports an error. The descriptor is closed in any case.
        """
        while self._fds:
            with storage_errors("close", self.path):
                # An interrupt loses no descriptor, because C code removes it from the list.
                next(map(os.close, map(self._fds.pop, [-1])))

    @property
    def _itself(self) -> Entry:
        return Entry(self.path, ".", self.fd)

    def _has_same(self, name: str) -> bool:
        """Return whether the path leads to the same file as the held directory."""
        try:
            found = get_file(Entry.of(self.path / name))
        except CorruptionError:  # The file is longer than any such file.
            return False
        except StorageError as error:
            if error.errno in _ABSENT:
                return False
            raise
        return found == get_file(self.entry(name))

    def _steps(self) -> str:
        """Return text that says where the steps of the run are and what to do."""
        place = "the directory that was moved"
        with suppress(OSError):  # No /proc here.
            if os.fstat(self.fd).st_nlink == 0:
                return (
                    "It was removed together with its steps: begin a new run, with "
                    "restore(checkpoint=PATH) if you have a checkpoint"
                )
            place = os.readlink(f"/proc/self/fd/{self.fd}")
        return (
            f"Its committed steps are in {place}; move the directory back and call restore(), or "
            "open it there with resume=True"
        )


_held: weakref.WeakSet[HeldDirectory] = weakref.WeakSet()


def _close_in_child() -> None:
    for directory in list(_held):
        directory.close()


os.register_at_fork(after_in_child=_close_in_child)
