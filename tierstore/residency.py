"""Where the bytes of each page are, and how they get from there to a buffer and back.

A page is *fresh* (never written), *stored* (whole in its file), *reading*, *held* (its
buffer is with the optimizer) or *writing*. Pages stream in one fixed order: reads run
ahead into whatever buffers are free, writes drain behind and free theirs. When no buffer
is free the oldest write is waited for, so running short means waiting and never failing.
"""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tierstore.buffers import Buffer, BufferPool
from tierstore.checksums import block_checksum
from tierstore.errors import CorruptionError, StorageError
from tierstore.groups import PagedParameter
from tierstore.manifest import PageEntry, page_file
from tierstore.page import PageLayout, Section
from tierstore.storage.base import Storage, Transfer
from tierstore.units import Extent
from tierstore.views import PageView


class PageState(enum.Enum):
    """Where a page's bytes are."""

    FRESH = enum.auto()
    STORED = enum.auto()
    READING = enum.auto()
    HELD = enum.auto()
    WRITING = enum.auto()


@dataclass(slots=True, eq=False)
class Page:
    """One page of the store. Only the Pager changes its state."""

    index: int
    layout: PageLayout
    parameters: Mapping[str, PagedParameter]
    """The parameters that have a shard in the page, by name."""
    state: PageState = PageState.FRESH
    entry: PageEntry | None = None
    """What was written last; None while the page is fresh."""
    buffer: Buffer | None = None
    transfers: list[Transfer] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    """The sections being read."""

    def view(self) -> PageView:
        """Return the tensors over the page's buffer."""
        assert self.buffer is not None
        return PageView(self.layout, self.parameters, self.buffer)

    @property
    def has_gradient(self) -> bool:
        """Whether any parameter with a shard in the page has a gradient."""
        return any(parameter.tensor.grad is not None for parameter in self.parameters.values())


