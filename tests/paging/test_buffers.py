from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.fake_cuda import fake_cuda, is_mapped
from tierstore.paging.buffers import BufferPool
from tierstore.units import SECTOR_BYTES


@pytest.mark.parametrize(
    ("count", "nbytes"), [(3, SECTOR_BYTES), (2, 3 * SECTOR_BYTES + 1), (0, 1)]
)
def test_memory_covers_all_buffers_in_one_piece(count: int, nbytes: int) -> None:
    pool = BufferPool(count, nbytes)
    assert len(pool.memory) == pool.nbytes
    buffers = [pool.acquire() for _ in range(count)]
    for value, buffer in enumerate(buffers, start=1):
        buffer.tensor.fill_(value)
    found = bytes(pool.memory)
    assert found.count(0) == 0
    for value in range(1, count + 1):
        assert found.count(value) == pool.buffer_bytes


@pytest.mark.parametrize("kept", ["tensor", "memory"])
def test_page_locked_memory_is_unregistered_before_it_is_unmapped(kept: str) -> None:
    """The last view of the memory keeps it mapped and registered."""
    with fake_cuda() as cuda:
        pool = BufferPool(2, SECTOR_BYTES, page_locked=torch.device("cpu"))
        (address,) = cuda.locked
        view = getattr(pool.acquire(), kept)
        del pool
        assert cuda.locked
        del view
        assert not cuda.locked
        assert not is_mapped(address, SECTOR_BYTES)


class Launches(TorchFunctionMode):
    """Kernels on an absent GPU: the first one raises the error of an earlier call."""

    error: int = 0

    def register(self, *args: int) -> int:
        self.error = 2
        return self.error

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str((kwargs or {}).get("device")) != "cuda":
            return func(*args, **(kwargs or {}))
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")
        return func(*args)


def test_a_failed_page_lock_leaves_no_cuda_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_cuda(), Launches() as launches:
        torch.cuda.cudart().cudaHostRegister = launches.register  # type: ignore[no-untyped-call]
        pool = BufferPool(2, SECTOR_BYTES, page_locked=torch.device("cuda"))
        pool.acquire().tensor.fill_(1)
        torch.ones(1, device="cuda")  # The next computation of any program.
    assert "not page-locked" in caplog.text
