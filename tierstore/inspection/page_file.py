"""Check of one page file against the commit: length, checksums and framing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierstore.errors import CorruptionError
from tierstore.inspection.reader import File, Reader
from tierstore.layout.page_layout import PageLayout
from tierstore.layout.records import (
    RECORD_PREFIX_BYTES,
    record_length,
    record_prefix,
    record_trailer,
)
from tierstore.run.commit import CommittedPage
from tierstore.units import Extent

_NAMED_MAX = 3


def check_page(reader: Reader, name: str, page: CommittedPage) -> None:
    """Record the faults of one page of a commit.

    Args:
        reader: of the directory.
        name: path of the page file for the reader.
        page: the page.
    """
    layout = page.layout
    with reader.record_faults(name), reader.advancing(layout.nbytes), reader.open(name) as file:
        file.drop_cached()
        if file.nbytes != layout.nbytes:
            raise CorruptionError(f"has {file.nbytes} bytes, expected {layout.nbytes}")
        if _check_blocks(reader, file, page):
            _check_framing(file, layout)


def _check_blocks(reader: Reader, file: File, page: CommittedPage) -> bool:
    """Return whether every block can be read and has its checksum."""
    blocks = page.layout.blocks
    unreadable: list[str] = []
    changed: list[str] = []
    for index, block in enumerate(blocks):
        try:
            fault = page.block_fault(index, [file.piece(block.offset, block.nbytes)])
        except CorruptionError as error:
            unreadable.append(f"{error}; {_affected(page.layout, block)}")
        else:
            if fault is not None:
                changed.append(f"{fault}; {_affected(page.layout, block)}")
        reader.advance(block.nbytes)
    for fault in (*unreadable, *changed[:_NAMED_MAX]):
        reader.fault(file.name, fault)
    if len(changed) > _NAMED_MAX:
        reader.fault(
            file.name,
            f"{len(changed)} of its {len(blocks)} blocks are not those written: the file may be "
            "of an older step or of another page",
        )
    return not unreadable and not changed


def _affected(layout: PageLayout, block: Extent) -> str:
    """Return the names of the records in a block, in words."""
    end = block.offset + block.nbytes
    records = [
        f"{record.state} of {record.parameter.name}"
        for section in layout.sections
        for record in section.records
        if record.offset < end and record.data_offset + record.data_nbytes > block.offset
    ]
    names = list(dict.fromkeys(records))
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return f"they hold {', '.join(names[:_NAMED_MAX]) or 'padding'}{more}"


def _check_framing(file: File, layout: PageLayout) -> None:
    """Check the bytes around the data of records, which torch.load needs."""
    for section in layout.sections:
        for record in section.records:
            if not is_record(file, record.offset, record.chunk.sizes, record.dtype):
                raise CorruptionError(
                    f"the record at offset {record.offset}, {record.state} of "
                    f"{record.parameter.name}, lacks the bytes around it by which torch reads it"
                )


def is_record(file: File, offset: int, sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a record begins at ``offset``, without reading its data."""
    trailer = record_trailer(sizes, dtype)
    trailer_offset = offset + record_length(sizes, dtype) - len(trailer)
    return file.read(offset, RECORD_PREFIX_BYTES) == record_prefix(sizes, dtype) and (
        file.read(trailer_offset, len(trailer)) == trailer
    )
