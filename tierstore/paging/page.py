"""Pages: their content, their movement and their files."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from tierstore.errors import CorruptionError
from tierstore.layout.dtensors import local_tensor, version_of
from tierstore.layout.encodings import MASTER
from tierstore.layout.ownership import SharedSubgroup
from tierstore.layout.page_layout import PageLayout, RecordViews, Section
from tierstore.layout.parameters import PagedParameter
from tierstore.paging.buffers import Buffer
from tierstore.paging.device import Copy, DeviceBuffer
from tierstore.paging.profiler_lanes import Lane, profiled
from tierstore.paging.tier_plan import Tier
from tierstore.paging.views import LeftSource, PageView, Source
from tierstore.run.checksums import block_checksums
from tierstore.run.file_names import page_file
from tierstore.run.manifest import PageEntry
from tierstore.storage.base import Storage, Transfer
from tierstore.threads import Result, Threads
from tierstore.units import Extent


def checksum_threads(cores: int) -> int:
    """Return the threads for each direction. One thread computes checksums at about 10 GB/s."""
    return min(4, max(1, cores // 4))


_Started = tuple[PageEntry, list[Transfer]]
"""The content of a page's file after a write, and the transfers of the write."""


class Content(enum.Enum):
    """Place of the newest content of a page."""

    FRESH = enum.auto()
    """Nowhere yet. The first read makes it, from zeros and the parameters."""
    STORED = enum.auto()
    """In the page's file only."""
    LOADED = enum.auto()
    """In the page's file and in memory that the page keeps."""
    CHANGED = enum.auto()
    """In memory that the page keeps. The file is absent or older."""


class Motion(enum.Enum):
    """The current use of a page.

    A page goes AT_REST -> READING -> HELD -> AT_REST, or HELD -> WRITING -> AT_REST. A page that
    is CHANGED and AT_REST is also written by a commit and by a move to another tier.
    """

    AT_REST = enum.auto()
    READING = enum.auto()
    HELD = enum.auto()
    """The optimizer, or another reader of the stream, has the page."""
    WRITING = enum.auto()


class Needed(enum.Enum):
    """The sections of each page that the reader of a stream needs."""

    STEP = enum.auto()
    """All but the masters that are parameters themselves."""
    MASTERS = enum.auto()
    NOTHING = enum.auto()


