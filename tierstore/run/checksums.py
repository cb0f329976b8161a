"""Checksums of blocks, bound to run, page, offset and step.

They also detect lost and misdirected writes: these leave a valid block of another offset or step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from tierstore.units import Extent

CHECKSUM_BYTES = 8


def block_hash(*, run_id: str, page: int, offset: int, step: int) -> xxhash.xxh3_64:
    """Return a 64-bit XXH3, seeded with run, page, offset and step, to update with the block."""
    identity = run_id.encode() + struct.pack("<QQQ", page, offset, step)
    return xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(identity))


def block_checksum(data: memoryview, *, run_id: str, page: int, offset: int, step: int) -> int:
    """Return the checksum of a block in memory."""
    checksum = block_hash(run_id=run_id, page=page, offset=offset, step=step)
    checksum.update(data)
    return checksum.intdigest()


def block_checksums(
    memory: memoryview, blocks: Iterable[Extent], *, run_id: str, page: int, step: int
) -> list[int]:
    """Return the checksums of some blocks of a page in memory."""
    return [
        block_checksum(
            memory[block.offset : block.offset + block.nbytes],
            run_id=run_id,
            page=page,
            offset=block.offset,
            step=step,
        )
        for block in blocks
    ]
