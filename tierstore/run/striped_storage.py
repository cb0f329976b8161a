"""One storage over several directories, with page files striped over them.

All other files are in the first directory. Each directory has a striping file, which list() omits.
"""

from __future__ import annotations

import builtins
import dataclasses
import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from typing_extensions import override

from tierstore.errors import StorageError
from tierstore.run.committer import write_durably
from tierstore.run.file_names import IDENTITY_NAME, STRIPING_NAME, manifest_revision, page_number
from tierstore.run.striping import NamedDirectory, Striping, match, stripe, weights_of
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.threads import at_once
from tierstore.units import Extent

_log = logging.getLogger("tierstore")

_STRIPING_FILES = {STRIPING_NAME, f"{STRIPING_NAME}.tmp"}

Measure = Callable[[Sequence[Storage]], Sequence[float]]
"""Storages -> the bytes per second of each storage."""


class StripedStorage(Storage):
    """A storage over several storages, its *parts*. Each part is the storage of one directory.

    Parts that have a striping are used in the order of the striping. Other parts are measured, and
    striped when the first file is created. rename() and link() raise EXDEV if the names belong to
    different directories.

    Args:
        parts: open storages, in any order; closed with this storage. In a new striping, the first
            part gets all files except pages.
        measure: such as measured_bandwidths(); called with the parts of a new striping.
        overwrite: treat all files in the parts as files to remove: list() returns all of them, and
            the caller removes them before it creates the first file.
    """

    def __init__(
        self, parts: Sequence[Storage], measure: Measure, *, overwrite: bool = False
    ) -> None:
        self._parts = list(parts)
        self._measure = measure
        self._overwrite = overwrite
        self._round: tuple[int, ...] = ()  # Empty until the parts are striped.
        self._mutex = threading.RLock()

    @property
    @override
    def engine(self) -> str:
        return ", ".join(dict.fromkeys(part.engine for part in self._parts))

    @property
    @override
    def location(self) -> str:
        return self._parts[0].location

    @override
    def home(self, name: str) -> Storage:
        return self._part(name).home(name)

    @override
    def register(self, memory: memoryview) -> None:
        for part in self._parts:
            part.register(memory)

    @override
    def lock(self, timeout_s: float) -> None:
        # The timeout is for all directories together. _find() refuses parts of several stripings.
        deadline = time.monotonic() + timeout_s
        for part in self._parts:
            part.lock(max(0.0, deadline - time.monotonic()))
        self._find()

    @override
    def require_in_place(self, name: str) -> None:
        first, *others = self._parts
        first.require_in_place(name)
        for part in others:
            part.require_in_place(STRIPING_NAME)

    @override
    def list(self) -> builtins.list[str]:
        # Do not list a page in a part that is not the striping's part of this page.
        self._find()
        return sorted(
            {
                name
                for part in self._parts
                for name in part.list()
                if name not in _STRIPING_FILES
                if not self._round or self._part(name) is part
            }
        )

    @override
    def size(self, name: str) -> int:
        return self._found(name).size(name)

    @override
    def create(self, name: str, nbytes: int) -> None:
        self._begin()
        self._found(name).create(name, nbytes)

    @override
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._found(name).read(name, extent, buffer)

    @override
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._found(name).write(name, extent, buffer)

    @override
    def flush(self, names: Sequence[str]) -> None:
        by_part: dict[Storage, builtins.list[str]] = {}
        for name in names:
            by_part.setdefault(self._found(name), []).append(name)
        self._together([partial(part.flush, own) for part, own in by_part.items()])

    @override
    def put(self, name: str, data: bytes) -> None:
        self._begin()
        self._found(name).put(name, data)

    @override
    def get(self, name: str) -> bytes:
        return self._found(name).get(name)

    @override
    def rename(self, name: str, new_name: str) -> None:
        self._found_both("rename", name, new_name).rename(name, new_name)

    @override
    def link(self, name: str, new_name: str) -> None:
        self._found_both("link", name, new_name).link(name, new_name)

    @override
    def is_shared(self, name: str) -> bool:
        return self._found(name).is_shared(name)

    @override
    def map(self, name: str) -> memoryview:
        return self._found(name).map(name)

    @override
    def scratch(self, nbytes: int) -> memoryview:
        return self._parts[0].scratch(nbytes)

    @override
    def folder(self, path: str) -> Folder:
        return self._parts[0].folder(path)

    @override
    def unlink(self, name: str) -> None:
        # Before striping, several parts may have the file.
        parts = [self._found(name)]
        if not self._round:
            parts = [part for part in self._parts if name in part.list()] or parts
        for part in parts:
            part.unlink(name)

    @override
    def sync_directory(self) -> None:
        # The first directory is last: its files name files in the other directories.
        self._together([part.sync_directory for part in self._parts[1:]])
        self._parts[0].sync_directory()

    @override
    def drain(self) -> None:
        self._in_each(lambda part: part.drain())

    @override
    def abandon(self) -> None:
        self._in_each(lambda part: part.abandon())

    @override
    def close(self) -> None:
        self._in_each(lambda part: part.close())

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls in parallel. After all have ended, raise the error of the first failed call.

        Raises:
            ThreadError: the system starts no further thread. No call was made.
        """
        if len(calls) == 1:
            calls[0]()
        elif calls:
            at_once(calls, "tierstore-disks")

    def _in_each(self, call: Callable[[Storage], None]) -> None:
        """Call every part, from the last to the first, even if a call raises."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(call, part)

    def _part(self, name: str) -> Storage:
        number = page_number(name)
        if number is None or not self._round:
            return self._parts[0]
        return self._parts[self._round[number % len(self._round)]]

    def _found(self, name: str) -> Storage:
        """Return the part that has a file, after looking for a striping."""
        self._find()
        return self._part(name)

    def _found_both(self, what: str, name: str, new_name: str) -> Storage:
        part, new_part = self._found(name), self._found(new_name)
        if part is not new_part:
            raise StorageError(what, path=f"{new_part.location}/{new_name}", errno=errno.EXDEV)
        return part

    def _find(self) -> None:
        """Use the striping of the parts, if they have one.

        Raises:
            RunDirectoryError: the parts are not the directories of one striping.
        """
        if self._round or self._overwrite:
            return
        with self._mutex:
            if self._round:
                return
            found = {part: striping for part in self._parts if (striping := _striping_in(part))}
            named = [
                NamedDirectory(
                    location=part.location, striping=found.get(part), has_run=_has_run(part)
                )
                for part in self._parts
            ]
            striping = match(named)
            if striping is None:
                return
            self._parts = sorted(self._parts, key=lambda part: found[part].index)
            directories = tuple(part.location for part in self._parts)
            for part in self._parts:
                if found[part].directories != directories:
                    moved = dataclasses.replace(found[part], directories=directories)
                    write_durably(part, STRIPING_NAME, moved.to_bytes())
            self._round = stripe(striping.weights)

    def _begin(self) -> None:
        """Stripe the parts, unless they are striped already."""
        self._find()
        if self._round:
            return
        with self._mutex:
            if self._round:
                return
            # Write the first part last: a striping file there, without a run, marks the other
            # striping files as unused.
            for part in reversed(self._parts):
                assert not _has_run(part), f"{part.location} was to be empty"
                for name in _STRIPING_FILES & set(part.list()):
                    part.unlink(name)
                part.sync_directory()
            if len(self._parts) == 1:
                self._round = (0,)
                return
            weights = weights_of(self._measure(self._parts))
            first = Striping(
                striping_id=secrets.token_hex(16),
                index=0,
                directories=tuple(part.location for part in self._parts),
                weights=weights,
            )
            for index, part in enumerate(self._parts):
                data = dataclasses.replace(first, index=index).to_bytes()
                write_durably(part, STRIPING_NAME, data)
            self._round = stripe(weights)
        for part, weight in zip(self._parts, weights, strict=True):
            percent = 100 * weight / sum(weights)
            _log.info("%s: gets %.0f%% of the pages, at %d MB/s", part.location, percent, weight)


def _striping_in(part: Storage) -> Striping | None:
    if STRIPING_NAME not in part.list():
        return None
    return Striping.from_bytes(part.get(STRIPING_NAME), f"{part.location}/{STRIPING_NAME}")


def _has_run(part: Storage) -> bool:
    return any(
        name == IDENTITY_NAME or manifest_revision(name) or page_number(name) is not None
        for name in part.list()
    )
