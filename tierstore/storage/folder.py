"""Folder on a filesystem."""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import override

from tierstore.storage.base import Folder, Storage
from tierstore.storage.checks import check_name, checked_bytes
from tierstore.storage.held_directory import HeldDirectory
from tierstore.storage.paths import (
    DIRECTORY_MODE,
    Entry,
    get_file,
    opened,
    put_file,
    read_from_disk,
    storage_error,
    storage_errors,
    sync_names,
    write_all,
)
from tierstore.units import Extent


class LinkableStorage(Storage):
    """A storage on a filesystem. A LocalFolder can link its files."""

    @abstractmethod
    def entry(self, name: str) -> Entry:
        """Return a file relative to the directory that the storage holds."""


class LocalFolder(Folder):
    """A directory on a filesystem, made if absent and held open until close().

    A child is never a symbolic link.

    Raises:
        RunDirectoryError: the directory cannot be made or opened, or is not a directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = HeldDirectory(directory)

    @property
    @override
    def location(self) -> str:
        return str(self._directory.path)

    @override
    def children(self) -> list[str]:
        with self._directory.scan() as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    @override
    def files(self, child: str) -> list[str]:
        with self._opened("list", child) as fd:
            return sorted(os.listdir(fd))

    @override
    def make(self, child: str) -> None:
        entry = self._child(child)
        with storage_errors("make", entry.path):
            os.mkdir(entry.name, DIRECTORY_MODE, dir_fd=entry.directory)

    @override
    def put(self, child: str, name: str, data: bytes) -> None:
        with self._file("put", child, name) as entry:
            put_file(entry, data)

    @override
    def get(self, child: str, name: str) -> bytes:
        with self._file("get", child, name) as entry:
            return get_file(entry)

    @override
    def read(self, child: str, name: str, offset: int, buffer: memoryview) -> int:
        extent = Extent(offset, buffer.nbytes)
        memory = checked_bytes(buffer, extent, written_to=True)
        with self._file("read", child, name) as entry:
            return read_from_disk(entry, extent, memory.data)

    @override
    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        home = storage.home(name)
        with self._file("link", child, new_name) as new:
            if not isinstance(home, LinkableStorage):
                raise storage_error("link", new.path, errno.EXDEV)
            old = home.entry(name)
            with storage_errors("link", old.path):
                os.link(
                    old.name,
                    new.name,
                    src_dir_fd=old.directory,
                    dst_dir_fd=new.directory,
                    follow_symlinks=False,
                )

    @override
    def append(self, child: str, name: str, data: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self._file("append", child, name) as entry, opened("append", entry, flags) as fd:
            write_all(fd, data)

    @override
    def flush(self, child: str, name: str) -> None:
        with self._file("flush", child, name) as entry, opened("flush", entry, os.O_RDONLY) as fd:
            os.fsync(fd)

    @override
    def unlink(self, child: str, name: str) -> None:
        with self._file("unlink", child, name) as entry:
            os.unlink(entry.name, dir_fd=entry.directory)

    @override
    def remove(self, child: str) -> None:
        entry = self._child(child)
        with storage_errors("remove", entry.path):
            os.rmdir(entry.name, dir_fd=entry.directory)

    @override
    def rename(self, child: str, new_child: str) -> None:
        old, new = self._child(child), self._child(new_child)
        with storage_errors("rename", old.path):
            os.rename(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory)

    @override
    def sync(self, child: str) -> None:
        with self._opened("sync", child) as fd:
            sync_names(Entry(self._directory.path / child, ".", fd))

    @override
    def sync_children(self) -> None:
        self._directory.sync()

    @override
    def close(self) -> None:
        self._directory.close()

    def _child(self, child: str) -> Entry:
        return self._directory.entry(check_name(child))

    @contextmanager
    def _opened(self, what: str, child: str) -> Iterator[int]:
        with opened(what, self._child(child), os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield fd

    @contextmanager
    def _file(self, what: str, child: str, name: str) -> Iterator[Entry]:
        """Keep a child open during the block; yield a file in it. Errors name the file."""
        folder = self._child(child)
        path = folder.path / check_name(name)
        # Open the child under the path of the file, so that errors name the file.
        folder = Entry(path, folder.name, folder.directory)
        with opened(what, folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            yield Entry(path, name, fd)
