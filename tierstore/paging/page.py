"""One page: where its bytes are, and how they move between file, buffer and device."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

from tierstore.errors import CorruptionError
from tierstore.layout.page_layout import PageLayout, Section
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.buffers import Buffer
from tierstore.paging.device import Copy, Device, DeviceBuffer, PlainDevice
from tierstore.paging.profiler_lanes import Lane
from tierstore.paging.tier_plan import Tier
from tierstore.paging.views import Direct, PageView
from tierstore.run.checksums import block_checksums
from tierstore.run.file_names import page_file
from tierstore.run.manifest import PageEntry
from tierstore.storage.base import Storage, Transfer
from tierstore.units import Extent

# Beside those that are stepped, one page is copied in and one out.
MOVING_PAGES = 2


class PageState(enum.Enum):
    """Where a page's bytes are."""

    FRESH = enum.auto()
    STORED = enum.auto()
    RESTING = enum.auto()
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
    direct: Direct
    """Where they and their gradients are."""
    tier: Tier = Tier.NVME
    state: PageState = PageState.FRESH
    entry: PageEntry | None = None
    """What its file holds; None where it was never written."""
    is_fresh: bool = True
    """Whether its content is still to be made, of zeros and the parameters."""
    in_memory: bool = False
    """Whether memory of its own holds its content."""
    is_changed: bool = False
    """Whether that is newer than its file."""
    buffer: Buffer | None = None
    """Host memory: its own in tier HOST, else of the pool and only while it moves."""
    device_buffer: DeviceBuffer | None = None
    """Device memory: its own in tier DEVICE, else only while it is stepped there."""
    transfers: list[Transfer] = field(default_factory=list)
    copy: Copy | None = None
    """The copy under way between ``buffer`` and the device."""
    sections: list[Section] = field(default_factory=list)
    """The sections being read."""

    @property
    def memory(self) -> torch.Tensor:
        """The uint8 memory in which the page is stepped."""
        memory = self.device_buffer or self.buffer
        assert memory is not None
        return memory.tensor

    def view(self) -> PageView:
        """Return the tensors over that memory, to look at or to make outside of a step."""
        return PageView(self.layout, self.parameters, self.memory, self.direct)

    def go_back_to(self, entry: PageEntry) -> None:
        """Take what is in its file for its content."""
        self.state, self.entry, self.is_fresh = PageState.STORED, entry, False


