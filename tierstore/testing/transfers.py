"""Whole transfers for tests: aligned memory with seeded content, moved and waited for."""

from __future__ import annotations

import mmap
import random

from tierstore.storage.base import Storage
from tierstore.units import Extent


def aligned_buffer(content: bytes | int) -> memoryview:
    """Return page-aligned memory that holds ``content``, or that many zero bytes."""
    nbytes = content if isinstance(content, int) else len(content)
    buffer = memoryview(mmap.mmap(-1, nbytes))
    if not isinstance(content, int):
        buffer[:] = content
    return buffer


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    """Return ``nbytes`` bytes that depend on ``seed`` alone."""
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
