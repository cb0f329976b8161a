"""Training steps on a GPU with the optimizer's state in each tier, and copies of pages.

Copies: a sweep that computes nothing over state in page-locked host memory, compared with copies
of as many bytes by torch, in both directions at once. Steps: a model of about 1.1B parameters with
its state on the GPU, in host memory or on NVMe, or stepped on the host. All cases take turns; the
reference runs twice in each round to show the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import (
    GIB,
    MIB,
    DirectoryOption,
    JsonOption,
    SmallOption,
    profile_threads,
    ratio_text,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step import Contender, Model, compare, linear_pairs, now_s, report
from sweep import MOMENTUM, Idle, make_parameters
from torch import nn
from torch.profiler import ProfilerActivity

import muon
import tierstore


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    copied_bytes: int
    """Bytes in each direction, by pages and by torch."""
    width: int
    pairs: int
    """Pairs of matrices for Muon, the one four times as wide as the other."""
    rows: int
    """Rows of the embedding, which AdamW steps."""
    batch: int
    page_bytes: int
    rounds: int


PLANS = {
    "small": Plan(
        copied_bytes=8 * MIB,
        width=64,
        pairs=2,
        rows=512,
        batch=16,
        page_bytes=MIB,
        rounds=2,
    ),
    "default": Plan(
        copied_bytes=8 * GIB,
        width=2048,
        pairs=28,
        rows=65536,
        batch=8192,
        page_bytes=256 * MIB,
        rounds=5,
    ),
}


class Tower(Model):
    """An embedding and pairs of matrices, in bfloat16."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        torch.manual_seed(0)
        embedding = nn.Embedding(plan.rows, plan.width)
        super().__init__(embedding, *linear_pairs(plan.width, plan.pairs))
        self.to(device, torch.bfloat16)
        self.inputs = torch.randint(plan.rows, (plan.batch,), device=device)


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


def open_in_memory(page_bytes: int, tier: str | None = None) -> tierstore.TierStore:
    """Return a store without files, with pages in a tier; None: where steps are computed."""
    store = tierstore.TierStore(None, page_bytes=page_bytes)
    if tier is not None:
        store.move(tier)
    return store


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

    torch_gib_per_s: float
    pages_gib_per_s: float
    ratio: tuple[float, ...]
    """Pages over torch in the same round: extremes and quartiles."""
    torch_ratio: tuple[float, ...]
    """Torch's second turn over its first."""
    pages_in: dict[str, int]
    """Tier -> number of pages that rested there."""


def measure_copies(device: torch.device, plan: Plan) -> Copies:
    """Measure pages and torch in turn."""
    by_torch = copy_by_torch(device, plan.page_bytes, plan.copied_bytes)
    with open_in_memory(plan.page_bytes, "host") as store:
        by_pages = copy_by_pages(store, device, plan.copied_bytes)
        by_torch()
        rounds = [
            (by_torch(), by_pages(), by_torch())
            for _ in track(range(plan.rounds), description="copies")
        ]
        pages_in = store.stats().pages_in
    return Copies(
        torch_gib_per_s=statistics.median(first for first, _, _ in rounds),
        pages_gib_per_s=statistics.median(pages for _, pages, _ in rounds),
        ratio=spread([pages / statistics.mean((a, b)) for a, pages, b in rounds]),
        torch_ratio=spread([b / a for a, _, b in rounds]),
        pages_in=pages_in,
    )


def make_contenders(
    directory: Path, stack: ExitStack, plan: Plan, device: torch.device
) -> dict[str, Contender]:
    """Return one contender for each tier of the state, each with its own model."""

    def contender(store: tierstore.TierStore, **options: Any) -> Contender:
        stack.enter_context(store)
        model = Tower(plan, device)
        return Contender(model, muon.Muon(muon.param_groups(model), store=store, **options))

    def open_streamed(name: str, **options: Any) -> tierstore.TierStore:
        return tierstore.TierStore(
            directory / name,
            host_memory=24 * plan.page_bytes,
            page_bytes=plan.page_bytes,
            buffers=4,
            **options,
        )

    return {
        "on the GPU": contender(open_in_memory(plan.page_bytes)),
        "in host memory": contender(open_in_memory(plan.page_bytes, "host")),
        "on NVMe": contender(open_streamed("nvme")),
        "on NVMe, stepped on the host": contender(
            open_streamed("host", step_on="cpu", offload_gradients="backward", free_gradients=True),
            ns_dtype="auto",
        ),
    }


def write_trace(contender: Contender, path: Path) -> None:
    """Write a profiler trace of one training step, for bench/timeline.py."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile_threads(*activities) as profiled:
        contender.turn()
    profiled.export_chrome_trace(str(path))


def report_copies(copies: Copies, plan: Plan) -> Table:
    """Return the comparison of copies as a table."""
    table = Table(title=f"Pages of {plan.page_bytes // MIB} MiB both ways at once, medians")
    for heading in ("", "GiB/s each way", "of torch"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("pages", f"{copies.pages_gib_per_s:.1f}", ratio_text(copies.ratio))
    table.add_row(
        "torch, again over first", f"{copies.torch_gib_per_s:.1f}", ratio_text(copies.torch_ratio)
    )
    return table


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="Where to write a trace of one step with state on NVMe.")
    ] = None,
    device_name: Annotated[
        str, typer.Option("--device", help="cpu is only a test of the program.")
    ] = "cuda",
) -> None:
    """Measure page copies and training steps on a GPU."""
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        typer.echo("not measured: there is no CUDA device")
        return
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # now_s() waits for this device.
    plan = PLANS["small" if small else "default"]
    console = Console(width=120)
    copies = measure_copies(device, plan)
    console.print(report_copies(copies, plan))
    with (
        scratch_folder(directory) as scratch,
        ExitStack() as stack,
    ):
        contenders = make_contenders(scratch, stack, plan, device)
        steps = compare(
            "Muon and AdamW",
            contenders,
            bound="on the GPU",
            drained=False,
            rounds=plan.rounds,
        )
        console.print(report(steps))
        write_report(
            json_path,
            plan=asdict(plan),
            device=device_name,
            copies=asdict(copies),
            steps=asdict(steps),
            pages_in={case: each.store.stats().pages_in for case, each in contenders.items()},
        )
        if trace is not None:
            write_trace(contenders["on NVMe"], trace)


if __name__ == "__main__":
    typer.run(main)