class Transit:
    """Moves the bytes of pages. Whether there is room for them the caller has seen.

    Args:
        storage: the files; None where no page has one.
        run_id: bound into checksums.
        checksums: whether there are any.
    """

    def __init__(self, storage: Storage | None, *, run_id: str, checksums: bool) -> None:
        self._storage = storage
        self._run_id = run_id
        self._checksums = checksums
        self.device: Device = PlainDevice()
        """Where pages are stepped."""
        self._staging: deque[DeviceBuffer] = deque()
        # Starts writes of what is still on its way from the device. No thread before that.
        self._late = ThreadPoolExecutor(1, thread_name_prefix="tierstore-late")
        self._last_late: Future[tuple[PageEntry, Transfer]] | None = None
        self._reads, self._writes = Lane("swap_in"), Lane("swap_out")

    def provide_staging(self, device: Device, sizes: Sequence[int], held: int) -> int:
        """Allocate what pages that do not rest on the device are stepped in there.

        Args:
            device: where pages are stepped from now on.
            sizes: bytes of the pages that rest elsewhere.
            held: how many pages are stepped at once.

        Returns:
            The bytes allocated.
        """
        self.device = device
        self._staging.clear()
        if not device.is_host:
            for _ in range(min(held + MOVING_PAGES, len(sizes))):
                self._staging.append(device.allocate(max(sizes)))
        return sum(buffer.tensor.numel() for buffer in self._staging)

    def read(self, page: Page, sections: list[Section]) -> int:
        """Start to read some sections into the page's buffer; return how many bytes."""
        assert self._storage is not None
        assert page.buffer is not None
        page.sections = sections
        if page.entry is None:
            return 0
        name, nbytes = page_file(page.index, page.entry.copy), 0
        for extent in _merged(sections):
            transfer = self._storage.read(
                name,
                extent,
                page.buffer.memory[extent.offset : extent.offset + extent.nbytes],
            )
            page.transfers.append(transfer)
            nbytes += extent.nbytes
        self._reads.show(f"page {page.index}", list(page.transfers))
        return nbytes

    def make_whole(self, page: Page) -> None:
        """Check what was read into a page's buffer, and make what was not."""
        assert page.buffer is not None
        unread = list(page.layout.sections)
        if page.is_fresh:
            PageView(page.layout, page.parameters, page.buffer.tensor, page.direct).initialize()
        else:
            self._check(page)
            unread = [section for section in unread if section not in page.sections]
        # In place of what was not read lie the bytes of another page.
        page.layout.stamp(page.buffer.tensor, unread)

    def bring_to_device(self, page: Page) -> None:
        """Have what is in a page's buffer where it is stepped."""
        if page.buffer is None:
            return
        host = page.buffer.tensor[: page.layout.nbytes]
        if page.copy is not None:
            page.copy.wait()  # Still on its way from the last step.
        if page.tier is Tier.DEVICE:
            assert page.device_buffer is not None
            self.device.copy_in(host, page.device_buffer).wait()
        elif not self.device.is_host:
            page.device_buffer = self._staging.popleft()
            page.copy = self.device.copy_in(host, page.device_buffer)

    def write(self, page: Page, step: int, copy: str) -> None:
        """Start to write the page's buffer, at once or when what leaves the device is there.

        Its entry is that of the write at once in the former case, after settle() in any.
        """
        if page.copy is None or page.copy.done():
            page.entry, transfer = self._start_write(page, step, copy)
            page.transfers = [transfer]
        else:
            self._last_late = self._late.submit(self._start_write, page, step, copy)
            page.transfers = [_LateTransfer(self._last_late)]

    def leave_device(self, page: Page) -> None:
        """Start to copy a page that was stepped on the device to its buffer."""
        if page.device_buffer is None:
            return
        assert page.buffer is not None
        page.copy = self.device.copy_out(
            page.device_buffer, page.buffer.tensor[: page.layout.nbytes]
        )
        if page.tier is not Tier.DEVICE:
            self._staging.append(page.device_buffer)
            page.device_buffer = None

    def drop(self, page: Page) -> None:
        """Forget what was brought to the device, once nothing uses it any more."""
        if page.copy is not None:
            page.copy.wait()
            page.copy = None
        if page.device_buffer is not None:
            # The next content may come before what was computed with this one has ended.
            self.device.note_use(page.device_buffer)
            if page.tier is not Tier.DEVICE:
                self._staging.append(page.device_buffer)
                page.device_buffer = None

    def settle(self, page: Page) -> None:
        """Have a page's write under way, and its entry that of the write.

        Until then who looks at the page sees what its file held before, however far the write
        is: only the caller changes a page. Raises what kept the write from being under way.
        """
        for transfer in page.transfers:
            if isinstance(transfer, _LateTransfer):
                page.entry = transfer.entry()

    def finish_late(self) -> None:
        """Block until no write waits for a copy any more, whatever became of it."""
        if self._last_late is not None:
            self._last_late.exception()
            self._last_late = None

    def close(self) -> None:
        """Give the device's memory back."""
        self._late.shutdown()
        self._reads.close()
        self._writes.close()
        self._staging.clear()

    def _start_write(self, page: Page, step: int, copy: str) -> tuple[PageEntry, Transfer]:
        """Write what is in a page's buffer, or will be when the copy has ended.

        Changes nothing of the page, since it may run beside the thread whose page it is.
        """
        assert self._storage is not None
        assert page.buffer is not None
        if page.copy is not None:
            page.copy.wait()
        with record_function("tierstore::checksums"):
            checksums = self._checksums_of(page, step, page.layout.blocks)
        entry = PageEntry(copy=copy, step=step, checksums=tuple(checksums))
        extent = Extent(0, page.layout.nbytes)
        memory = page.buffer.memory[: extent.nbytes]
        transfer = self._storage.write(page_file(page.index, copy), extent, memory)
        self._writes.show(f"page {page.index}", [transfer])
        return entry, transfer

    def _check(self, page: Page) -> None:
        """Compare the blocks that were read with the checksums of their commit."""
        entry = page.entry
        assert entry is not None
        if not self._checksums or not entry.checksums:
            return
        blocks = page.layout.blocks_of(page.sections)
        with record_function("tierstore::check"):
            found = self._checksums_of(page, entry.step, [block for _, block in blocks])
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

    def _checksums_of(self, page: Page, step: int, blocks: Iterable[Extent]) -> list[int]:
        if not self._checksums:
            return []
        assert page.buffer is not None
        return block_checksums(
            page.buffer.memory, blocks, run_id=self._run_id, page=page.index, step=step
        )


class _LateTransfer:
    """A write that is started when the copy before it has ended."""

    def __init__(self, future: Future[tuple[PageEntry, Transfer]]) -> None:
        self._future = future

    def entry(self) -> PageEntry:
        """Return what is written, once that is under way. Raises what kept it from being so."""
        entry, _ = self._future.result()
        return entry

    def wait(self) -> None:
        """See Transfer.wait."""
        _, transfer = self._future.result()
        transfer.wait()

    def done(self) -> bool:
        """See Transfer.done."""
        if not self._future.done():
            return False
        if self._future.exception() is not None:
            return True
        _, transfer = self._future.result()
        return transfer.done()


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
