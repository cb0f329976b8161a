"""Check of one page file against the commit: length and checksums."""

from __future__ import annotations

from tierstore.errors import CorruptionError
from tierstore.inspection.reader import File, Reader
from tierstore.layout.page_layout import PageLayout
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
        _check_blocks(reader, file, page)


def _check_blocks(reader: Reader, file: File, page: CommittedPage) -> None:
    """Record the blocks that cannot be read or whose checksum differs."""
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


def _affected(layout: PageLayout, block: Extent) -> str:
    """Return text that names the records in a block."""
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
