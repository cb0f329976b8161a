"""Helpers of the conformance suite: transfers, raw access to files, errors, forked children."""

from __future__ import annotations

import mmap
import os
import random
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tierstore.errors import StorageError
from tierstore.storage.base import Storage, Transfer
from tierstore.units import Extent


class RawAccess(ABC):
    """Access to the files of a storage that bypasses the storage under test."""

    @abstractmethod
    def raw_bytes(self, storage: Storage, name: str) -> bytes:
        """Return a file's content without using the storage."""

    @abstractmethod
    def allocated_bytes(self, storage: Storage, name: str) -> int:
        """Return the space that a file occupies on the medium."""

    @abstractmethod
    def open_again(self, storage: Storage) -> Storage:
        """Return a second storage of the same files, as another user would open it."""


def aligned_buffer(content: bytes | int) -> memoryview:
    """Return page-aligned memory: a copy of ``content``, or ``content`` zero bytes for an int."""
    nbytes = content if isinstance(content, int) else len(content)
    buffer = memoryview(mmap.mmap(-1, nbytes))
    if not isinstance(content, int):
        buffer[:] = content
    return buffer


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    """Return ``nbytes`` random bytes that depend on ``seed`` alone."""
    return random.Random(seed).randbytes(nbytes)


def write_bytes(storage: Storage, name: str, offset: int, content: bytes) -> None:
    """Write ``content`` at ``offset`` of an existing file and wait."""
    storage.write(name, Extent(offset, len(content)), aligned_buffer(content)).wait()


def read_bytes(storage: Storage, name: str, offset: int, nbytes: int) -> bytes:
    """Read ``nbytes`` at ``offset`` and wait."""
    buffer = aligned_buffer(nbytes)
    storage.read(name, Extent(offset, nbytes), buffer).wait()
    return bytes(buffer)


def create_with(storage: Storage, name: str, content: bytes) -> None:
    """Create a file and write ``content``, of whole sectors, over all of it."""
    storage.create(name, len(content))
    write_bytes(storage, name, 0, content)


def start_pieces(
    move: Callable[[str, Extent, memoryview], Transfer], name: str, memory: memoryview, count: int
) -> list[Transfer]:
    """Start ``count`` reads or writes of equal length, of a file into or from ``memory``."""
    nbytes = len(memory) // count
    return [
        move(name, Extent(start, nbytes), memory[start : start + nbytes])
        for start in range(0, len(memory), nbytes)
    ]


def wait_all(transfers: list[Transfer]) -> None:
    """Wait for all transfers."""
    for transfer in transfers:
        transfer.wait()


@contextmanager
def fails_with(*errnos: int) -> Iterator[pytest.ExceptionInfo[StorageError]]:
    """Expect that the block raises a StorageError with an errno among ``errnos``."""
    with pytest.raises(StorageError) as caught:
        yield caught
    assert caught.value.errno in errnos


@contextmanager
def resource_limit(kind: int, limit: int) -> Iterator[None]:
    """Lower a limit of this process, such as ``resource.RLIMIT_NOFILE``, during the block."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def start_child(run: Callable[[], int | None]) -> int:
    """Call ``run`` in a forked child; return its process id, for exit_code()."""
    child = os.fork()
    if child == 0:
        code = 100
        try:
            code = run() or 0
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Wait for a child; return the result of its ``run`` (None: 0), or 100 if it raised."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def exit_code_of_child(run: Callable[[], int | None]) -> int:
    """Call ``run`` in a forked child; return its result (None: 0), or 100 if it raised."""
    return exit_code(start_child(run))