class Pager:
    """Moves pages between one storage and one pool of buffers.

    Without a storage every page keeps a buffer of its own and nothing moves: the same
    calls, with no swapping. Used by one thread.
    """

    def __init__(self, storage: Storage | None, *, run_id: str, checksums: bool) -> None:
        self._storage = storage
        self._run_id = run_id
        self._checksums = checksums
        self._pool = BufferPool(0, 0)
        self._writing: deque[Page] = deque()
        self.bytes_read = 0
        self.bytes_written = 0
        self.stall_seconds = 0.0
        self.buffer_bytes_peak = 0
        self.lost_write = False
        """Whether a write failed: the page it was of is in no file and in no buffer."""

    def provide_buffers(self, count: int, nbytes: int) -> None:
        """Replace the pool by one of ``count`` buffers of ``nbytes``, if it differs."""
        self.finish_writes()
        if (count, nbytes) != (self._pool.count, self._pool.buffer_bytes):
            self._pool = BufferPool(0, 0)  # Free the old one first.
            self._pool = BufferPool(count, nbytes)
            self.buffer_bytes_peak = max(self.buffer_bytes_peak, self._pool.nbytes)

    def make_resident(self, pages: Iterable[Page]) -> None:
        """Give each fresh page a buffer for good."""
        for page in pages:
            pool = BufferPool(1, page.layout.nbytes)
            self.buffer_bytes_peak += pool.nbytes
            page.buffer = pool.acquire()

    def stream(
        self, pages: Sequence[Page], sections: Callable[[Page], list[Section]]
    ) -> Generator[Page, None, None]:
        """Yield pages in order, each held, with the chosen sections read and checked.

        The caller gives each one back, by swap_out() or release(), before the next. The
        one it has, and those being read, are dropped when it stops early or a read fails.
        After an interrupt within the pager, abandon() has to follow.
        """
        waiting, ahead = deque(pages), deque[Page]()
        try:
            while waiting or ahead:
                self._prefetch(waiting, ahead, sections)
                self._arrive(ahead[0])
                yield ahead[0]
                ahead.popleft()
        finally:
            self._drop(ahead)

    def swap_out(self, page: Page, *, step: int, copy: str) -> None:
        """Start writing a held page as the content of ``step`` into one of its two files."""
        assert page.state is PageState.HELD
        assert page.buffer is not None
        if self._storage is None:
            page.entry = PageEntry(copy=copy, step=step, checksums=())
            page.state = PageState.STORED
            return
        checksums = self._checksums_of(page, step, range(len(page.layout.blocks)))
        page.entry = PageEntry(copy=copy, step=step, checksums=tuple(checksums))
        extent = Extent(0, page.layout.nbytes)
        page.transfers = [
            self._storage.write(
                page_file(page.index, copy), extent, page.buffer.memory[: extent.nbytes]
            )
        ]
        page.state = PageState.WRITING
        self._writing.append(page)
        self.bytes_written += extent.nbytes

    def release(self, page: Page) -> None:
        """Give back a held page that was not changed, or whose change is to be forgotten."""
        page.state = PageState.FRESH if page.entry is None else PageState.STORED
        if self._storage is not None and page.buffer is not None:
            buffer, page.buffer = page.buffer, None
            self._pool.release(buffer)

    def map(self, page: Page) -> memoryview | None:
        """Return the content of a held page's file as private memory, or None without one.

        It costs no memory, and stays what it is while the page goes on.
        """
        if self._storage is None or page.entry is None:
            return None
        return self._storage.map(page_file(page.index, page.entry.copy))

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros that costs disk space instead of memory, if there is a disk."""
        if self._storage is None or math.prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype)
        memory = self._storage.scratch(math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def finish_writes(self) -> None:
        """Wait for all writes. Raises StorageError for the first that failed."""
        while self._writing:
            self._finish_write(self._writing[0])

    def pending_writes(self) -> list[Transfer]:
        """Return the writes whose success was not yet seen."""
        return [transfer for page in self._writing for transfer in page.transfers]

    def abandon(self, pages: Iterable[Page]) -> None:
        """Wait for all transfers and take all buffers back, whatever became of the pages."""
        if self._storage is None:
            return
        self._storage.drain()
        self._writing.clear()
        self.lost_write = False
        for page in pages:
            page.buffer, page.transfers = None, []
            page.state = PageState.FRESH if page.entry is None else PageState.STORED
        self._pool.release_all()

    def close(self, pages: Iterable[Page]) -> None:
        """Give all memory back, once no transfer uses it."""
        pages = list(pages)
        self.abandon(pages)
        self._pool = BufferPool(0, 0)
        for page in pages:
            page.buffer = None

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Count the time spent in the block as waiting."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - started

    def _prefetch(
        self,
        waiting: deque[Page],
        ahead: deque[Page],
        sections: Callable[[Page], list[Section]],
    ) -> None:
        """Start reading as many of the next pages as there are buffers; at least one."""
        while waiting:
            self._reclaim()
            if self._storage is not None and not self._pool.free_count:
                if ahead:
                    return
                self._finish_write(self._writing[0])
            page = waiting.popleft()
            if page.state is PageState.WRITING:
                self._finish_write(page)
            # First among the pages to be dropped, should anything below be interrupted.
            ahead.append(page)
            self._swap_in(page, sections(page))

    def _swap_in(self, page: Page, sections: list[Section]) -> None:
        if page.buffer is None:
            page.buffer = self._pool.acquire()
        page.state = PageState.READING
        page.sections = sections
        if self._storage is None or page.entry is None:
            return
        for extent in _merged(sections):
            transfer = self._storage.read(
                page_file(page.index, page.entry.copy),
                extent,
                page.buffer.memory[extent.offset : extent.offset + extent.nbytes],
            )
            page.transfers.append(transfer)
            self.bytes_read += extent.nbytes

    def _arrive(self, page: Page) -> None:
        """Wait for a page being read, check it, and hold it."""
        self._wait(page.transfers)
        page.transfers = []
        if page.entry is None:
            page.view().initialize()
        elif self._storage is not None:
            self._check(page)
            # In place of the sections that were not read lie those of another page.
            unread = [section for section in page.layout.sections if section not in page.sections]
            assert page.buffer is not None
            page.layout.stamp(page.buffer.tensor, unread)
        page.state = PageState.HELD

    def _check(self, page: Page) -> None:
        """Compare the blocks that were read with the checksums of their commit."""
        entry = page.entry
        assert entry is not None
        if not self._checksums or not entry.checksums:
            return
        blocks = page.layout.blocks_of(page.sections)
        found = self._checksums_of(page, entry.step, [number for number, _ in blocks])
        for (number, block), checksum in zip(blocks, found, strict=True):
            if checksum != entry.checksums[number]:
                assert self._storage is not None
                name = page_file(page.index, entry.copy)
                raise CorruptionError(
                    f"{self._storage.home(name).location}/{name}: the "
                    f"{block.nbytes} bytes at offset {block.offset} are not those written in "
                    f"step {entry.step} (checksum {checksum:016x}, expected "
                    f"{entry.checksums[number]:016x}). The disk, memory or another "
                    "program changed them: go back to a checkpoint of the run, if there is one"
                )

    def _checksums_of(self, page: Page, step: int, numbers: Iterable[int]) -> list[int]:
        if not self._checksums:
            return []
        assert page.buffer is not None
        memory, blocks = page.buffer.memory, page.layout.blocks
        return [
            block_checksum(
                memory[blocks[number].offset : blocks[number].offset + blocks[number].nbytes],
                run_id=self._run_id,
                page=page.index,
                offset=blocks[number].offset,
                step=step,
            )
            for number in numbers
        ]

    def _reclaim(self) -> None:
        """Take back the buffers of writes that have ended."""
        for page in [page for page in self._writing if all(t.done() for t in page.transfers)]:
            self._finish_write(page)

    def _finish_write(self, page: Page) -> None:
        try:
            self._wait(page.transfers)
        except StorageError:
            self.lost_write = True
            raise
        page.transfers = []
        self._writing.remove(page)
        self.release(page)

    def _drop(self, pages: Iterable[Page]) -> None:
        """Take back the buffers of pages that are being read or held."""
        pages = [page for page in pages if page.state in (PageState.READING, PageState.HELD)]
        if pages and self._storage is not None:
            # Not only for their transfers: an interrupt may have kept one from its page.
            self._storage.drain()
        for page in pages:
            page.transfers = []
            self.release(page)

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        with self.stalled():
            for transfer in transfers:
                transfer.wait()


def _merged(sections: Sequence[Section]) -> list[Extent]:
    """Return the ranges of some sections, neighbours joined into one."""
    extents: list[Extent] = []
    for section in sections:
        last = extents[-1] if extents else None
        if last is not None and last.offset + last.nbytes == section.extent.offset:
            extents[-1] = Extent(last.offset, last.nbytes + section.extent.nbytes)
        else:
            extents.append(section.extent)
    return extents
