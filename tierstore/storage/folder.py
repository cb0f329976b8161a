"""Folder on a filesystem."""

from __future__ import annotations

import os
from pathlib import Path

from typing_extensions import override

from tierstore.storage.base import Folder, Storage
from tierstore.storage.checks import check_name
from tierstore.storage.paths import (
    DIRECTORY_MODE,
    get_file,
    make_directory,
    opened,
    put_file,
    storage_errors,
    sync_path,
    write_all,
)


class LocalFolder(Folder):
    """A directory on a filesystem, made if absent.

    Raises:
        RunDirectoryError: it cannot be made, or is not a directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        make_directory(self._directory)

    @property
    @override
    def location(self) -> str:
        return str(self._directory)

    @override
    def children(self) -> list[str]:
        # A symbolic link is not a child.
        with storage_errors("list", self._directory), os.scandir(self._directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    @override
    def files(self, child: str) -> list[str]:
        with opened("list", self._path(child), os.O_RDONLY | os.O_DIRECTORY) as fd:
            return sorted(os.listdir(fd))

    @override
    def make(self, child: str) -> None:
        with storage_errors("make", self._path(child)) as path:
            os.mkdir(path, DIRECTORY_MODE)

    @override
    def put(self, child: str, name: str, data: bytes) -> None:
        put_file(self._path(child, name), data)

    @override
    def get(self, child: str, name: str) -> bytes:
        return get_file(self._path(child, name))

    @override
    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        source = Path(storage.home(name).location) / check_name(name)
        with storage_errors("link", source):
            os.link(source, self._path(child, new_name), follow_symlinks=False)

    @override
    def append(self, child: str, name: str, data: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with opened("append", self._path(child, name), flags) as fd:
            write_all(fd, data)

    @override
    def flush(self, child: str, name: str) -> None:
        with opened("flush", self._path(child, name), os.O_RDONLY) as fd:
            os.fsync(fd)

    @override
    def unlink(self, child: str, name: str) -> None:
        with storage_errors("unlink", self._path(child, name)) as path:
            os.unlink(path)

    @override
    def remove(self, child: str) -> None:
        with storage_errors("remove", self._path(child)) as path:
            os.rmdir(path)

    @override
    def rename(self, child: str, new_child: str) -> None:
        with storage_errors("rename", self._path(child)) as path:
            os.rename(path, self._path(new_child))

    @override
    def sync(self, child: str) -> None:
        with storage_errors("sync", self._path(child)) as path:
            sync_path(path)

    @override
    def sync_children(self) -> None:
        with storage_errors("sync", self._directory):
            sync_path(self._directory)

    def _path(self, child: str, *names: str) -> Path:
        return self._directory.joinpath(check_name(child), *map(check_name, names))
