"""Where the bytes of each page are, and how they get from there to where it is stepped.

A page is *fresh* (never written), *stored* (whole in its file), *resting* (in memory of its
own), *reading*, *held* (with the optimizer) or *writing*. Pages pass in one fixed order: reads
run ahead into whatever buffers are free, writes drain behind and free theirs. When no buffer
is free the oldest write is waited for, so running short means waiting and never failing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch
from torch.profiler import record_function

from tierstore.errors import StorageError
from tierstore.layout.page_layout import Section
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import Device
from tierstore.paging.page import Page, PageState, Transit
from tierstore.paging.tier_plan import Placement, Tier
from tierstore.run.file_names import page_file
from tierstore.storage.base import Storage, Transfer


class Pager:
    """Moves pages between one storage, one pool of buffers and one device.

    Without a storage every page rests in memory: the same calls, with no swapping. Used by
    one thread.
    """

    def __init__(self, storage: Storage | None, *, run_id: str, checksums: bool) -> None:
        self._storage = storage
        self._transit = Transit(storage, run_id=run_id, checksums=checksums)
        self._pool = BufferPool(0, 0)
        self._reserved = 0  # Buffers that reading ahead leaves for pages of the device.
        self._early: list[Page] = []  # Being read for a sweep that has not begun.
        self._writing: deque[Page] = deque()
        self.bytes_read = 0
        self.bytes_written = 0
        self.stall_seconds = 0.0
        self.host_bytes_peak = 0
        self.device_bytes_peak = 0
        self.lost_write = False
        """Whether a write failed: the page it was of may be in no file and in no buffer."""

    # -- Where pages rest.

    def make_way(
        self,
        pages: Sequence[Page],
        placement: Placement,
        device: Device,
        write: Callable[[Page], None],
    ) -> None:
        """Free all memory that a placement has no use for, so that place() finds room.

        Pages go from host memory to the device, where there is room for them now, or to their
        files; those that leave the device for host memory wait for place().

        Args:
            pages: all pages, in the order of the placement.
            placement: where each shall be.
            device: where steps are computed.
            write: starts to write a page that is in memory; see write().
        """
        self.drop_early()
        moving = [
            (page, tier)
            for page, tier in zip(pages, placement.tiers, strict=True)
            if tier is not page.tier
        ]
        copied = {page for page, tier in moving if page.in_memory and tier is not Tier.NVME}
        if len({page.tier for page in copied}) > 1:
            # They change places, and neither has room for the others: some go through files.
            copied = {page for page in copied if page.tier is Tier.DEVICE}
        leaving = [page for page, _ in moving if page not in copied]
        for page in leaving:
            if page.is_changed:
                write(page)
        self.finish_writes()
        for page in leaving:
            page.buffer = page.device_buffer = None
            page.tier, page.in_memory = Tier.NVME, False
            self._rest(page)
        self._transit.provide_staging(device, [], 0)
        for page, tier in moving:
            if page in copied and tier is Tier.DEVICE:
                self._move_to_memory(page, tier, device)
        if (placement.buffers, placement.buffer_bytes) != self._pool_shape:
            self._free_pool()

    def place(
        self, pages: Sequence[Page], placement: Placement, device: Device, *, beside: int, held: int
    ) -> None:
        """Have every page where a placement wants it, and provide its buffers.

        What is to rest in memory and is in a file is read when it is needed next. After
        make_way() there is never more memory than before it or after this.

        Args:
            pages: as for make_way().
            placement: likewise.
            device: likewise.
            beside: bytes of host memory that others than pages have, to be counted with theirs.
            held: most pages that are given out at once.
        """
        if (placement.buffers, placement.buffer_bytes) != self._pool_shape:
            self._pool = BufferPool(
                placement.buffers, placement.buffer_bytes, page_locked=not device.is_host
            )
            if self._storage is not None:
                self._storage.register(self._pool.memory)
        tiers = list(zip(pages, placement.tiers, strict=True))
        # Pages that leave the device come first, to make room on it.
        for page, tier in sorted(tiers, key=lambda each: each[0].tier is not Tier.DEVICE):
            if tier is not page.tier:
                self._move_to_memory(page, tier, device)
        self._reserved = int(self._storage is not None and Tier.DEVICE in placement.tiers)
        sizes = {tier: [p.layout.nbytes for p in pages if p.tier is tier] for tier in Tier}
        staging = self._transit.provide_staging(device, sizes[Tier.HOST] + sizes[Tier.NVME], held)
        host_bytes = beside + self._pool.nbytes + sum(sizes[Tier.HOST])
        self.host_bytes_peak = max(self.host_bytes_peak, host_bytes)
        self.device_bytes_peak = max(self.device_bytes_peak, staging + sum(sizes[Tier.DEVICE]))

    @property
    def _pool_shape(self) -> tuple[int, int]:
        return self._pool.count, self._pool.buffer_bytes

    @property
    def held_max(self) -> int | None:
        """How many pages may be given out at once; None for any number."""
        if not self._pool.count:
            return None
        # The next one needs a buffer, and so may one that is written from the device.
        return max(1, self._pool.count - 1 - self._reserved)

    def _free_pool(self) -> None:
        if self._storage is not None:
            self._storage.register(memoryview(b""))
        self._pool = BufferPool(0, 0)

    def _move_to_memory(self, page: Page, tier: Tier, device: Device) -> None:
        """Give a page memory of its own in a tier, and what it holds in another."""
        nbytes = page.layout.nbytes
        if page.copy is not None:
            page.copy.wait()
            page.copy = None
        # Whatever interrupts this leaves the page with what it had: memory changes with the tier.
        if tier is Tier.HOST:
            buffer = BufferPool(1, nbytes, page_locked=not device.is_host).acquire()
            if page.device_buffer is not None:
                device.copy_out(page.device_buffer, buffer.tensor[:nbytes]).wait()
            page.buffer, page.device_buffer, page.tier = buffer, None, tier
        else:
            memory = device.allocate(nbytes)
            if page.buffer is not None:
                device.copy_in(page.buffer.tensor[:nbytes], memory).wait()
            page.buffer, page.device_buffer, page.tier = None, memory, tier

    # -- The stream.

    def prefetch(self, pages: Iterable[Page], sections: Callable[[Page], list[Section]]) -> None:
        """Start to read pages that stream() will be asked for, as far as buffers are free.

        Never blocks.
        """
        self._reclaim()
        for page in pages:
            if page.state in (PageState.READING, PageState.RESTING):
                continue
            if page.state is not PageState.STORED or not self._has_buffer(page, self._reserved):
                return
            self._early.append(page)
            self._swap_in(page, sections(page))

    def drop_early(self) -> None:
        """Take back the buffers of pages that were read for a sweep."""
        early, self._early = self._early, []
        self._drop(early)

    def stream(
        self, pages: Sequence[Page], sections: Callable[[Page], list[Section]]
    ) -> Generator[Page, None, None]:
        """Yield pages in order, each held, with the chosen sections read and checked.

        The caller gives each one back, by write(), keep() or release(), before it asks for
        more than it may hold. Those it has, and those being read, are dropped when it stops
        early or a read fails. After an interrupt within the pager, abandon() has to follow.
        """
        waiting, ahead, held = deque(pages), deque[Page](), deque[Page]()
        try:
            self._drop_unwanted(waiting, sections)
            while waiting or ahead:
                self._read_ahead(waiting, ahead, sections)
                self._wait(ahead[0].transfers)
                # Writes that ended meanwhile have made room: the disk shall not wait for what
                # this thread does with the page.
                self._read_ahead(waiting, ahead, sections)
                self._arrive(ahead[0])
                held.append(ahead[0])
                ahead.popleft()
                yield held[-1]
                while held and held[0].state is not PageState.HELD:
                    held.popleft()
        finally:
            self._drop(dict.fromkeys([*held, *ahead, *self._early]))
            self._early.clear()

    def write(self, page: Page, *, step: int, copy: str) -> None:
        """Start to write a page as the content of ``step`` into one of its two files."""
        if page.buffer is None:
            while not self._pool.free_count:
                self._finish_write(self._writing[0])
            page.buffer = self._pool.acquire()
        self._transit.leave_device(page)
        page.is_fresh = page.is_changed = False
        self._transit.write(page, step, copy)
        page.state = PageState.WRITING
        self._writing.append(page)
        self.bytes_written += page.layout.nbytes

    def keep(self, page: Page) -> None:
        """Let a held page that was changed rest in memory of its own, newer than its file."""
        if page.tier is Tier.HOST:
            self._transit.leave_device(page)
        page.is_fresh, page.is_changed = False, True
        self._rest(page)

    def release(self, page: Page) -> None:
        """Give back a held page that was not changed, or whose change is to be forgotten."""
        self._transit.drop(page)
        self._rest(page)

    def load(self, pages: Iterable[Page]) -> None:
        """Read the pages that are to rest in memory, and are not there yet."""
        absent = [p for p in pages if p.state is PageState.STORED and p.tier is not Tier.NVME]
        with contextlib.closing(self.stream(absent, lambda page: [])) as stream:
            for page in stream:
                self.release(page)

    def map(self, page: Page) -> memoryview | None:
        """Return the content of a held page's file as private memory, or None without one.

        It costs no memory, and stays what it is while the page goes on.
        """
        if self._storage is None or page.entry is None or page.is_changed:
            return None
        return self._storage.map(page_file(page.index, page.entry.copy))

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros that costs disk space instead of memory, if there is a disk."""
        if self._storage is None or math.prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype)
        memory = self._storage.scratch(math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    # -- Writes behind.

    def finish_writes(self) -> None:
        """Wait for all writes. Raises StorageError for the first that failed."""
        while self._writing:
            self._finish_write(self._writing[0])

    def pending_writes(self) -> list[Transfer]:
        """Return the writes whose success was not yet seen; their pages' entries are right."""
        for page in self._writing:
            self._transit.settle(page)
        return [transfer for page in self._writing for transfer in page.transfers]

    def abandon(self, pages: Iterable[Page]) -> None:
        """Wait for all that is under way and take all buffers back, whatever became of the pages.

        Without a storage pages have nothing but their memory: they keep what it holds.
        """
        pages = list(pages)
        self._transit.finish_late()
        for page in pages:
            self._transit.drop(page)
        if self._storage is None:
            return
        self._storage.drain()
        self._writing.clear()
        self._early.clear()
        self.lost_write = False
        for page in pages:
            if page.tier is not Tier.HOST:
                page.buffer = None
            page.transfers = []
            page.in_memory = page.is_changed = False
            page.is_fresh = page.entry is None
            page.state = PageState.FRESH if page.is_fresh else PageState.STORED
        self._pool.release_all()

    def forget(self, pages: Iterable[Page]) -> None:
        """Give all memory back: after abandon(), what pages hold is in their files."""
        self._free_pool()
        for page in pages:
            page.buffer = page.device_buffer = None
            page.tier = Tier.NVME

    def close(self, pages: Iterable[Page]) -> None:
        """Give all memory back, once no transfer uses it."""
        pages = list(pages)
        self.abandon(pages)
        self._transit.close()
        for page in pages:
            page.buffer = page.device_buffer = None
        self._free_pool()

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Count the time spent in the block as waiting."""
        started = time.perf_counter()
        try:
            with record_function("tierstore::stall"):
                yield
        finally:
            self.stall_seconds += time.perf_counter() - started

    # -- In.

    def _drop_unwanted(
        self, wanted: Iterable[Page], sections: Callable[[Page], list[Section]]
    ) -> None:
        """Drop what was read early and is of no use for these pages."""
        members = {
            page for page in wanted if page.tier is not Tier.NVME or page.sections == sections(page)
        }
        unwanted = [page for page in self._early if page not in members]
        self._early = [page for page in self._early if page in members]
        self._drop(unwanted)

    def _read_ahead(
        self,
        waiting: deque[Page],
        ahead: deque[Page],
        sections: Callable[[Page], list[Section]],
    ) -> None:
        """Start reading as many of the next pages as there are buffers; at least one."""
        while waiting:
            self._reclaim()
            page = waiting[0]
            if page.state is PageState.WRITING:
                if ahead:
                    return
                self._finish_write(page)
            elif page.state is PageState.READING:  # Since before the sweep.
                ahead.append(waiting.popleft())
                self._early.remove(page)
            elif not self._has_buffer(page, self._reserved if ahead else 0):
                if ahead:
                    return
                self._finish_write(self._writing[0])
            else:
                # First among the pages to be dropped, should anything below be interrupted.
                ahead.append(waiting.popleft())
                self._swap_in(page, sections(page))

    def _has_buffer(self, page: Page, reserved: int) -> bool:
        """Return whether a page could be read now, and so many buffers be left."""
        needs_none = self._storage is None or page.tier is Tier.HOST or page.in_memory
        return needs_none or self._pool.free_count > reserved

    def _swap_in(self, page: Page, sections: list[Section]) -> None:
        page.state = PageState.READING
        if self._storage is None or page.in_memory:
            return
        if page.buffer is None:
            page.buffer = self._pool.acquire()
        # What rests in memory is read for good.
        chosen = sections if page.tier is Tier.NVME else list(page.layout.sections)
        self.bytes_read += self._transit.read(page, chosen)

    def _arrive(self, page: Page) -> None:
        """Check a page that was read, bring it to the device, and hold it."""
        page.transfers = []
        if not page.in_memory:
            if self._storage is not None:
                self._transit.make_whole(page)
            elif page.is_fresh:
                page.view().initialize()
            page.in_memory = page.tier is not Tier.NVME
        self._bring_to_device(page)
        page.state = PageState.HELD

    def _bring_to_device(self, page: Page) -> None:
        self._transit.bring_to_device(page)
        if page.tier is Tier.DEVICE and page.buffer is not None:
            self._pool.release(page.buffer)
            page.buffer = None

    # -- Out.

    def _rest(self, page: Page) -> None:
        """Let a page be where it is between steps, and take a buffer of the pool back."""
        if page.tier is not Tier.HOST and page.buffer is not None:
            self._pool.release(page.buffer)
            page.buffer = None
        if page.is_fresh:
            page.in_memory = False
            page.state = PageState.FRESH
        else:
            page.state = PageState.RESTING if page.in_memory else PageState.STORED

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
        self._transit.settle(page)
        page.transfers, page.copy = [], None
        self._writing.remove(page)
        self._rest(page)

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
