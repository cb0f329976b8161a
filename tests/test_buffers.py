from __future__ import annotations

import pytest

from tierstore.buffers import BufferPool
from tierstore.units import SECTOR_BYTES


@pytest.mark.parametrize(
    ("count", "nbytes"), [(3, SECTOR_BYTES), (2, 3 * SECTOR_BYTES + 1), (0, 1)]
)
def test_memory_is_all_buffers_in_one_piece(count: int, nbytes: int) -> None:
    pool = BufferPool(count, nbytes)
    assert len(pool.memory) == pool.nbytes
    buffers = [pool.acquire() for _ in range(count)]
    for value, buffer in enumerate(buffers, start=1):
        buffer.tensor.fill_(value)
    found = bytes(pool.memory)
    assert found.count(0) == 0
    for value in range(1, count + 1):
        assert found.count(value) == pool.buffer_bytes
