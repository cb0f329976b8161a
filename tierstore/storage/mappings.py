"""Which files are mapped by somebody in this process, or in one that was forked from it."""

from __future__ import annotations

import mmap
import os
import threading
import weakref

_PRUNE_MIN = 64


class Mappings:
    """Memory over files, by inode, for as long as somebody uses it. For several threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._memory_of: dict[int, weakref.WeakSet[mmap.mmap]] = {}
        self._forked: set[int] = set()
        self._prune_at = _PRUNE_MIN
        _all.add(self)

    def add(self, inode: int, memory: mmap.mmap) -> None:
        """Note that a file was mapped."""
        with self._mutex:
            if len(self._memory_of) >= self._prune_at:
                used = {inode: kept for inode, kept in self._memory_of.items() if kept}
                self._memory_of, self._prune_at = used, 2 * len(used) + _PRUNE_MIN
            self._memory_of.setdefault(inode, weakref.WeakSet()).add(memory)

    def has(self, inode: int) -> bool:
        """Return whether memory over a file may still be used."""
        with self._mutex:
            return inode in self._forked or bool(self._memory_of.get(inode))

    def keep_for_children(self) -> None:
        """Count what is mapped now as used for good: a child has it, and tells nobody."""
        self._forked.update(inode for inode, kept in list(self._memory_of.items()) if kept)


_all: weakref.WeakSet[Mappings] = weakref.WeakSet()


def _keep_for_children() -> None:
    for mappings in list(_all):
        mappings.keep_for_children()


os.register_at_fork(before=_keep_for_children)
