"""One storage over several directories, with page files striped over them.

All other files are in the first directory. Each directory has a striping file, which list() omits.
"""

from __future__ import annotations

import builtins
import errno
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from tierstore.errors import StorageError
from tierstore.run.file_names import IDENTITY_NAME, STRIPING_NAME, manifest_revision, page_number
from tierstore.run.striping import NamedDirectory, Striping, match, stripe, weights_of
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.units import Extent

_log = logging.getLogger("tierstore")

_TEMPORARY_NAME = f"{STRIPING_NAME}.tmp"

Measure = Callable[[Sequence[Storage]], Sequence[float]]
"""Gives the bytes per second of each of some storages."""


class StripedStorage:
    """A storage over several others, its *parts*, each of one directory.

    Parts with a striping are taken in its order, whatever the order given. Other parts are
    measured, and striped when the first file is created.

    Args:
        parts: open storages; closed with this one. In a new striping the first of them gets all
            files but pages.
        measure: measured_bandwidths() or alike; called with the parts of a new striping.
        overwrite: treat everything in the parts as files to be removed: all of them are listed,
            and must be gone before the first file is created.
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
    def engine(self) -> str:
        """Those of the parts, each once."""
        return ", ".join(dict.fromkeys(part.engine for part in self._parts))

    @property
    def location(self) -> str:
        """That of the first part."""
        return self._parts[0].location

    def home(self, name: str) -> Storage:
        """See Storage.home: that of one of the parts."""
        return self._part(name).home(name)

    def register(self, memory: memoryview) -> None:
        """See Storage.register: in all directories."""
        for part in self._parts:
            part.register(memory)

    def lock(self, timeout_s: float) -> None:
        """See Storage.lock: of all directories, within the one timeout.

        Raises:
            RunDirectoryError: they are not those of one striping.
        """
        deadline = time.monotonic() + timeout_s
        for part in self._parts:
            part.lock(max(0.0, deadline - time.monotonic()))
        self._find()

    def list(self) -> builtins.list[str]:
        """See Storage.list. Pages where the striping does not have them are not listed."""
        self._find()
        return sorted(
            {
                name
                for part in self._parts
                for name in part.list()
                if name not in (STRIPING_NAME, _TEMPORARY_NAME)
                if not self._round or self._part(name) is part
            }
        )

    def size(self, name: str) -> int:
        """See Storage.size."""
        return self._found(name).size(name)

    def create(self, name: str, nbytes: int) -> None:
        """See Storage.create."""
        self._begin()
        self._found(name).create(name, nbytes)

    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.read."""
        return self._found(name).read(name, extent, buffer)

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """See Storage.write."""
        return self._found(name).write(name, extent, buffer)

    def flush(self, names: Sequence[str]) -> None:
        """See Storage.flush: of all directories at once."""
        by_part: dict[Storage, builtins.list[str]] = {}
        for name in names:
            by_part.setdefault(self._found(name), []).append(name)
        self._together([partial(part.flush, own) for part, own in by_part.items()])

    def put(self, name: str, data: bytes) -> None:
        """See Storage.put."""
        self._begin()
        self._found(name).put(name, data)

    def get(self, name: str) -> bytes:
        """See Storage.get."""
        return self._found(name).get(name)

    def rename(self, name: str, new_name: str) -> None:
        """See Storage.rename; EXDEV where the names are not of one directory."""
        self._found_both("rename", name, new_name).rename(name, new_name)

    def link(self, name: str, new_name: str) -> None:
        """See Storage.link; EXDEV where the names are not of one directory."""
        self._found_both("link", name, new_name).link(name, new_name)

    def is_shared(self, name: str) -> bool:
        """See Storage.is_shared."""
        return self._found(name).is_shared(name)

    def map(self, name: str) -> memoryview:
        """See Storage.map."""
        return self._found(name).map(name)

    def scratch(self, nbytes: int) -> memoryview:
        """See Storage.scratch: in the first directory."""
        return self._parts[0].scratch(nbytes)

    def folder(self, path: str) -> Folder:
        """See Storage.folder."""
        return self._parts[0].folder(path)

    def unlink(self, name: str) -> None:
        """See Storage.unlink. Before the parts are striped, in all that have the file."""
        parts = [self._found(name)]
        if not self._round:
            parts = [part for part in self._parts if name in part.list()] or parts
        for part in parts:
            part.unlink(name)

    def sync_directory(self) -> None:
        """See Storage.sync_directory. The first is last: its names tell of files in the others."""
        self._together([part.sync_directory for part in self._parts[1:]])
        self._parts[0].sync_directory()

    def drain(self) -> None:
        """See Storage.drain."""
        self._in_each(lambda part: part.drain())

    def abandon(self) -> None:
        """See Storage.abandon."""
        self._in_each(lambda part: part.abandon())

    def close(self) -> None:
        """See Storage.close."""
        self._in_each(lambda part: part.close())

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make some calls at the same time; raise what the first of them raised, after all."""
        if len(calls) == 1:
            calls[0]()
        elif calls:
            with ThreadPoolExecutor(len(calls)) as executor:
                made = [executor.submit(call) for call in calls]
            for call in made:
                call.result()

    def _in_each(self, call: Callable[[Storage], None]) -> None:
        """Reach every part, from the last to the first, even if one raises."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(call, part)

    def _part(self, name: str) -> Storage:
        number = page_number(name)
        if number is None or not self._round:
            return self._parts[0]
        return self._parts[self._round[number % len(self._round)]]

    def _found(self, name: str) -> Storage:
        """Return the part that a file lies in; requires a striping."""
        self._find()
        return self._part(name)

    def _found_both(self, what: str, name: str, new_name: str) -> Storage:
        part, new_part = self._found(name), self._found(new_name)
        if part is not new_part:
            raise StorageError(what, path=f"{new_part.location}/{new_name}", errno=errno.EXDEV)
        return part

    def _find(self) -> None:
        """Take the striping that the parts have, if they have one."""
        if self._round or self._overwrite:
            return
        with self._mutex:
            if self._round:
                return
            found = {part: _striping_of(part) for part in self._parts}
            striping = match(
                [
                    NamedDirectory(location=part.location, striping=of_part, has_run=_has_run(part))
                    for part, of_part in found.items()
                ]
            )
            if striping is None:
                return
            index_of = {part: of_part.index for part, of_part in found.items() if of_part}
            self._parts = sorted(self._parts, key=lambda part: index_of[part])
            directories = tuple(part.location for part in self._parts)
            for index, part in enumerate(self._parts):
                of_part = found[part]
                if of_part is not None and of_part.directories != directories:
                    self._write(part, index, striping.striping_id, striping.weights)
            self._round = stripe(striping.weights)

    def _begin(self) -> None:
        """Stripe the parts, unless they are striped already."""
        self._find()
        if self._round:
            return
        with self._mutex:
            if self._round:
                return
            # In a first directory, a file without a run tells that it is of no use.
            for part in reversed(self._parts):
                assert not _has_run(part), f"{part.location} was to be empty"
                for name in {STRIPING_NAME, _TEMPORARY_NAME} & set(part.list()):
                    part.unlink(name)
                part.sync_directory()
            if len(self._parts) == 1:
                self._round = (0,)
                return
            weights = weights_of(self._measure(self._parts))
            striping_id = secrets.token_hex(16)
            for index, part in enumerate(self._parts):
                self._write(part, index, striping_id, weights)
            self._round = stripe(weights)
        for part, weight in zip(self._parts, weights, strict=True):
            share = weight / sum(weights)
            _log.info(
                "%s: gets %.0f%% of the pages, at %d MB/s", part.location, 100 * share, weight
            )

    def _write(self, part: Storage, index: int, striping_id: str, weights: tuple[int, ...]) -> None:
        striping = Striping(
            striping_id=striping_id,
            index=index,
            directories=tuple(part.location for part in self._parts),
            weights=weights,
        )
        part.put(_TEMPORARY_NAME, striping.to_bytes())
        part.rename(_TEMPORARY_NAME, STRIPING_NAME)
        part.sync_directory()


def _striping_of(part: Storage) -> Striping | None:
    if STRIPING_NAME not in part.list():
        return None
    return Striping.from_bytes(part.get(STRIPING_NAME), f"{part.location}/{STRIPING_NAME}")


def _has_run(part: Storage) -> bool:
    return any(
        name == IDENTITY_NAME or manifest_revision(name) or page_number(name) is not None
        for name in part.list()
    )
