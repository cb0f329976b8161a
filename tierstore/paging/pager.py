"""The pager: the order in which pages are read, held and written, and the buffers they use.

Pages pass in one fixed order: reads run ahead into free buffers, writes drain behind and free
their buffers. When no buffer is free the pager waits for the oldest write, so a small pool makes
a sweep slower and never makes it fail.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from tierstore.errors import StorageError, TierstoreError
from tierstore.paging.buffers import BufferPool
from tierstore.paging.device import Device, DeviceBuffer
from tierstore.paging.page import Content, Motion, Needed, Page, PageFiles, PageWrite
from tierstore.paging.profiler_lanes import profiled
from tierstore.paging.tier_plan import Placement, Tier
from tierstore.run.committer import Progress
from tierstore.run.manifest import PageEntry
from tierstore.storage.base import Transfer


class Pager:
    """Moves pages between their files, one pool of host buffers and one device.

    Used by one thread.

    Args:
        files: the page files.
        committer: decides which slot of a page may be written, and in which step.
    """

    def __init__(self, files: PageFiles, committer: Progress) -> None:
        self.files = files
        self._committer = committer
        # decisions: A page has a content and a motion. Only the pager changes them.
        self._pool = BufferPool(0, 0)
        self._reserved = 0  # Buffers that reading ahead leaves for pages of the device.
        self._device: Device = Device()  # Steps pages.
        self._staging: deque[DeviceBuffer] = deque()  # For pages that do not rest on the device.
        self.staging_bytes = 0
        """Bytes of the staging buffers on the device."""
        self._early: list[Page] = []  # Pages read by prefetch() for a sweep that has not begun.
        self._writing: dict[Page, PageWrite] = {}  # Oldest first.
        self.stall_seconds = 0.0
        self.host_bytes_peak = 0
        self.device_bytes_peak = 0
        self.lost_write = False
        """True if a write failed. The content of its page may be lost."""

    # -- Moving between tiers.
    #
    # A move has two phases, so that a tier never holds more than before or after the move:
    #
    #   from     to       make_way()                         place()
    #   host     nvme     write if changed, free memory      -
    #   device   nvme     write if changed, free memory      -
    #   host     device   copy to the device (*)             -
    #   device   host     -                                  copy to host memory
    #   nvme     host     -                                  allocate; read when needed next
    #   nvme     device   -                                  allocate; read when needed next
    #
    # (*) If other pages leave the device in the same move, neither tier has room for more pages.
    #     The pages in host memory then go through their files: host -> nvme in make_way(),
    #     nvme -> device in place().

    def make_way(self, pages: Sequence[Page], placement: Placement, device: Device) -> None:
        """Free all memory that a placement does not use. place() then finds room.

        Args:
            pages: all pages, in the order of the placement.
            placement: the tier of each page after place().
            device: where pages are stepped.
        """
        self.drop_early()
        tiers = zip(pages, placement.tiers, strict=True)
        moving = [(page, tier) for page, tier in tiers if tier is not page.tier]
        copied = {page for page, tier in moving if page.in_memory and tier is not Tier.NVME}
        if len({page.tier for page in copied}) > 1:
            copied = {page for page in copied if page.tier is Tier.DEVICE}
        leaving = [page for page, _ in moving if page not in copied]
        for page in leaving:
            if page.content is Content.CHANGED:
                self._write(page)
        self.finish_writes()
        for page in leaving:
            if page.in_memory:
                page.content = Content.STORED
            page.tier = Tier.NVME
            page.buffer = page.device_buffer = None
        self._provide_staging(device, 0, 0)
        for page, tier in moving:
            if page in copied and tier is Tier.DEVICE:
                self._move_to_memory(page, tier, device)
        if (placement.buffers, placement.buffer_bytes) != self._pool_shape:
            self.free_pool()

    def place(
        self,
        pages: Sequence[Page],
        placement: Placement,
        device: Device,
        *,
        host_bytes: int,
        device_bytes: int,
        window: int,
    ) -> None:
        """Bring every page to the tier that a placement names, and provide its buffers.

        Call make_way() with the same arguments first.

        Args:
            pages: all pages, in the order of the placement.
            placement: the tier of each page.
            device: where pages are stepped.
            host_bytes: host memory for gradients and parameters, counted in the peak.
            device_bytes: device memory for gradients and parameters, counted in the peak.
            window: most pages that are held at once.
        """
        if (placement.buffers, placement.buffer_bytes) != self._pool_shape:
            self._pool = BufferPool(
                placement.buffers, placement.buffer_bytes, page_locked=device.gpu
            )
            self.files.register(self._pool.memory)
        tiers = list(zip(pages, placement.tiers, strict=True))
        # Pages that leave the device come first, to make room on it.
        for page, tier in sorted(tiers, key=lambda pair: pair[0].tier is not Tier.DEVICE):
            if tier is not page.tier:
                self._move_to_memory(page, tier, device)
        self._reserved = int(Tier.DEVICE in placement.tiers)
        sizes = [page.layout.nbytes for page in pages]
        staging = (0, 0) if device.is_host else placement.staging(sizes, window)
        self._provide_staging(device, *staging)
        host_bytes += placement.host_bytes(sizes)
        self.host_bytes_peak = max(self.host_bytes_peak, host_bytes)
        device_bytes += math.prod(staging) + placement.in_tier(Tier.DEVICE, sizes)
        self.device_bytes_peak = max(self.device_bytes_peak, device_bytes)

    @property
    def _pool_shape(self) -> tuple[int, int]:
        return self._pool.count, self._pool.buffer_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the buffers on the host that pages pass through."""
        return math.prod(self._pool_shape)

    @property
    def held_max(self) -> int | None:
        """Most pages that may be held at once; None for any number."""
        if not self._pool.count:
            return None
        # The next page needs one buffer; a page that is written from the device may need another.
        return max(1, self._pool.count - 1 - self._reserved)

    def _provide_staging(self, device: Device, count: int, nbytes: int) -> None:
        """Set the device that steps pages, and allocate staging buffers there."""
        self._device = device
        self._staging.clear()
        self.staging_bytes = count * nbytes
        for _ in range(count):
            self._staging.append(device.allocate(nbytes))

    def _move_to_memory(self, page: Page, tier: Tier, device: Device) -> None:
        """Give a page memory of a tier, and copy its content from its old memory."""
        nbytes = page.layout.nbytes
        if page.copy is not None:
            page.copy.wait()
            page.copy = None
        # Memory and tier change together, last: an interrupt leaves the page as it was.
        if tier is Tier.HOST:
            buffer = BufferPool(1, nbytes, page_locked=device.gpu).acquire()
            if page.device_buffer is not None:
                device.copy_out(page.device_buffer, buffer.tensor[:nbytes]).wait()
            page.buffer, page.device_buffer, page.tier = buffer, None, tier
        else:
            memory = device.allocate(nbytes)
            if page.buffer is not None:
                device.copy_in(page.buffer.tensor[:nbytes], memory).wait()
            page.buffer, page.device_buffer, page.tier = None, memory, tier

    # -- The stream.

    def prefetch(self, pages: Iterable[Page]) -> None:
        """Start to read the sections of these pages that a step needs, while buffers are free.

        A stream over the same pages then begins with these reads. The stream also raises the errors
        of this call: a lost write stays among the writes, and a read that did not start is started
        again. This call blocks only after such a failure.
        """
        try:
            self._reclaim()
            for page in pages:
                rests = page.motion is Motion.AT_REST
                if page.motion is Motion.READING or (rests and page.in_memory):
                    continue
                is_readable = rests and page.content is not Content.FRESH
                if not is_readable or not self._has_buffer(page, self._reserved):
                    return
                self._early.append(page)
                self._swap_in(page, Needed.STEP)
        except TierstoreError:
            self.drop_early()

    def drop_early(self) -> None:
        """Take back the buffers of pages that prefetch() has read."""
        early, self._early = self._early, []
        self._drop(early)

    def stream(self, pages: Sequence[Page], needed: Needed) -> Generator[Page, None, None]:
        """Yield pages in order, each HELD, with the needed sections read and checked.

        The caller gives every page back by swap_out() or release(), the oldest first, and holds
        fewer than ``held_max`` pages when it asks for the next one. It asks for exactly
        ``len(pages)`` pages, gives the last ones back, and closes the stream. Example, with a
        window of two pages:

            with contextlib.closing(pager.stream(pages, Needed.STEP)) as stream:
                held = deque()
                for _ in pages:
                    if len(held) == 2:
                        pager.swap_out(held.popleft())
                    held.append(next(stream))
                    step(held[-1].view())
                while held:
                    pager.swap_out(held.popleft())

        When the stream is closed early, or a read fails, the pages that are read or held are
        released. After an interrupt within the pager, call reset().

        Raises:
            StorageError: a page could not be read, or a page before it could not be written.
            CorruptionError: a page is not what was written.
        """
        waiting, ahead, held = deque(pages), deque[Page](), deque[Page]()
        try:
            self._drop_unwanted(waiting, needed)
            while waiting or ahead:
                self._read_ahead(waiting, ahead, needed)
                if (arrival := ahead[0].arrival) is not None:
                    self._wait(arrival.is_set, arrival.result)
                # Writes have ended meanwhile and freed buffers. Start reads now, because the disk
                # would be idle while this thread steps the page.
                self._read_ahead(waiting, ahead, needed)
                self._arrive(ahead[0])
                held.append(ahead[0])
                ahead.popleft()
                yield held[-1]
                while held and held[0].motion is not Motion.HELD:
                    held.popleft()
        finally:
            self._drop(dict.fromkeys([*held, *ahead, *self._early]))
            self._early.clear()

    def leaves_out_parameters(self, page: Page) -> bool:
        """Return whether the last step leaves the parameter values of a page to its commit.

        A step whose commit is due writes them itself.
        """
        committer = self._committer
        adds = committer.adds_parameters and not committer.is_due
        return adds and page.layout.may_lack_parameters

    def may_leave_out_parameters(self, page: Page) -> bool:
        """Return whether a commit can add the parameter values of a page to its file."""
        return self._committer.makes_commits and page.layout.may_lack_parameters

    def swap_out(self, page: Page, *, lacks_parameters: bool | None = None) -> None:
        """Give back a held page that was changed.

        A page that stays in memory is written for commits only: now, if the next commit is due.

        Args:
            page: the page.
            lacks_parameters: whether to leave parameter values to the commit; None: as a step.
        """
        if lacks_parameters is None:
            lacks_parameters = self.leaves_out_parameters(page)
        page.lacks_parameters = lacks_parameters
        if page.is_empty:
            self._rest(page)
        elif page.tier is Tier.NVME or self._committer.is_due:
            self._write(page)
        else:
            self._keep(page)

    def release(self, page: Page) -> None:
        """Give back a held page that was not changed, or discard its change."""
        self._drop_from_device(page)
        self._rest(page)

    def load(self, pages: Iterable[Page]) -> None:
        """Read the pages that stay in memory, unless they are in memory already."""
        absent = [p for p in pages if p.content is Content.STORED and p.tier is not Tier.NVME]
        with contextlib.closing(self.stream(absent, Needed.NOTHING)) as stream:
            for page in stream:
                self.release(page)

    # -- Writes behind.

    def write_changed(self, pages: Iterable[Page]) -> list[Transfer]:
        """Start to write all pages that are newer than their files, for a commit.

        Returns:
            The writes in flight, earlier ones included. The entries of their pages are set.
        """
        pages = list(pages)
        if any(page.lacks_parameters for page in pages):
            self.drop_early()  # The writes need the buffers, and some early pages may be written.
        for page in pages:
            if page.content is Content.CHANGED:
                self._write(page)
            if page.lacks_parameters:
                self._add_parameters(page)
        for page, write in self._writing.items():
            page.entry, _ = write.started()
        return list(self._writing.values())

    def finish_writes(self) -> None:
        """Wait for all writes. Raises StorageError for the first failed write."""
        while self._writing:
            self._finish_write()

    def reset(self, pages: Sequence[Page], entries: Mapping[int, PageEntry]) -> None:
        """Go back to the content of the page files, from any state of the pages.

        Waits for all transfers and takes all buffers back. Pages without an entry start afresh.

        Args:
            pages: all pages.
            entries: page number -> content of the page's file.
        """
        self._abandon_transfers(pages)
        self.lost_write = False
        for page in pages:
            if page.tier is not Tier.HOST:
                page.buffer = None
            page.arrival = None
            page.versions, page.written = {}, frozenset()
            page.left, page.lacks_parameters = {}, False
            page.entry = entries.get(page.index)
            page.content = Content.FRESH if page.entry is None else Content.STORED
            page.motion = Motion.AT_REST
        self._pool.release_all()

    def free(self, pages: Iterable[Page]) -> None:
        """Free the memory of pages whose content is not needed any more."""
        for page in pages:
            page.buffer = page.device_buffer = None
            page.tier = Tier.NVME

    def discard(self, pages: Iterable[Page]) -> None:
        """Forget the content of pages that are at rest, and free their memory."""
        pages = list(pages)
        for page in pages:
            self._drop_from_device(page)
            page.content, page.entry = Content.LOADED, None
            page.left, page.lacks_parameters = {}, False
        self.free(pages)

    def free_pool(self) -> None:
        """Free all buffers of the pool, while no page has a buffer."""
        self.files.register(memoryview(b""))
        self._pool = BufferPool(0, 0)

    def close(self, pages: Iterable[Page]) -> None:
        """Free all memory, after waiting until no transfer uses it."""
        pages = list(pages)
        self._abandon_transfers(pages)
        self.files.close()
        self._staging.clear()
        for page in pages:
            page.buffer = page.device_buffer = None
        self.free_pool()

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Count the time spent in the block as waiting."""
        started = time.perf_counter()
        try:
            with profiled("tierstore::stall"):
                yield
        finally:
            self.stall_seconds += time.perf_counter() - started

    def _abandon_transfers(self, pages: Iterable[Page]) -> None:
        """Block until nothing is in flight. Ignores errors."""
        self.files.drain()
        for page in pages:
            self._drop_from_device(page)
        self._writing.clear()
        self._early.clear()

    # -- In.

    def _drop_unwanted(self, pages: Iterable[Page], needed: Needed) -> None:
        """Keep the prefetched pages that a stream begins with, if read as needed; drop the rest.

        The stream may have another order than the sweep that was expected. A page that comes first
        in the stream may then need the buffer of a prefetched page.
        """
        early, wanted = set(self._early), []
        for page in pages:
            if page in early and page.sections == page.sections_for(needed):
                wanted.append(page)
            elif page.buffer is None and not page.in_memory:
                break
        unwanted = early.difference(wanted)
        self._early = wanted
        self._drop(unwanted)

    def _read_ahead(self, waiting: deque[Page], ahead: deque[Page], needed: Needed) -> None:
        """Start to read as many of the next pages as there are free buffers; at least one.

        Example with three buffers, pages A to D of tier NVME, and one page held at a time:

            buffers                          call
            A reading  B reading  C reading  the first; no buffer is left for D
            A held     B reading  C reading  after A arrived
            A writing  B held     C reading  the caller gave A back and B arrived
            D reading  B writing  C held     A's write has ended: D takes the buffer

        The call blocks only if ``ahead`` is empty. This happens if C was also given back before
        A's write ended. The call then waits for the oldest write.
        """
        while waiting:
            self._reclaim()
            page = waiting[0]
            if page.motion is Motion.WRITING:
                if ahead:
                    return
                self._finish_write(page)
            elif page.motion is Motion.READING:  # By prefetch().
                ahead.append(waiting.popleft())
                self._early.remove(page)
            elif not self._has_buffer(page, self._reserved if ahead else 0):
                if ahead:
                    return
                self._finish_write()
            else:
                # Put it in ``ahead`` first: after an interrupt below, the page is then dropped.
                ahead.append(waiting.popleft())
                self._swap_in(page, needed)

    def _has_buffer(self, page: Page, reserved: int) -> bool:
        """Return whether a page could be read now, with ``reserved`` buffers left free."""
        needs_buffer = self._pool.count and page.buffer is None and not page.in_memory
        return not needs_buffer or self._pool.free_count > reserved

    def _swap_in(self, page: Page, needed: Needed) -> None:
        """Start to read a page, unless it is in memory."""
        page.motion = Motion.READING
        if not page.in_memory:
            if page.buffer is None and self._pool.count:
                page.buffer = self._pool.acquire()
            page.sections = page.sections_for(needed)
            page.arrival = self.files.read(page)

    def _arrive(self, page: Page) -> None:
        """Check a page that was read, bring it to the device, and hold it."""
        page.arrival = None
        if not page.in_memory:
            if page.content is Content.FRESH:
                self.files.initialize(page)
            if page.tier is not Tier.NVME and page.content is Content.STORED:
                page.content = Content.LOADED
        self._bring_to_device(page)
        page.motion = Motion.HELD

    def _bring_to_device(self, page: Page) -> None:
        """Start to copy a page from its buffer to device memory for the step."""
        if page.buffer is None:
            return
        if page.copy is not None:
            page.copy.wait()  # The copy from the device, of the last step.
        if page.tier is not Tier.DEVICE and self._device.is_host:
            return
        host = page.buffer.tensor[: page.layout.nbytes]
        if page.tier is Tier.DEVICE:
            assert page.device_buffer is not None
            self._device.copy_in(host, page.device_buffer).wait()
            self._pool.release(page.buffer)
            page.buffer = None
        else:
            page.device_buffer = self._staging.popleft()
            page.copy = self._device.copy_in(host, page.device_buffer)

    # -- Out.

    def _write(self, page: Page) -> None:
        """Start to write a page to the slot that no commit needs."""
        with self.stalled():
            slot = self._committer.claim_slot(page.index)
        self._provide_buffer(page)
        self._leave_device(page)
        page.content = Content.STORED if page.tier is Tier.NVME else Content.LOADED
        self._writing[page] = self.files.write(page, self._committer.step, slot)
        page.motion = Motion.WRITING

    def _add_parameters(self, page: Page) -> None:
        """Start to write the values of parameters that the file of a page at rest lacks.

        The last step wrote this file and no commit needs it, so no slot is claimed.
        """
        # decisions: Values of float32 parameters are written for commits only.
        self._provide_buffer(page)
        self._writing[page] = self.files.add_parameters(page, self._writing.get(page))
        page.motion = Motion.WRITING
        page.left, page.lacks_parameters = {}, False

    def _provide_buffer(self, page: Page) -> None:
        """Give a page a buffer for its write, unless it has one."""
        if page.buffer is None:
            while not self._pool.free_count:
                self._finish_write()
            page.buffer = self._pool.acquire()

    def _keep(self, page: Page) -> None:
        """Keep a changed page in memory, newer than its file."""
        if page.tier is Tier.HOST:
            self._leave_device(page)
        page.content = Content.CHANGED
        self._rest(page)

    def _leave_device(self, page: Page) -> None:
        """Start to copy a page that was stepped on the device to its buffer."""
        if page.device_buffer is None:
            return
        assert page.buffer is not None
        host = page.buffer.tensor[: page.layout.nbytes]
        page.copy = self._device.copy_out(page.device_buffer, host)
        self._free_staging(page)

    def _drop_from_device(self, page: Page) -> None:
        """Free the device copy of a page, after waiting until nothing uses it."""
        if page.copy is not None:
            page.copy.wait()
            page.copy = None
        if page.device_buffer is not None:
            # The next content must not arrive before the computation on this content has ended.
            self._device.note_use(page.device_buffer)
            self._free_staging(page)

    def _free_staging(self, page: Page) -> None:
        if page.device_buffer is not None and page.tier is not Tier.DEVICE:
            self._staging.append(page.device_buffer)
            page.device_buffer = None

    def _rest(self, page: Page) -> None:
        """Take back the pool's buffer of a page that is neither read, held nor written."""
        if page.tier is not Tier.HOST and page.buffer is not None:
            self._pool.release(page.buffer)
            page.buffer = None
        page.motion = Motion.AT_REST

    def _reclaim(self) -> None:
        """Take back the buffers of writes that have ended."""
        for page in [page for page, write in self._writing.items() if write.done()]:
            self._finish_write(page)

    def _finish_write(self, page: Page | None = None) -> None:
        """Wait for the write of a page, or for the oldest write, and take back its buffer."""
        page = page or next(iter(self._writing))
        write = self._writing[page]
        try:
            self._wait(write.done(), write.wait)
        except StorageError:
            self.lost_write = True
            raise
        page.entry, _ = write.started()
        page.copy = None
        del self._writing[page]
        self._rest(page)

    def _drop(self, pages: Iterable[Page]) -> None:
        """Release pages that are read or held, once no transfer uses their buffers."""
        pages = [page for page in pages if page.motion in (Motion.READING, Motion.HELD)]
        if pages:
            # Wait for all transfers: after an interrupt, ``page.arrival`` may lack one.
            self.files.drain()
        for page in pages:
            page.arrival = None
            self.release(page)

    def _wait(self, done: bool, wait: Callable[[], object]) -> None:
        # Measuring takes longer than checking ``done``.
        with contextlib.nullcontext() if done else self.stalled():
            wait()
