"""Memory stays within the budget, whatever the size of the state, and does not grow."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

import muon
import tierstore
from tests.support import kernel
from tests.support.isolated_process import result_apart

MIB = 2**20
HOST_MEMORY = 32 * MIB

M_MMAP_THRESHOLD = -3  # From <malloc.h>.


def peaks(directory: Path | None, rounds: list[int]) -> tuple[int, list[int]]:
    """Return the bytes of all pages, and the anonymous peak of each round of steps."""
    torch.set_num_threads(1)
    # The temporaries of a step come from the system and go back to it, each by itself:
    # what glibc would keep of them for later is decided by chance.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB) == 1
    # 22M bf16 parameters: 131 MB of masters and momentum.
    parameters = [
        torch.nn.Parameter(torch.randn(64, 32768, dtype=torch.bfloat16)) for _ in range(11)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with tierstore.TierStore(directory, host_memory=HOST_MEMORY, page_bytes="12MiB") as store:
        # Two iterations of Newton-Schulz take as much memory as five, and less time; some CPUs
        # have no instructions for bfloat16 and would compute for minutes.
        optimizer = muon.Muon(parameters, store=store, ns_steps=2, ns_dtype=torch.float32)
        for _ in range(2):
            optimizer.step()
        result = []
        for steps in rounds:
            kernel.reset_peak()
            for _ in range(steps):
                optimizer.step()
            result.append(kernel.anonymous_peak())
        return store.stats().state_bytes, result


@pytest.mark.long
@pytest.mark.parametrize("steps", [4, pytest.param(44, marks=pytest.mark.long)])
def test_peak_is_within_the_budget_and_does_not_grow(steps: int, tmp_path: Path) -> None:
    # Newton-Schulz needs the same workspace in both runs, so the difference is without it.
    state_bytes, (resident,) = result_apart(peaks, None, [3])
    paged_state_bytes, paged = result_apart(peaks, tmp_path, [3, 3, 3, steps, 3, 3, 3])
    assert state_bytes == paged_state_bytes
    assert state_bytes >= 4 * HOST_MEMORY
    assert max(paged) - (resident - state_bytes) <= HOST_MEMORY + 64 * MIB
    # The peak of a round varies by one temporary of a step.
    # A leak would raise the lowest of the later peaks.
    assert min(paged[4:]) <= max(paged[:3]) + 4 * MIB


@pytest.mark.parametrize("buffers", [None, 2, 5])
def test_too_small_a_budget_is_refused_with_the_smallest_that_works(
    buffers: int | None, tmp_path: Path
) -> None:
    def step(host_memory: int, name: str) -> None:
        parameter = torch.nn.Parameter(torch.randn(300, 500))
        parameter.grad = torch.randn(300, 500)
        with tierstore.TierStore(
            tmp_path / name, host_memory=host_memory, page_bytes="64KiB", buffers=buffers
        ) as store:
            muon.Muon([parameter], store=store).step()

    with pytest.raises(tierstore.BudgetError) as caught:
        step(1000, "small")
    match = re.search(r"pass host_memory=(\d+)", str(caught.value))
    assert match
    smallest = int(match[1])
    with pytest.raises(tierstore.BudgetError):
        step(smallest - 1, "smaller")
    step(smallest, "enough")


def many_small_pages(directory: Path) -> tuple[dict[str, int], int]:
    """Return the tiers and the growth of memory with 600 pages of 40 kB that stay in it."""
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(64, 80)) for _ in range(600)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with tierstore.TierStore(directory, host_memory="64MiB", page_bytes=40960) as store:
        optimizer = muon.Muon(parameters, store=store)
        kernel.reset_peak()
        before = kernel.anonymous_peak()
        for _ in range(2):
            optimizer.step()
        return store.stats().pages_in, kernel.anonymous_peak() - before


@pytest.mark.long
def test_small_pages_in_memory_take_no_more_than_their_size(tmp_path: Path) -> None:
    pages_in, grown = result_apart(many_small_pages, tmp_path)
    assert pages_in == {"host": 600}
    assert grown <= 150 * MIB  # With a huge page per page it would be more than a GiB.


def test_no_more_buffers_than_pages(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(300, 500))
    parameter.grad = torch.randn(300, 500)
    with tierstore.TierStore(tmp_path, page_bytes="64KiB", host_memory="64MiB") as store:
        optimizer = muon.Muon([{"params": [parameter], "algorithm": "adamw"}], store=store)
        optimizer.step()
        stats = store.stats()
    # As many buffers as pages, since more could not be used; all as large as the largest
    # page, which is 64 KiB and the padding of three sections.
    assert stats.pages > 20
    assert stats.host_bytes_peak <= stats.pages * (65536 + 3 * 4096)
