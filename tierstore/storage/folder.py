"""A directory of published checkpoints on a filesystem."""

from __future__ import annotations

import os
from pathlib import Path

from tierstore.storage.base import Storage
from tierstore.storage.checks import check_name
from tierstore.storage.paths import (
    DIRECTORY_MODE,
    OPEN_FLAGS,
    get_file,
    make_directory,
    opened,
    put_file,
    storage_errors,
    sync_path,
    write_all,
)

# A file that a stranger left may say that it has any size, and have none of it.
_GET_BYTES_MAX = 2**30


class LocalFolder:
    """A directory on a filesystem, made where absent; see Folder.

    Raises:
        RunDirectoryError: it cannot be made, or is something else than a directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        make_directory(self._directory)

    @property
    def location(self) -> str:
        """The directory's absolute path."""
        return str(self._directory)

    def children(self) -> list[str]:
        """See Folder.children. Links are none."""
        with storage_errors("list", self._directory), os.scandir(self._directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def files(self, child: str) -> list[str]:
        """See Folder.files."""
        path = self._path(child)
        flags = os.O_RDONLY | os.O_DIRECTORY | OPEN_FLAGS
        with storage_errors("list", path), opened(path, flags) as fd:
            return sorted(os.listdir(fd))

    def make(self, child: str) -> None:
        """See Folder.make."""
        path = self._path(child)
        with storage_errors("make", path):
            os.mkdir(path, DIRECTORY_MODE)

    def put(self, child: str, name: str, data: bytes) -> None:
        """See Folder.put."""
        put_file(self._path(child, name), data)

    def get(self, child: str, name: str) -> bytes:
        """See Folder.get."""
        return get_file(self._path(child, name), _GET_BYTES_MAX)

    def link(self, storage: Storage, name: str, child: str, new_name: str) -> None:
        """See Folder.link."""
        path = Path(storage.home(name).location) / check_name(name)
        with storage_errors("link", path):
            os.link(path, self._path(child, new_name), follow_symlinks=False)

    def append(self, child: str, name: str, data: memoryview) -> None:
        """See Folder.append."""
        path = self._path(child, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | OPEN_FLAGS
        with storage_errors("append", path), opened(path, flags) as fd:
            write_all(fd, data)

    def flush(self, child: str, name: str) -> None:
        """See Folder.flush."""
        path = self._path(child, name)
        with storage_errors("flush", path), opened(path, os.O_RDONLY | OPEN_FLAGS) as fd:
            os.fsync(fd)

    def unlink(self, child: str, name: str) -> None:
        """See Folder.unlink."""
        path = self._path(child, name)
        with storage_errors("unlink", path):
            os.unlink(path)

    def remove(self, child: str) -> None:
        """See Folder.remove."""
        path = self._path(child)
        with storage_errors("remove", path):
            os.rmdir(path)

    def rename(self, child: str, new_child: str) -> None:
        """See Folder.rename."""
        path, new_path = self._path(child), self._path(new_child)
        with storage_errors("rename", path):
            os.rename(path, new_path)

    def sync(self, child: str) -> None:
        """See Folder.sync."""
        path = self._path(child)
        with storage_errors("sync", path):
            sync_path(path)

    def sync_children(self) -> None:
        """See Folder.sync_children."""
        with storage_errors("sync", self._directory):
            sync_path(self._directory)

    def _path(self, child: str, *names: str) -> Path:
        return self._directory.joinpath(check_name(child), *map(check_name, names))
