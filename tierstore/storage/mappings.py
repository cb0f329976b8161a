"""Register of the files that are mapped in this process, or in processes forked from it.

All storages share this register: memory outlives the storage that mapped it, and another storage of
the same directory must not write to a mapped file.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref

_PRUNE_MIN = 64

_File = tuple[int, int]
"""Device and inode. They are the same under any name, as long as the file exists."""


class Mappings:
    """Memory over files, as long as it is referenced. Several threads may use it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._memory: dict[_File, weakref.WeakSet[mmap.mmap]] = {}
        self._forked: set[_File] = set()
        self._prune_at = _PRUNE_MIN

    def add(self, status: os.stat_result, memory: mmap.mmap) -> None:
        """Register memory over a file."""
        with self._mutex:
            if len(self._memory) >= self._prune_at:
                used = {file: maps for file, maps in self._memory.items() if maps}
                self._memory, self._prune_at = used, 2 * len(used) + _PRUNE_MIN
            self._memory.setdefault(_file(status), weakref.WeakSet()).add(memory)

    def has(self, status: os.stat_result) -> bool:
        """Return whether memory over a file may still be in use."""
        with self._mutex:
            return _file(status) in self._forked or bool(self._memory.get(_file(status)))

    def forget(self, status: os.stat_result) -> None:
        """Unregister the inode number of a removed file. A fresh file now has this number."""
        with self._mutex:
            self._forked.discard(_file(status))

    def keep_for_children(self) -> None:
        """Mark all current mappings as in use forever: a child's use is invisible here."""
        self._forked.update(file for file, maps in list(self._memory.items()) if maps)

    def begin_child(self) -> None:
        """Replace the mutex in a forked child: a thread of the parent may have held it."""
        self._mutex = threading.Lock()


def _file(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


mappings = Mappings()
"""The register of this process."""

os.register_at_fork(before=mappings.keep_for_children, after_in_child=mappings.begin_child)
