"""Fault injection: a storage that wraps any storage and fails on command.

Without an armed fault the inner storage alone decides. Random choices depend on the seed only,
so that a failing test can be repeated::

    storage = FaultyStorage(MemoryStorage(), seed=7)
    storage.arm(Fault("error", "write", call=3, errno=errno.ENOSPC))
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from errno import EIO
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from typing_extensions import override

from tierstore.errors import TierstoreError
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.storage.paths import storage_error
from tierstore.units import SECTOR_BYTES, Extent

FaultKind = Literal["error", "short", "flipped_bit", "lost", "misdirected", "delayed"]

# Methods of Storage and Folder that no fault strikes.
_NOT_STRUCK = frozenset({"engine", "location", "home", "register", "drain", "abandon"})
OPERATIONS = tuple(
    prefix + name
    for prefix, protocol in (("", Storage), ("folder_", Folder))
    for name in vars(protocol)
    if name[0] != "_" and name not in _NOT_STRUCK
)
"""The operations that a fault can strike: the methods of Storage, and with the prefix "folder_"
the methods of Folder."""

OnOperation = Callable[[str, str, str], None]

# Kinds that are absent here apply to every operation.
_OPERATIONS_OF_KIND: dict[FaultKind, tuple[str, ...]] = {
    "short": ("read", "write"),
    "flipped_bit": ("read",),
    "lost": ("write",),
    "misdirected": ("write",),
    "delayed": ("read", "write"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """A kind of failure, and the calls that the failure strikes.

    Raises:
        ValueError: the kind does not apply to the operation; ``call`` and ``probability``
            are both given or both absent, or out of range; ``release`` is not given with
            ``delayed``, or with another kind.
    """

    kind: FaultKind
    """``error``: nothing happens, StorageError. ``short``: a prefix of whole sectors moves,
    then StorageError. ``flipped_bit``: a read succeeds with one bit wrong. ``lost``: a write
    is reported as done and the old content stays. ``misdirected``: a write lands one sector
    late, cut at the file's end. ``delayed``: a transfer moves its bytes, and ends, only
    at the first done(), wait(), drain() or close() after ``release`` is set."""
    operation: str
    """One of OPERATIONS."""
    _: KW_ONLY
    name: str | None = None
    """Strike calls for this file only (flush: if the file is one of them); None for any file."""
    call: int | None = None
    """Strike only this call, counted from 1 after the fault is armed."""
    probability: float | None = None
    """Strike every call with this probability while the fault is armed."""
    errno: int = EIO
    """errno of the StorageError of ``error`` and ``short``."""
    release: threading.Event | None = None
    """Set to let a ``delayed`` transfer happen."""

    def __post_init__(self) -> None:
        if self.operation not in _OPERATIONS_OF_KIND.get(self.kind, OPERATIONS):
            raise ValueError(f"a fault {self.kind!r} does not apply to {self.operation!r}")
        if (self.call is None) == (self.probability is None):
            raise ValueError("give either call or probability")
        if self.call is not None and self.call < 1:
            raise ValueError(f"calls are counted from 1, got {self.call}")
        if self.probability is not None and not 0 <= self.probability <= 1:
            raise ValueError(f"probability must lie in [0, 1], got {self.probability}")
        if (self.kind == "delayed") != (self.release is not None):
            raise ValueError("release goes with a delayed fault, and only with that")


class _FaultyTransfer(Transfer):
    """A transfer whose fault shows at the first wait(); later calls repeat its outcome.

    Args:
        start: starts the inner transfer; returns None if the fault suppresses it. Not called
            before ``release`` is set.
        release: delays the start; None for a transfer that starts at once.
        after: called once, after the transfer has succeeded.
        error: raised by wait() after the inner transfer.
    """

    def __init__(
        self,
        start: Callable[[], Transfer | None],
        release: threading.Event | None,
        after: Callable[[], None],
        error: Exception | None,
    ) -> None:
        self._release = release
        self._start = None if release is None else start
        self._inner = start() if release is None else None
        self._after: Callable[[], None] | None = after
        self._error = error
        self._mutex = threading.Lock()

    @override
    def wait(self) -> None:
        if self._release is not None:
            self._release.wait()
        with self._mutex:
            self._start_if_delayed()
            if self._inner is not None:
                self._inner.wait()
            if self._error is not None:
                raise self._error
            after, self._after = self._after, None
            if after is not None:
                after()

    @override
    def done(self) -> bool:
        if self._release is not None and not self._release.is_set():
            return False
        if not self._mutex.acquire(blocking=False):
            return False  # Another thread is in wait().
        try:
            self._start_if_delayed()
            return self._inner is None or self._inner.done()
        finally:
            self._mutex.release()

    def _start_if_delayed(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            try:
                self._inner = start()
            except Exception as error:
                self._error = error


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _struck(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a method that calls ``method`` of ``self.inner`` inside of ``self._around()``.

    Faults and the callback get the parameter ``name`` or ``names`` of the method as the name of
    the file; without such a parameter ``path`` or ``child``, or no name.
    """
    operation, signature = method.__name__, inspect.signature(method)

    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        faulty: Any = args[0]
        given = signature.bind(*args, **options).arguments
        found = (given[key] for key in ("name", "names", "path", "child") if key in given)
        names = next(found, ())
        with faulty._around(operation, [names] if isinstance(names, str) else names):
            result: _R = getattr(faulty.inner, operation)(*args[1:], **options)
            return result

    return call


