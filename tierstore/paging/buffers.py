"""A fixed pool of page buffers, cut from one arena of huge pages when the store starts."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierstore.errors import BudgetError
from tierstore.units import SECTOR_BYTES, align_up, format_bytes

HUGE_PAGE_BYTES = 2 * 2**20

logger = logging.getLogger("tierstore")

# From <linux/mman.h>; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for one page: the same bytes as a tensor and as a memoryview."""

    tensor: torch.Tensor
    """uint8, one dimension, starts at a multiple of SECTOR_BYTES."""
    memory: memoryview


class BufferPool:
    """``count`` buffers of ``nbytes`` each, all allocated now, for as long as it lives.

    Used by one thread. Direct I/O pins the pages of a buffer, which is why they are huge
    (fewer of them) and are not given to forked children (a fork would have to copy them).

    Args:
        count: number of buffers.
        nbytes: bytes of each, rounded up to sectors.
        page_locked: lock the memory for copies to and from CUDA devices.

    Attributes:
        memory: all buffers in one piece, to be registered with a storage.

    Raises:
        BudgetError: the machine does not have so much memory.
    """

    def __init__(self, count: int, nbytes: int, *, page_locked: bool = False) -> None:
        self.buffer_bytes = align_up(nbytes, SECTOR_BYTES)
        self.count = count
        arena_bytes = max(count * self.buffer_bytes, SECTOR_BYTES)
        # Anonymous memory comes aligned to 4 KiB only: take a huge page more, start later.
        arena = _map(arena_bytes + HUGE_PAGE_BYTES)
        address = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()
        first = align_up(address, HUGE_PAGE_BYTES) - address
        arena.madvise(mmap.MADV_DONTFORK)
        # Whole huge pages only: a part of one would take the memory of all of it.
        huge_bytes = arena_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if huge_bytes:
            with contextlib.suppress(OSError):  # A kernel built without huge pages: only slower.
                arena.madvise(mmap.MADV_HUGEPAGE, first, huge_bytes)
        _populate(arena, first, arena_bytes)
        if page_locked:
            _lock_pages(arena, address + first, arena_bytes)
        self.memory = memoryview(arena)[first : first + self.nbytes]
        self._all = [
            Buffer(
                torch.frombuffer(arena, dtype=torch.uint8, offset=offset, count=self.buffer_bytes),
                memoryview(arena)[offset : offset + self.buffer_bytes],
            )
            for offset in (first + index * self.buffer_bytes for index in range(count))
        ]
        self.release_all()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
        return self.count * self.buffer_bytes

    @property
    def free_count(self) -> int:
        """Number of buffers that acquire() could still hand out."""
        return len(self._free)

    def acquire(self) -> Buffer:
        """Take a free buffer. The caller has seen that ``free_count`` is not zero."""
        return self._free.pop()

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back. No transfer may still use it."""
        self._free.append(buffer)

    def release_all(self) -> None:
        """Take back every buffer, whoever has it. No transfer may still use any."""
        self._free = list(self._all)


class _Arena(mmap.mmap):
    """Memory of the system, taken back from CUDA before it is unmapped.

    A finalizer of ``weakref`` would be called when it is unmapped already.
    """

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        # At the end of the process CUDA may be gone already, and takes care itself.
        if self.unregister is not None and not sys.is_finalizing():
            self.unregister()


def _map(nbytes: int) -> _Arena:
    try:
        return _Arena(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_memory(nbytes) from error


def _populate(arena: mmap.mmap, offset: int, nbytes: int) -> None:
    """Have the kernel map every page now, so that no step waits for a page fault."""
    try:
        arena.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _no_memory(nbytes) from error
        # Linux before 5.14 does not know this advice: touch each page ourselves.
        for position in range(offset, offset + nbytes, mmap.PAGESIZE):
            arena[position] = 0


def _lock_pages(arena: _Arena, address: int, nbytes: int) -> None:
    """Register memory with CUDA for as long as it lives."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, nbytes, 0))
    if error:
        logger.warning(
            "%s of page buffers are not page-locked (CUDA error %d): copies to the device are "
            "slower. The limit of locked memory (ulimit -l) may be too low",
            format_bytes(nbytes),
            error,
        )
        # CUDA keeps the error for whoever launches a kernel next: be that here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return
    arena.unregister = functools.partial(runtime.cudaHostUnregister, address)


def _no_memory(nbytes: int) -> BudgetError:
    return BudgetError(
        f"this machine does not give {nbytes} bytes ({format_bytes(nbytes)}) for page buffers: "
        "free some, or pass a smaller host_memory"
    )
