"""Fault injection: a storage that wraps any storage and fails on command.

Without an armed fault it behaves as the inner storage. Random choices depend on the seed
alone, so that a failing test can be repeated::

    storage = FaultyStorage(MemoryStorage(), seed=7)
    storage.arm(Fault("error", "write", call=3, errno=errno.ENOSPC))
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from errno import EIO
from typing import Literal

from typing_extensions import override

from tierstore.errors import StorageError, TierstoreError
from tierstore.storage.base import Folder, Storage, Transfer
from tierstore.testing.faulty_folder import FaultyFolder
from tierstore.units import SECTOR_BYTES, Extent

FaultKind = Literal["error", "short", "flipped_bit", "lost", "misdirected", "delayed"]
Operation = Literal[
    "lock",
    "list",
    "size",
    "create",
    "read",
    "write",
    "flush",
    "put",
    "get",
    "rename",
    "link",
    "is_shared",
    "map",
    "scratch",
    "folder",
    "unlink",
    "sync_directory",
    "close",
    "folder_children",
    "folder_files",
    "folder_make",
    "folder_put",
    "folder_get",
    "folder_link",
    "folder_append",
    "folder_flush",
    "folder_unlink",
    "folder_remove",
    "folder_rename",
    "folder_sync",
    "folder_sync_children",
]
OnOperation = Callable[[str, str, str], None]

# Kinds that are absent here apply to every operation.
_OPERATIONS_OF_KIND: dict[FaultKind, tuple[Operation, ...]] = {
    "short": ("read", "write"),
    "flipped_bit": ("read",),
    "lost": ("write",),
    "misdirected": ("write",),
    "delayed": ("read", "write"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """One kind of failure, and the calls that it strikes.

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
    operation: Operation
    """The method of Storage to strike; with the prefix "folder_", a method of its folders."""
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
        if self.operation not in _OPERATIONS_OF_KIND.get(self.kind, (self.operation,)):
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
        error: Exception | None = None,
    ) -> None:
        self._start = start
        self._release = release
        self._delayed = release is not None
        self._inner = start() if release is None else None
        self._after: Callable[[], None] | None = after
        self._error = error
        self._mutex = threading.Lock()

    @override
    def wait(self) -> None:
        if self._release is not None:
            self._release.wait()
        with self._mutex:
            self._start_if_released()
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
            self._start_if_released()
            return self._inner is None or self._inner.done()
        finally:
            self._mutex.release()

    def _start_if_released(self) -> None:
        if self._delayed:
            try:
                self._inner = self._start()
            except Exception as error:
                self._error = error
            self._delayed = False


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
    def lock(self, timeout_s: float) -> None:
        with self._around("lock"):
            self.inner.lock(timeout_s)

    @override
    def register(self, memory: memoryview) -> None:
        # Not an operation that a fault can strike: it moves no bytes.
        self.inner.register(memory)

    @override
    def list(self) -> list[str]:
        with self._around("list"):
            return self.inner.list()

    @override
    def size(self, name: str) -> int:
        with self._around("size", name):
            return self.inner.size(name)

    @override
    def create(self, name: str, nbytes: int) -> None:
        with self._around("create", name):
            self.inner.create(name, nbytes)

    @override
    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        self._tell("read", name, "before")
        fault = self._strike("read", [name])
        if fault is not None and fault.kind in ("error", "short"):
            return self._cut("read", name, extent, buffer, fault)
        flips = fault is not None and fault.kind == "flipped_bit"
        return self._transfer(
            "read",
            name,
            lambda: self.inner.read(name, extent, buffer),
            fault,
            then=(lambda: self._flip_bit(buffer)) if flips else None,
        )

    @override
    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        self._tell("write", name, "before")
        fault = self._strike("write", [name])
        if fault is not None and fault.kind in ("error", "short"):
            return self._cut("write", name, extent, buffer, fault)

        def start() -> Transfer | None:
            if fault is not None and fault.kind == "lost":
                return None
            if fault is not None and fault.kind == "misdirected":
                return self._write_late(name, extent, buffer)
            return self.inner.write(name, extent, buffer)

        return self._transfer("write", name, start, fault)

    @override
    def flush(self, names: Sequence[str]) -> None:
        with self._around("flush", *names):
            self.inner.flush(names)

    @override
    def put(self, name: str, data: bytes) -> None:
        with self._around("put", name):
            self.inner.put(name, data)

    @override
    def get(self, name: str) -> bytes:
        with self._around("get", name):
            return self.inner.get(name)

    @override
    def rename(self, name: str, new_name: str) -> None:
        with self._around("rename", name):
            self.inner.rename(name, new_name)

    @override
    def link(self, name: str, new_name: str) -> None:
        with self._around("link", name):
            self.inner.link(name, new_name)

    @override
    def is_shared(self, name: str) -> bool:
        with self._around("is_shared", name):
            return self.inner.is_shared(name)

    @override
    def map(self, name: str) -> memoryview:
        with self._around("map", name):
            return self.inner.map(name)

    @override
    def scratch(self, nbytes: int) -> memoryview:
        with self._around("scratch"):
            return self.inner.scratch(nbytes)

    @override
    def folder(self, path: str) -> Folder:
        with self._around("folder", path):
            return FaultyFolder(self.inner.folder(path), self._around, _unwrap)

    @override
    def unlink(self, name: str) -> None:
        with self._around("unlink", name):
            self.inner.unlink(name)

    @override
    def sync_directory(self) -> None:
        with self._around("sync_directory"):
            self.inner.sync_directory()

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
    def _around(self, operation: Operation, *names: str) -> Iterator[None]:
        joined = ",".join(names)
        self._tell(operation, joined, "before")
        fault = self._strike(operation, names)
        if fault is not None:
            raise StorageError(operation, path=self._path(joined), errno=fault.errno)
        yield
        self._tell(operation, joined, "after")

    def _tell(self, operation: Operation, name: str, when: str) -> None:
        if self._on_operation is not None:
            self._on_operation(operation, name, when)

    def _path(self, name: str) -> str:
        return f"{self.location}/{name}" if name else self.location

    def _strike(self, operation: Operation, names: Sequence[str]) -> Fault | None:
        """Count the call for every fault that it matches; return the first that strikes."""
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

    def _transfer(
        self,
        operation: Operation,
        name: str,
        start: Callable[[], Transfer | None],
        fault: Fault | None,
        then: Callable[[], None] | None = None,
    ) -> Transfer:
        def after() -> None:
            if then is not None:
                then()
            self._tell(operation, name, "after")

        release = None if fault is None else fault.release
        transfer = _FaultyTransfer(start, release, after)
        if release is not None:
            self._delayed.add(transfer)
        return transfer

    def _cut(
        self, operation: Operation, name: str, extent: Extent, buffer: memoryview, fault: Fault
    ) -> Transfer:
        """Move nothing (error) or a prefix (short), then fail."""
        error = StorageError(
            operation,
            path=self._path(name),
            errno=fault.errno,
            offset=extent.offset,
            nbytes=extent.nbytes,
        )
        nbytes = 0
        if fault.kind == "short":
            with self._mutex:
                nbytes = self._random.randrange(extent.nbytes // SECTOR_BYTES) * SECTOR_BYTES
        move = self.inner.read if operation == "read" else self.inner.write

        def start() -> Transfer | None:
            if nbytes == 0:
                return None
            return move(name, Extent(extent.offset, nbytes), buffer[:nbytes])

        return _FaultyTransfer(start, None, lambda: None, error)

    def _flip_bit(self, buffer: memoryview) -> None:
        with self._mutex:
            bit = self._random.randrange(buffer.nbytes * 8)
        buffer.cast("B")[bit // 8] ^= 1 << bit % 8

    def _write_late(self, name: str, extent: Extent, buffer: memoryview) -> Transfer | None:
        offset = extent.offset + SECTOR_BYTES
        bytes_left = (self.inner.size(name) - offset) // SECTOR_BYTES * SECTOR_BYTES
        nbytes = min(extent.nbytes, bytes_left)
        if nbytes <= 0:
            return None
        return self.inner.write(name, Extent(offset, nbytes), buffer[:nbytes])


def _unwrap(storage: Storage) -> Storage:
    return storage.inner if isinstance(storage, FaultyStorage) else storage
