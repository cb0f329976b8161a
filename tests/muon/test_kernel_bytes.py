"""Bytes that steps move between memory and drive, as the kernel counts them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tierstore.storage.select import choose_storage

NUMEL = 2**22
STEPS = 4
MASTERS = {None: 4, "remainder": 2, "24bit": 1}
"""Bytes of a master beside a bfloat16 parameter."""
STATES = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.int8: 1 + 4 / 256}


def kernel_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from drives and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


def moved(directory: Path, group: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes read and written per parameter and step."""
    parameter = torch.nn.Parameter(torch.ones(2048, NUMEL // 2048, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    options = {"host_memory": "128MiB", "buffers": 3, "page_bytes": "24MiB"}
    storage, _ = choose_storage(directory)
    storage.close()
    if not getattr(storage, "direct", False):
        pytest.skip("the kernel does not count bytes that stay in the page cache")
    with tierstore.TierStore(directory, **options) as store:
        optimizer = muon.Muon([{"params": [("w", parameter)], **group}], store=store)
        optimizer.step()
        store.synchronize()
        before = kernel_bytes()
        for _ in range(STEPS):
            optimizer.step()
        store.synchronize()
        after = kernel_bytes()
    (read, written), (read_by_then, written_by_then) = before, after
    return (read_by_then - read) / STEPS / NUMEL, (written_by_then - written) / STEPS / NUMEL


@pytest.mark.quick(5)
@pytest.mark.parametrize(("master", "momentum"), [*itertools.product(MASTERS, STATES)], ids=str)
def test_bytes_of_muon(tmp_path: Path, master: str | None, momentum: torch.dtype) -> None:
    found = moved(tmp_path, {"master": master, "momentum_dtype": momentum, "ns_steps": 0})
    read = MASTERS[master] + STATES[momentum]
    assert found == pytest.approx((read, read if master is None else read + 2), rel=0.02)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("master", "moments"), [*itertools.product(MASTERS, STATES)], ids=str)
def test_bytes_of_adamw(tmp_path: Path, master: str | None, moments: torch.dtype) -> None:
    found = moved(tmp_path, {"algorithm": "adamw", "master": master, "moments_dtype": moments})
    read = MASTERS[master] + 2 * STATES[moments]
    assert found == pytest.approx((read, read if master is None else read + 2), rel=0.02)
