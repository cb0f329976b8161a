"""A fixed pool of page buffers, cut from one arena of huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tierstore.errors import BudgetError
from tierstore.layout.page_layout import PageLayout, RecordViews
from tierstore.units import SECTOR_BYTES, align_up, format_bytes

HUGE_PAGE_BYTES = 2 * 2**20

logger = logging.getLogger("tierstore")

# From <linux/mman.h>; the mmap module does not name it.
_MADV_POPULATE_WRITE = 23


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one page, as a tensor and as a memoryview."""

    tensor: torch.Tensor
    """uint8, one dimension, starts at a multiple of SECTOR_BYTES."""
    memory: memoryview
    viewed: tuple[PageLayout, Sequence[RecordViews]] | None = None
    """The layout of the last page that was viewed here, and its records."""


class BufferPool:
    """``count`` buffers of ``nbytes`` each, allocated at construction.

    Used by one thread. The memory is in huge pages, since direct I/O pins every page of a buffer,
    and forked children do not get it, since a fork would have to copy pinned pages.

    Args:
        count: number of buffers.
        nbytes: bytes of each buffer, rounded up to sectors.
        page_locked: the GPU for which the memory is page-locked; None: do not page-lock.

    Attributes:
        memory: all buffers in one piece, to be registered with a storage.

    Raises:
        BudgetError: the machine has not enough memory.
    """

    def __init__(self, count: int, nbytes: int, *, page_locked: torch.device | None = None) -> None:
        self.buffer_bytes = align_up(nbytes, SECTOR_BYTES)
        self.count = count
        arena_bytes = max(count * self.buffer_bytes, SECTOR_BYTES)
        # Anonymous memory is aligned to 4 KiB only: map a huge page more, and start at its edge.
        arena = map_memory(arena_bytes + HUGE_PAGE_BYTES)
        address = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()
        first = align_up(address, HUGE_PAGE_BYTES) - address
        # Whole huge pages only: the last, partial one would take the memory of a whole one.
        huge_bytes = arena_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if huge_bytes:
            with contextlib.suppress(OSError):  # A kernel without huge pages: slower.
                arena.madvise(mmap.MADV_HUGEPAGE, first, huge_bytes)
        _populate(arena, first, arena_bytes)
        if page_locked is not None:
            _lock_pages(arena, address + first, arena_bytes, page_locked)
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
        """Number of free buffers."""
        return len(self._free)

    def acquire(self) -> Buffer:
        """Take a free buffer. Requires free_count > 0."""
        return self._free.pop()

    def release(self, buffer: Buffer) -> None:
        """Give back a buffer. No transfer may still use it."""
        self._free.append(buffer)

    def release_all(self) -> None:
        """Take back all buffers. No transfer may still use one."""
        self._free = list(self._all)


class _Arena(mmap.mmap):
    """Anonymous memory, unregistered from CUDA before it is unmapped.

    A ``weakref`` finalizer would run after the unmapping.
    """

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        # At exit CUDA may have shut down. It has then unregistered the memory.
        if self.unregister is not None and not sys.is_finalizing():
            self.unregister()


_arenas: weakref.WeakSet[_Arena] = weakref.WeakSet()


def map_memory(nbytes: int) -> _Arena:
    """Return anonymous memory that forked children do not get.

    Raises:
        BudgetError: the machine has not enough memory.
    """
    try:
        arena = _Arena(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_memory(nbytes) from error
    arena.madvise(mmap.MADV_DONTFORK)
    _arenas.add(arena)
    return arena


def _keep_inherited() -> None:
    """Keep inherited arenas alive in a forked child, also while the interpreter exits.

    The child may have mapped other memory at the same addresses. A destructor would unmap it.
    """
    for arena in list(_arenas):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(arena))


os.register_at_fork(after_in_child=_keep_inherited)


def _populate(arena: mmap.mmap, offset: int, nbytes: int) -> None:
    """Map every page now, so that no step waits for a page fault."""
    try:
        arena.madvise(_MADV_POPULATE_WRITE, offset, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _no_memory(nbytes) from error
        # Linux before 5.14 does not know this advice: write to each page instead.
        for position in range(offset, offset + nbytes, mmap.PAGESIZE):
            arena[position] = 0


def _lock_pages(arena: _Arena, address: int, nbytes: int, device: torch.device) -> None:
    """Register memory with CUDA for as long as it lives."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):  # Else another GPU would get a context.
        error = int(runtime.cudaHostRegister(address, nbytes, 0))
    if error:
        logger.warning(
            "%s of page buffers are not page-locked (CUDA error %d): copies to the device are "
            "slower. The limit of locked memory (ulimit -l) may be too low",
            format_bytes(nbytes),
            error,
        )
        # CUDA raises the error at the next kernel launch: launch a kernel now.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        return

    synchronize = torch.cuda.synchronize

    def unregister() -> None:
        synchronize(device)  # Copies from and to this memory may still be queued on the GPU.
        runtime.cudaHostUnregister(address)

    arena.unregister = unregister


def _no_memory(nbytes: int) -> BudgetError:
    return BudgetError(
        f"this machine cannot provide {nbytes} bytes ({format_bytes(nbytes)}) for page buffers: "
        "free some, or pass a smaller host_memory"
    )