class FaultyStorage(Storage):
    """Any storage, with faults on command and a callback around every operation.

    Args:
        inner: the storage that does the work.
        seed: of all random choices: which calls a probability strikes, which bit flips, how
            long a prefix is.
        on_operation: called as ``on_operation(operation, file_name, when)`` with ``when``
            "before" every operation, and "after" an operation that succeeded (a transfer:
            when its wait() first returns). Its exceptions pass to the caller; an operation
            does not happen if "before" raises. ``file_name`` is the old name for a rename,
            the names joined by commas for a flush, and "" for an operation without a file.
    """

    def __init__(
        self, inner: Storage, *, seed: int = 0, on_operation: OnOperation | None = None
    ) -> None:
        self.inner = inner
        self._on_operation = on_operation
        self._random = random.Random(seed)
        self._calls_of_fault: dict[Fault, int] = {}
        self._delayed: set[_FaultyTransfer] = set()
        self._mutex = threading.Lock()

    def arm(self, fault: Fault) -> None:
        """Let ``fault`` strike from now on. Of several matching faults the first strikes."""
        with self._mutex:
            self._calls_of_fault[fault] = 0

    def disarm(self) -> None:
        """Disarm all faults. A transfer that was struck already still fails."""
        with self._mutex:
            self._calls_of_fault.clear()

    @property
    @override
    def engine(self) -> str:
        return self.inner.engine

    @property
    @override
    def location(self) -> str:
        return self.inner.location

    @override
    def home(self, name: str) -> Storage:
        return self.inner.home(name)

    @override
    def register(self, memory: memoryview) -> None:
        self.inner.register(memory)

    lock = _struck(Storage.lock)
    require_in_place = _struck(Storage.require_in_place)
    list = _struck(Storage.list)
    size = _struck(Storage.size)
    create = _struck(Storage.create)
    flush = _struck(Storage.flush)
    put = _struck(Storage.put)
    get = _struck(Storage.get)
    rename = _struck(Storage.rename)
    link = _struck(Storage.link)
    is_shared = _struck(Storage.is_shared)
    map = _struck(Storage.map)
    scratch = _struck(Storage.scratch)
    unlink = _struck(Storage.unlink)
    sync_directory = _struck(Storage.sync_directory)

    @override
    def folder(self, path: str) -> Folder:
        with self._around("folder", [path]):
            return FaultyFolder(self.inner.folder(path), self._around)

    @override
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._move("read", name, extent, buffer)

    @override
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        return self._move("write", name, extent, buffer)

    @override
    def drain(self) -> None:
        # Delayed transfers end first, once they are released.
        for transfer in list(self._delayed):
            with suppress(TierstoreError):  # wait() raises it again for the caller.
                transfer.wait()
            self._delayed.discard(transfer)
        self.inner.drain()

    @override
    def abandon(self) -> None:
        self.inner.abandon()

    @override
    def close(self) -> None:
        with self._around("close"):
            self.drain()
            self.inner.close()

    @contextmanager
    def _around(self, operation: str, names: Sequence[str] = ()) -> Iterator[None]:
        joined = ",".join(names)
        self._tell(operation, joined, "before")
        fault = self._strike(operation, names)
        if fault is not None:
            raise storage_error(operation, Path(self.location, joined), fault.errno)
        yield
        self._tell(operation, joined, "after")

    def _tell(self, operation: str, name: str, when: str) -> None:
        if self._on_operation is not None:
            self._on_operation(operation, name, when)

    def _strike(self, operation: str, names: Sequence[str]) -> Fault | None:
        """Count the call for every matching fault; return the first fault that strikes."""
        struck = None
        with self._mutex:
            for fault in self._calls_of_fault:
                if fault.operation != operation or fault.name not in (None, *names):
                    continue
                self._calls_of_fault[fault] += 1
                if fault.probability is None:
                    strikes = self._calls_of_fault[fault] == fault.call
                else:
                    strikes = self._random.random() < fault.probability
                if strikes and struck is None:
                    struck = fault
        return struck

    def _move(self, operation: str, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        """Start a transfer, of other bytes than asked for if a fault strikes."""
        self._tell(operation, name, "before")
        fault = self._strike(operation, [name])
        kind = None if fault is None else fault.kind
        offset, nbytes, error = extent.offset, extent.nbytes, None
        if fault is not None and kind in ("error", "short"):
            error = storage_error(operation, Path(self.location, name), fault.errno, extent)
        if kind in ("error", "lost"):
            nbytes = 0
        elif kind == "short":
            nbytes = self._choose(nbytes // SECTOR_BYTES) * SECTOR_BYTES
        elif kind == "misdirected":
            offset += SECTOR_BYTES
            nbytes = min(nbytes, (self.inner.size(name) - offset) // SECTOR_BYTES * SECTOR_BYTES)

        def start() -> Transfer | None:
            if nbytes <= 0:
                return None
            move = self.inner.read if operation == "read" else self.inner.write
            memory = buffer if nbytes == extent.nbytes else buffer[:nbytes]
            return move(name, Extent(offset, nbytes), memory)

        def after() -> None:
            if kind == "flipped_bit":
                bit = self._choose(buffer.nbytes * 8)
                buffer.cast("B")[bit // 8] ^= 1 << bit % 8
            self._tell(operation, name, "after")

        release = None if fault is None else fault.release
        transfer = _FaultyTransfer(start, release, after, error)
        if release is not None:
            self._delayed.add(transfer)
        return transfer

    def _choose(self, count: int) -> int:
        """Return a random number below ``count``."""
        with self._mutex:
            return self._random.randrange(count)


class FaultyFolder(Folder):
    """A folder of a FaultyStorage.

    Args:
        inner: the folder that does the work.
        around: ``_around`` of the storage; it gets the operation with the prefix "folder_".
    """

    def __init__(
        self, inner: Folder, around: Callable[[str, Sequence[str]], AbstractContextManager[None]]
    ) -> None:
        self.inner = inner
        self._around_in_storage = around

    @property
    @override
    def location(self) -> str:
        return self.inner.location

    children = _struck(Folder.children)
    files = _struck(Folder.files)
    make = _struck(Folder.make)
    put = _struck(Folder.put)
    get = _struck(Folder.get)
    read = _struck(Folder.read)
    link = _struck(Folder.link)
    append = _struck(Folder.append)
    flush = _struck(Folder.flush)
    unlink = _struck(Folder.unlink)
    remove = _struck(Folder.remove)
    rename = _struck(Folder.rename)
    sync = _struck(Folder.sync)
    sync_children = _struck(Folder.sync_children)
    close = _struck(Folder.close)

    def _around(self, operation: str, names: Sequence[str]) -> AbstractContextManager[None]:
        return self._around_in_storage(f"folder_{operation}", names)
