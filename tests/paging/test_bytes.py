"""A step moves the bytes of the state once in and once out, by the kernel's own counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import kernel

STEPS = 2


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("dtype", "algorithm", "read", "written"),
    [
        # Bytes per parameter: master 4 and momentum 2 each way.
        (torch.bfloat16, "muon", 6, 6),
        # The parameter is its own master: written from it, never read.
        (torch.float32, "muon", 4, 8),
        (torch.bfloat16, "adamw", 12, 12),
        (torch.float32, "adamw", 8, 12),
    ],
)
def test_a_step_reads_and_writes_every_byte_once(
    dtype: torch.dtype, algorithm: str, read: int, written: int, tmp_path: Path
) -> None:
    # 12.6M parameters; wide ones, for which Newton-Schulz is cheap.
    parameters = [torch.nn.Parameter(torch.randn(64, 16384).to(dtype)) for _ in range(12)]
    for parameter in parameters:
        parameter.grad = torch.randn(64, 16384).to(dtype)
    groups: list[dict[str, Any]] = [{"params": parameters, "algorithm": algorithm}]
    with tierstore.TierStore(
        tmp_path, engine="io_uring", host_memory="64MiB", page_bytes="8MiB", buffers=4
    ) as store:
        # Some CPUs have no instructions for bfloat16 and would compute for minutes.
        optimizer = muon.Muon(groups, store=store, ns_dtype=torch.float32)
        optimizer.step()
        store.synchronize()
        before = kernel.disk_bytes()
        for _ in range(STEPS):
            optimizer.step()
            store.commit()
        store.synchronize()
        after = kernel.disk_bytes()
        stats = store.stats()
    count = STEPS * sum(parameter.numel() for parameter in parameters)
    assert 0.98 <= (after[0] - before[0]) / (count * read) <= 1.02
    assert 0.98 <= (after[1] - before[1]) / (count * written) <= 1.02
    # The counters of the store equal the counters of the kernel, without the manifests.
    assert stats.bytes_read == pytest.approx(after[0] - before[0], rel=0.01)


def test_a_page_without_gradient_does_not_move(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.randn(512, 1024)) for _ in range(4)]
    with tierstore.TierStore(tmp_path, engine="io_uring", page_bytes="2MiB", buffers=2) as store:
        optimizer = muon.Muon(parameters, store=store)
        for parameter in parameters:
            parameter.grad = torch.randn(512, 1024)
        optimizer.step()
        store.synchronize()
        before = store.stats()
        for parameter in parameters[1:]:
            parameter.grad = None
        optimizer.step()
        store.synchronize()
        after = store.stats()
    page_bytes = after.state_bytes // 4
    assert after.pages == 4
    assert after.bytes_written - before.bytes_written == page_bytes
    assert 0 < after.bytes_read - before.bytes_read < page_bytes
