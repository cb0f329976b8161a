"""Layout of a page: offsets of sections and records, and tensors over them in a buffer.

::

    page    = section | section | ...            each starts at a multiple of SECTOR_BYTES
    section = record | record | ...              one state of all shards of the subgroup
    record  = prefix | data | trailer | padding  what torch.load reads, see records.py

The section of parameters that are their own master, or part of it, comes first. A step writes this
section and never reads it. All bytes that a step reads are therefore one range of the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER, JoinedState, StoredTensor
from tierstore.layout.parameters import ParameterSpec, dtype_name
from tierstore.layout.records import (
    RECORD_PREFIX_BYTES,
    record_nbytes,
    record_prefix,
    record_trailer,
)
from tierstore.layout.subgroups import Subgroup, record_places
from tierstore.units import SECTOR_BYTES, Extent, align_up

BLOCK_BYTES = 8 * 2**20
"""The unit of checksums, and the largest request that an engine sends to a disk."""


@dataclass(frozen=True, slots=True)
class Record:
    """One chunk of one state, and the offset of its framed bytes in the page."""

    parameter: ParameterSpec
    chunk: Chunk
    """Place in the state. The state has the shape ``parameter.state_shape(state)``."""
    state: str
    """Name of the state, or of the stored tensor of an encoded state."""
    dtype: torch.dtype
    offset: int
    is_copy: bool
    """True if a record of another chunk of the parameter has the same elements."""

    @property
    def data_offset(self) -> int:
        """Offset of the raw little-endian elements in the page."""
        return self.offset + RECORD_PREFIX_BYTES

    @property
    def data_nbytes(self) -> int:
        """Number of bytes of the raw elements."""
        return self.chunk.numel * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the elements as a tensor of the chunk's shape over a uint8 page buffer."""
        return self.of_elements(buffer.view(self.dtype))

    def of_elements(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the same as view(), given the page buffer as a tensor of ``dtype``."""
        first = self.data_offset // self.dtype.itemsize
        return elements[first : first + self.chunk.numel].view(self.chunk.sizes)

    def over(self, memory: memoryview) -> torch.Tensor:
        """Return the elements as a tensor whose storage is only this part of a page's memory.

        torch.save() of the tensor writes only these elements.
        """
        return torch.frombuffer(
            memory, dtype=self.dtype, count=self.chunk.numel, offset=self.data_offset
        ).view(self.chunk.sizes)


class RecordViews(NamedTuple):
    """The records of one chunk as tensors over a page buffer."""

    master: torch.Tensor
    """The record MASTER: the master, or the parameter."""
    states: Mapping[str, torch.Tensor | JoinedState]
    """Name of each other stored tensor -> tensor."""


@dataclass(frozen=True, slots=True)
class Section:
    """All records of one state in the page."""

    state: str
    write_only: bool
    """True for values of parameters. Steps do not read them."""
    extent: Extent
    records: tuple[Record, ...]

    def blocks(self) -> list[Extent]:
        """Return the blocks. Each block has one checksum."""
        end = self.extent.offset + self.extent.nbytes
        return [
            Extent(offset, min(BLOCK_BYTES, end - offset))
            for offset in range(self.extent.offset, end, BLOCK_BYTES)
        ]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Sections of one subgroup's page. Made by lay_out()."""

    subgroup: Subgroup
    sections: tuple[Section, ...]
    nbytes: int
    records: Mapping[tuple[str, Chunk], Mapping[str, Sequence[Record]]] = field(repr=False)
    """(parameter name, chunk) -> state name -> its records, in the order of the subgroup. A free
    state may have several."""
    blocks: tuple[Extent, ...] = field(repr=False)
    """All blocks, in the order in which a commit lists their checksums."""
    digest: str
    """Digest of all offsets and chunks. Different layouts have different digests."""

    @property
    def parameter_names(self) -> list[str]:
        """The parameters that have a shard in the page, in order."""
        return [shard.parameter.name for shard in self.subgroup.shards]

    @property
    def readable(self) -> list[Section]:
        """The sections that a step reads."""
        return [section for section in self.sections if not section.write_only]

    @property
    def write_only(self) -> list[Section]:
        """The other sections: the values of parameters that are their own master, or part of it."""
        return [section for section in self.sections if section.write_only]

    @property
    def may_lack_parameters(self) -> bool:
        """True if no step needs the parameter values in the page.

        If a program writes to a parameter with an encoded master, a step compares it with them.
        """
        shards = self.subgroup.shards
        is_encoded = any(shard.parameter.encoding(MASTER) is not None for shard in shards)
        return bool(self.write_only) and not is_encoded

    @property
    def step_nbytes(self) -> int:
        """Bytes of the page that a step writes if the commit adds the parameter values."""
        written = self.readable if self.may_lack_parameters else self.sections
        return sum(section.extent.nbytes for section in written)

    def sections_of(self, state: str) -> list[Section]:
        """Return the sections that hold records of one state."""
        return [section for section in self.sections if section.state == state]

    def blocks_of(self, sections: Sequence[Section]) -> list[tuple[int, Extent]]:
        """Return (index in ``blocks``, block) for all blocks of some sections."""
        offsets = {block.offset for section in sections for block in section.blocks()}
        return [item for item in enumerate(self.blocks) if item[1].offset in offsets]

    def views(self, buffer: torch.Tensor) -> list[RecordViews]:
        """Return the records of every chunk as tensors, in the order of ``records``."""
        elements = {
            dtype: buffer.view(dtype)
            for dtype in {record.dtype for section in self.sections for record in section.records}
        }
        found = []
        for records in self.records.values():
            states: dict[str, torch.Tensor | JoinedState] = {
                state: first.of_elements(elements[first.dtype])
                if not more
                else _joined(state, (first, *more), elements[first.dtype])
                for state, (first, *more) in records.items()
            }
            master = states.pop(MASTER)
            assert isinstance(master, torch.Tensor)
            found.append(RecordViews(master, states))
        return found

    def stamp(self, buffer: torch.Tensor, sections: Iterable[Section]) -> None:
        """Write the framing of the records of some sections, and zeros between records.

        Does not change the data of records.
        """
        page = buffer.numpy()
        for section in sections:
            position = section.extent.offset
            for record in section.records:
                prefix = record_prefix(record.chunk.sizes, record.dtype)
                trailer = record_trailer(record.chunk.sizes, record.dtype)
                page[record.offset : record.data_offset] = np.frombuffer(prefix, np.uint8)
                position = record.data_offset + record.data_nbytes
                page[position : position + len(trailer)] = np.frombuffer(trailer, np.uint8)
                position += len(trailer)
                record_end = record.offset + record_nbytes(record.chunk.sizes, record.dtype)
                page[position:record_end] = 0
                position = record_end
            page[position : section.extent.offset + section.extent.nbytes] = 0


def _joined(state: str, records: Sequence[Record], elements: torch.Tensor) -> JoinedState:
    parts = [(record.chunk, record.of_elements(elements)) for record in records]
    return JoinedState(parts, records[0].parameter.state_shape(state))


def lay_out(subgroup: Subgroup) -> PageLayout:
    """Return the layout of the page of a subgroup. It depends only on the subgroup."""
    states: dict[tuple[str, bool], list[tuple[ParameterSpec, Chunk, StoredTensor]]] = {}
    for shard in subgroup.shards:
        # If the shard has no chunks, another rank owns it.
        for tensor in shard.parameter.stored if shard.chunks else ():
            write_only = tensor.name == MASTER and shard.parameter.stores_parameter
            members = states.setdefault((tensor.name, write_only), [])
            members += [(shard.parameter, chunk, tensor) for chunk in shard.chunks]

    sections = []
    by_chunk: dict[tuple[str, Chunk], dict[str, list[Record]]] = {
        (shard.parameter.name, chunk): {} for shard in subgroup.shards for chunk in shard.chunks
    }
    position = 0
    write_only_first = sorted(states.items(), key=lambda item: not item[0][1])  # Stable.
    for (state, write_only), members in write_only_first:
        start = position
        records = []
        for parameter, chunk, tensor in members:
            of_chunk = by_chunk[parameter.name, chunk][state] = []
            for place in record_places(tensor, chunk):
                is_copy = tensor.is_copy(chunk)
                of_chunk.append(Record(parameter, place, state, tensor.dtype, position, is_copy))
                position += record_nbytes(place.sizes, tensor.dtype)
            records += of_chunk
        position = align_up(position, SECTOR_BYTES)
        sections.append(Section(state, write_only, Extent(start, position - start), tuple(records)))

    return PageLayout(
        subgroup=subgroup,
        sections=tuple(sections),
        nbytes=position,
        records=by_chunk,
        blocks=tuple(block for section in sections for block in section.blocks()),
        digest=_digest(sections),
    )


def _digest(sections: Sequence[Section]) -> str:
    """Return the digest of all offsets and chunks. docs/reference/format.md defines it."""
    places = []
    for section in sections:
        records = [
            [r.parameter.name, r.chunk.offsets, r.chunk.sizes, dtype_name(r.dtype), r.offset]
            for r in section.records
        ]
        places.append([section.state, section.extent.offset, section.extent.nbytes, records])
    return xxhash.xxh3_128_hexdigest(json.dumps(places, separators=(",", ":")).encode())


def layout_digest(layouts: Iterable[PageLayout]) -> str:
    """Return the digest of the layouts of all pages."""
    return xxhash.xxh3_128_hexdigest("".join(layout.digest for layout in layouts).encode())
