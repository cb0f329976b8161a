"""Copies of pages to a GPU and back, compared with copies by torch.

A sweep that computes nothing passes over state in page-locked host memory, in turn with as many
bytes that torch copies in both directions at once. Torch has two turns in each round, to show the
noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measuring import GIB, MIB, ratio_text, spread
from rich.progress import track
from rich.table import Table
from step import now_s
from sweep import MOMENTUM, Idle, make_parameters

import tierstore


def copy_by_torch(device: torch.device, page_bytes: int, copied_bytes: int) -> Callable[[], float]:
    """Return a function that copies pages both ways at once and returns GiB/s each way."""
    on_gpu = device.type == "cuda"
    hosts = [torch.zeros(page_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    memories = [torch.zeros(page_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]

    def copy() -> float:
        began_s = now_s()
        for _ in range(copied_bytes // page_bytes):
            with torch.cuda.stream(streams[0]):
                memories[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                hosts[1].copy_(memories[1], non_blocking=True)
        return copied_bytes / GIB / (now_s() - began_s)

    return copy


def copy_by_pages(
    store: tierstore.TierStore, device: torch.device, copied_bytes: int
) -> Callable[[], float]:
    """Return a sweep that computes nothing and returns GiB/s each way."""
    idle = Idle(make_parameters(copied_bytes, device), MOMENTUM, store)

    def sweep() -> float:
        began_s = now_s()
        idle.step()
        return store.stats().state_bytes / GIB / (now_s() - began_s)

    sweep()
    return sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies in both directions at once: medians, each way."""

    page_bytes: int
    copied_bytes: int
    """In each direction, by pages and by torch."""
    torch_gib_per_s: float
    pages_gib_per_s: float
    ratio: tuple[float, ...]
    """Pages over torch in the same round: extremes and quartiles."""
    torch_ratio: tuple[float, ...]
    """Torch's second turn over its first."""
    pages_in: dict[str, int]
    """Tier -> number of pages that rested there."""


def measure_copies(
    device: torch.device, *, page_bytes: int, copied_bytes: int, rounds: int
) -> Copies:
    """Measure pages and torch in turn."""
    by_torch = copy_by_torch(device, page_bytes, copied_bytes)
    with tierstore.TierStore(None, page_bytes=page_bytes) as store:
        store.move("host")
        by_pages = copy_by_pages(store, device, copied_bytes)
        by_torch()
        turns = [
            (by_torch(), by_pages(), by_torch()) for _ in track(range(rounds), description="copies")
        ]
        pages_in = store.stats().pages_in
    return Copies(
        page_bytes=page_bytes,
        copied_bytes=copied_bytes,
        torch_gib_per_s=statistics.median(first for first, _, _ in turns),
        pages_gib_per_s=statistics.median(pages for _, pages, _ in turns),
        ratio=spread([pages / statistics.mean((a, b)) for a, pages, b in turns]),
        torch_ratio=spread([b / a for a, _, b in turns]),
        pages_in=pages_in,
    )


def report_copies(copies: Copies) -> Table:
    """Return the comparison of copies as a table."""
    table = Table(title=f"Pages of {copies.page_bytes // MIB} MiB both ways at once, medians")
    for heading in ("", "GiB/s each way", "of torch"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("pages", f"{copies.pages_gib_per_s:.1f}", ratio_text(copies.ratio))
    table.add_row(
        "torch, again over first", f"{copies.torch_gib_per_s:.1f}", ratio_text(copies.torch_ratio)
    )
    return table