@dataclass(slots=True, eq=False)
class Page:
    """This rank's page of one subgroup. Only the Pager changes it.

    A rank that owns nothing of the subgroup has an empty page, without memory and file.
    """

    index: int
    """Number of the page among the pages of this rank that are not empty."""
    layout: PageLayout
    shared: SharedSubgroup
    """The subgroup, with the part that each rank owns."""
    parameters: Mapping[str, PagedParameter]
    """The parameters of the subgroup, by name."""
    source: Source
    """Returns the parameters and their gradients."""
    tier: Tier = Tier.NVME
    content: Content = Content.FRESH
    motion: Motion = Motion.AT_REST
    entry: PageEntry | None = None
    """The content of the page's file; None if nothing was written."""
    buffer: Buffer | None = None
    """Host memory, kept in tier HOST; else a pool buffer, present only while the page moves."""
    device_buffer: DeviceBuffer | None = None
    """Device memory, kept in tier DEVICE; else present only while the device steps the page."""
    copy: Copy | None = None
    """The copy in flight between ``buffer`` and the device."""
    sections: list[Section] = field(default_factory=list)
    """The sections that were last read into ``buffer``."""
    arrival: Result[None] | None = None
    """The reading and checking of ``sections``, until the page has arrived."""
    versions: dict[str, int] = field(default_factory=dict)
    """Parameter with an encoded master -> its version when the page last had its value."""
    written: frozenset[str] = frozenset()
    """Parameters of ``versions`` that a program has written to since. A step then also reads their
    values in the page."""
    lacks_parameters: bool = False
    """True if the file lacks the values of parameters. Steps do not read them; commits add them."""
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name -> this rank's tensor of each parameter as the step left it, if the file lacks its
    values. A program may convert the parameter before the commit."""
    takes_parameters: bool = False
    """True if a commit takes the parameters as they are, not as a step left them. Set when states
    are loaded, because the program may load the parameters later."""
    _noted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Parameter -> version and address when the page, or ``left``, had its value."""
    _samples: dict[str, torch.Tensor] = field(default_factory=dict)
    """Two elements of some parameters at that time: writes through ``.data`` change no version."""

    @property
    def is_empty(self) -> bool:
        """True if this rank owns nothing of the subgroup."""
        return not self.layout.nbytes

    @property
    def in_memory(self) -> bool:
        """True if memory that the page keeps holds its content."""
        return self.content in (Content.LOADED, Content.CHANGED)

    @property
    def memory(self) -> torch.Tensor:
        """The uint8 memory in which the page is stepped."""
        memory = self.device_buffer or self.buffer
        if memory is None:
            assert self.is_empty
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return memory.tensor

    def view(self, source: Source | None = None, present: Collection[str] = ()) -> PageView:
        """Return the tensors over ``memory``.

        Args:
            source: finds parameters and gradients; None: the tensors themselves.
            present: names of the parameters that have a gradient on any rank; empty outside of a
                step.
        """
        records = _views(self.layout, self.device_buffer or self.buffer)
        return PageView(self.layout, self.parameters, records, source or self.source, present)

    def view_of_buffer(self, source: Source) -> PageView:
        """Return the tensors over ``buffer``, also if the device steps the page."""
        return PageView(self.layout, self.parameters, _views(self.layout, self.buffer), source)

    @property
    def left_source(self) -> Source:
        """The parameters as the last step left them, while the file lacks their values."""
        return LeftSource(self.source.local_chunks, self.left)

    @property
    def filled(self) -> list[Section]:
        """The sections that the file has, or will have once it is written."""
        return self.layout.readable if self.lacks_parameters else list(self.layout.sections)

    def note_parameters(self) -> None:
        """Note that the page, or ``left``, has the values of its parameters."""
        self.written = frozenset()
        self.left = {
            name: local_tensor(parameter.tensor).detach()
            for name, parameter in self.parameters.items()
            if self.lacks_parameters
        }
        self.versions = {
            name: version_of(parameter.tensor)
            for name, parameter in self.parameters.items()
            if MASTER in parameter.encodings
        }
        tensors = self._local_parameters()
        self._noted, self._samples = _marks(tensors), _samples_of(tensors)
        self.takes_parameters = False

    @property
    def was_edited(self) -> bool:
        """True if a program has changed a parameter since the page had its values.

        Samples on a device are not compared, because this would wait for the device.
        """
        if not self._noted:
            return False
        tensors = self._local_parameters()
        if _marks(tensors) != self._noted:
            return True
        here = {name: one for name, one in self._samples.items() if one.device.type == "cpu"}
        return bool(here) and _changed(here, _samples_of(tensors)) is not None

    @property
    def left_was_changed(self) -> str | None:
        """Name of a parameter in ``left`` that has changed since the step, or None.

        Freed memory does not count as a change: the commit refuses it.
        """
        if self.takes_parameters:
            return None
        for name, left in self.left.items():
            if not left.is_inference() and left._version != self._noted[name][0]:
                return name
        return _changed(self._samples, _samples_of(self.left))

    def _local_parameters(self) -> dict[str, torch.Tensor]:
        return {name: local_tensor(p.tensor) for name, p in self.parameters.items()}

    def look_for_writes(self) -> None:
        """Find the parameters with encoded masters that were written to since they were noted."""
        self.written = frozenset(
            name
            for name, version in self.versions.items()
            if name in self.parameters and version_of(self.parameters[name].tensor) != version
        )

    def sections_for(self, needed: Needed) -> list[Section]:
        """Return the sections to read. A page that stays in memory is read in full, once."""
        if self.tier is not Tier.NVME or (needed is Needed.STEP and self.written):
            return self.filled
        if needed is Needed.STEP:
            return self.layout.readable
        return self.layout.sections_of(MASTER) if needed is Needed.MASTERS else []


