"""Which files are mapped by somebody in this process, or in one that was forked from it.

There is one register for all storages, because memory outlives the storage that gave it:
another storage of the same directory must not write what is mapped.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref

_PRUNE_MIN = 64

_File = tuple[int, int]
"""Device and inode: what stays the same under any name, for as long as the file exists."""


class Mappings:
    """Memory over files, for as long as somebody uses it. For several threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._memory_of: dict[_File, weakref.WeakSet[mmap.mmap]] = {}
        self._forked: set[_File] = set()
        self._prune_at = _PRUNE_MIN

    def add(self, status: os.stat_result, memory: mmap.mmap) -> None:
        """Note that a file was mapped."""
        with self._mutex:
            if len(self._memory_of) >= self._prune_at:
                used = {file: kept for file, kept in self._memory_of.items() if kept}
                self._memory_of, self._prune_at = used, 2 * len(used) + _PRUNE_MIN
            self._memory_of.setdefault(_file(status), weakref.WeakSet()).add(memory)

    def has(self, status: os.stat_result) -> bool:
        """Return whether memory over a file may still be used."""
        with self._mutex:
            return _file(status) in self._forked or bool(self._memory_of.get(_file(status)))

    def forget(self, status: os.stat_result) -> None:
        """Note that a file is a fresh one, which has the number of one that is gone."""
        with self._mutex:
            self._forked.discard(_file(status))

    def keep_for_children(self) -> None:
        """Count what is mapped now as used for good: a child has it, and tells nobody."""
        self._forked.update(file for file, kept in list(self._memory_of.items()) if kept)

    def begin_child(self) -> None:
        """Replace the lock in a forked child: a thread that is not there may have held it."""
        self._mutex = threading.Lock()


def _file(status: os.stat_result) -> _File:
    return status.st_dev, status.st_ino


mappings = Mappings()
"""Those of this process."""

os.register_at_fork(before=mappings.keep_for_children, after_in_child=mappings.begin_child)