def _marks(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {
        name: (0 if t.is_inference() else t._version, t.data_ptr()) for name, t in tensors.items()
    }


_SAMPLED_MAX = 8  # Parameters of a page: each takes about 5 us in a step.


def _samples_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the first and the last element of some parameters that have elements."""
    step = -(-len(tensors) // _SAMPLED_MAX) or 1
    found = {}
    for name, tensor in list(tensors.items())[::step]:
        if tensor.numel() and tensor.untyped_storage().nbytes():
            values = tensor.detach()
            found[name] = torch.stack([values[(index,) * values.ndim] for index in (0, -1)])
    return found


def _changed(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Return a name whose samples differ in a bit, or None. Equal NaN bits are equal."""
    for name in one.keys() & other.keys():
        before, now = one[name], other[name]
        same = before.dtype == now.dtype and before.device == now.device
        if not same or not torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
            return name
    return None


class PageFiles:
    """The page files of one rank. Moves bytes, and changes no page.

    Its threads check pages that were read, and compute the checksums of pages to be written. The
    training thread touches the bytes of a page only to step it.

    Args:
        storage: the files.
        run_id: bound into checksums.

    A store without a directory has an empty MemoryStorage here: its pages stay in memory and are
    never written.
    """

    def __init__(self, storage: Storage, *, run_id: str) -> None:
        self._storage = storage
        self._run_id = run_id
        self._reads, self._writes = Lane("swap_in"), Lane("swap_out")
        self.bytes_read = 0
        self.bytes_written = 0

    def register(self, memory: memoryview) -> None:
        """Register the memory of all page buffers. Empty memory ends the registration."""
        self._storage.register(memory)

    def start_threads(self) -> None:
        """Start the threads now, so that opening the store fails if the system starts none."""
        _ = self._in, self._out

    def read(self, page: Page) -> Result[None] | None:
        """Start to read ``page.sections`` into the page's buffer, and to check them.

        The result may be CorruptionError: a block has another checksum than its commit says.
        """
        if page.entry is None:
            return None
        assert page.buffer is not None
        transfers = []
        name = page_file(page.index, page.entry.slot)
        for extent in _merged(page.sections):
            memory = page.buffer.memory[extent.offset : extent.offset + extent.nbytes]
            transfers.append(self._storage.read(name, extent, memory))
            self.bytes_read += extent.nbytes
        self._reads.show(f"page {page.index}", transfers)
        return self._in.submit(self._finish_read, page, transfers)

    def _finish_read(self, page: Page, transfers: Sequence[Transfer]) -> None:
        """Wait for the sections of a page, check them, and frame the others. Runs on a thread."""
        for transfer in transfers:
            transfer.wait()
        assert page.buffer is not None
        self._check(page, page.buffer.memory, page.sections)
        absent = [section for section in page.layout.sections if section not in page.sections]
        # The absent sections still hold the records of another page.
        page.layout.stamp(page.buffer.tensor, absent)

    def initialize(self, page: Page) -> None:
        """Make the first content of a page."""
        if page.buffer is None:  # Without a directory a page of the device has no other memory.
            page.view().initialize()
            return
        page.view_of_buffer(page.source).initialize()
        page.layout.stamp(page.buffer.tensor, page.layout.sections)

    def write(self, page: Page, step: int, slot: str) -> PageWrite:
        """Start to write a page's buffer, after a copy from the device that is in flight.

        If the page lacks the values of parameters, only the other sections are written.
        """
        unknown = (0,) * len(page.layout.blocks)
        entry = PageEntry(slot=slot, step=step, checksums=unknown)
        return self._write(page, entry, page.filled)

    def add_parameters(self, page: Page, before: PageWrite | None) -> PageWrite:
        """Start to write the values of parameters that a page's file lacks.

        Args:
            page: the page.
            before: the write of its other sections, if it is in flight.

        Returns:
            Both writes.
        """
        assert page.buffer is not None
        if page.copy is not None:  # The copy covers the whole page.
            page.copy.wait()
        # A write of other sections may be in flight. These bytes of the buffer are not part of it.
        page.view_of_buffer(page.left_source).read_parameters()
        page.layout.stamp(page.buffer.tensor, page.layout.write_only)
        if before is None:
            assert page.entry is not None
            return self._write(page, page.entry, page.layout.write_only)
        self.bytes_written += _nbytes(page.layout.write_only)
        return PageWrite(self._out.submit(self._start_added, page, before))

    def _write(self, page: Page, entry: PageEntry, sections: Sequence[Section]) -> PageWrite:
        self.bytes_written += _nbytes(sections)
        return PageWrite(self._out.submit(self._start_write, page, entry, sections))

    def _start_added(self, page: Page, before: PageWrite) -> _Started:
        """Start to write values of parameters after the other sections. Runs on a thread."""
        entry, others = before.started()
        entry, transfers = self._start_write(page, entry, page.layout.write_only)
        return entry, [*others, *transfers]

    def map(self, page: Page) -> memoryview | None:
        """Return the page's file as private memory; None if the page is newer than its file.

        The memory costs no RAM and keeps its content when the page is written again.

        Raises:
            CorruptionError: the file is not what was written.
        """
        if page.entry is None or page.content is Content.CHANGED:
            return None
        memory = self._storage.map(page_file(page.index, page.entry.slot))
        if page.content is Content.LOADED:  # The page may never have been read from its file.
            self._check(page, memory, page.filled)
        return memory

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros that costs disk space instead of memory."""
        if math.prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        memory = self._storage.scratch(math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def drain(self) -> None:
        """Block until nothing is in flight. Ignores errors."""
        # Each call waits for transfers or begins some. An interrupt may have lost a call's result.
        self._end_threads()
        self._storage.drain()

    def close(self) -> None:
        """End the threads."""
        self._end_threads()
        self._reads.close()
        self._writes.close()

    def _end_threads(self) -> None:
        """End the threads after all their calls. The next call starts new threads."""
        for name in {"_in", "_out"} & vars(self).keys():
            getattr(self, name).close()
            del vars(self)[name]  # After an interrupt above, the next drain() waits for the rest.

    # Threads of one direction may wait for transfers and copies, never for the other direction.

    @cached_property
    def _in(self) -> Threads:
        return Threads(checksum_threads(len(os.sched_getaffinity(0))), "tierstore-in")

    @cached_property
    def _out(self) -> Threads:
        return Threads(checksum_threads(len(os.sched_getaffinity(0))), "tierstore-out")

    def _start_write(self, page: Page, entry: PageEntry, sections: Sequence[Section]) -> _Started:
        """Start a write once the copy from the device has ended. Runs on a thread.

        Args:
            page: the page.
            entry: the content of the file after the write, without checksums of these sections.
            sections: the sections to write.
        """
        assert page.buffer is not None
        if page.copy is not None:
            page.copy.wait()
        memory, name = page.buffer.memory, page_file(page.index, entry.slot)
        with profiled("tierstore::checksums"):
            found = self._checksums_of(page, memory, sections, entry.step)
        checksums = (found.get(i, known) for i, known in enumerate(entry.checksums))
        entry = replace(entry, checksums=tuple(checksums))
        transfers = [
            self._storage.write(name, extent, memory[extent.offset : extent.offset + extent.nbytes])
            for extent in _merged(sections)
        ]
        self._writes.show(f"page {page.index}", transfers)
        return entry, transfers

    def _check(self, page: Page, memory: memoryview, sections: Sequence[Section]) -> None:
        """Compare the blocks of some sections in memory with the checksums of their commit."""
        entry = page.entry
        assert entry is not None
        with profiled("tierstore::check"):
            found = self._checksums_of(page, memory, sections, entry.step)
        for number, checksum in found.items():
            if checksum != entry.checksums[number]:
                name, block = page_file(page.index, entry.slot), page.layout.blocks[number]
                raise CorruptionError(
                    f"{self._storage.home(name).location}/{name}: the "
                    f"{block.nbytes} bytes at offset {block.offset} are not those written in "
                    f"step {entry.step} (checksum {checksum:016x}, expected "
                    f"{entry.checksums[number]:016x}). The disk, memory or another "
                    "program changed them: go back to a checkpoint of the run, if there is one"
                )

    def _checksums_of(
        self, page: Page, memory: memoryview, sections: Sequence[Section], step: int
    ) -> dict[int, int]:
        """Return number of a block -> checksum, for all blocks of some sections of a page."""
        blocks = dict(page.layout.blocks_of(sections))
        found = block_checksums(
            memory, blocks.values(), run_id=self._run_id, page=page.index, step=step
        )
        return dict(zip(blocks, found, strict=True))


class PageWrite:
    """A page write in flight.

    Args:
        start: gives the entry that is written and the transfers, once they have started.
    """

    def __init__(self, start: Result[_Started]) -> None:
        self._start = start

    def started(self) -> _Started:
        """Wait until the write has started; return its entry and transfers. Raises its error."""
        return self._start.result()

    def wait(self) -> None:
        """Block until the write has ended. Raises StorageError if it failed."""
        for transfer in self.started()[1]:
            transfer.wait()

    def done(self) -> bool:
        """Return whether wait() would not block."""
        if not self._start.is_set:
            return False
        if self._start.error is not None:
            return True
        return all(transfer.done() for transfer in self.started()[1])


def _views(layout: PageLayout, memory: Buffer | DeviceBuffer | None) -> Sequence[RecordViews]:
    """Return the records of a page as tensors. ``memory`` keeps them for the next step."""
    if memory is None:
        assert not layout.nbytes
        return ()
    if memory.viewed is None or memory.viewed[0] is not layout:
        with torch.inference_mode(False):  # A step outside of inference mode may change them.
            memory.viewed = layout, layout.views(memory.tensor)
    return memory.viewed[1]


def _nbytes(sections: Sequence[Section]) -> int:
    return sum(section.extent.nbytes for section in sections)


def _merged(sections: Sequence[Section]) -> list[Extent]:
    """Return the ranges of some sections, with adjacent ranges joined."""
    extents: list[Extent] = []
    for section in sections:
        last = extents[-1] if extents else None
        if last is not None and last.offset + last.nbytes == section.extent.offset:
            extents[-1] = Extent(last.offset, last.nbytes + section.extent.nbytes)
        else:
            extents.append(section.extent)
    return extents
