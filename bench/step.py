"""A whole optimizer step with the state on disk, beside the same step with it in memory.

Both optimizers step the same gradients in turn, so that a drift of the machine meets both,
and each pair gives one ratio. The resident optimizer against a second one like it shows
how much of a ratio is noise. Commit and flush come after the step and are reported apart.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import muon
import tierstore


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run of the benchmark measures."""

    width: int
    layers: int
    pairs: int


PLANS = {
    "small": Plan(width=64, layers=2, pairs=2),
    "default": Plan(width=768, layers=6, pairs=15),
    "full": Plan(width=1536, layers=12, pairs=15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians, and the spread of the ratio over all pairs."""

    case: str
    pairs: int
    resident_s: float
    step_s: float
    synchronize_s: float
    """From the end of the step until it is durable, were nothing computed meanwhile."""
    stall_s: float
    """Waiting inside the step and the synchronize() after it."""
    read_bytes: int
    written_bytes: int
    ratio_median: float
    ratio_min: float
    ratio_max: float


def make_model(plan: Plan, dtype: torch.dtype) -> nn.Module:
    """Return the matrices of a GPT: attention, MLP, norms and an embedding."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(50 * plan.width, plan.width)]
    for _ in range(plan.layers):
        width = plan.width
        layers += [nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)]
        layers += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    model = nn.Sequential(*layers).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def make_optimizer(plan: Plan, dtype: torch.dtype, store: tierstore.TierStore | None) -> muon.Muon:
    """Return an optimizer over a model of its own, after a first step."""
    optimizer = muon.Muon(muon.param_groups(make_model(plan, dtype)), store=store)
    optimizer.step()
    return optimizer


def timed(action: Any) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(case: str, plan: Plan, dtype: torch.dtype, store: tierstore.TierStore | None) -> Row:
    """Step a resident optimizer and another in turn; ``store`` is the other's."""
    resident = make_optimizer(plan, dtype, None)
    other = make_optimizer(plan, dtype, store)
    resident_s, step_s, synchronize_s = [], [], []
    if store is not None:
        store.synchronize()
    before = other.store.stats()
    for pair in range(plan.pairs):
        # Which of the two comes first alternates, since caches favour the second.
        if pair % 2:
            resident_s.append(timed(resident.step))
        step_s.append(timed(other.step))
        synchronize_s.append(timed(store.synchronize) if store is not None else 0.0)
        if not pair % 2:
            resident_s.append(timed(resident.step))
    after = other.store.stats()
    ratios = [a / b for a, b in zip(step_s, resident_s, strict=True)]
    return Row(
        case=case,
        pairs=plan.pairs,
        resident_s=statistics.median(resident_s),
        step_s=statistics.median(step_s),
        synchronize_s=statistics.median(synchronize_s),
        stall_s=(after.stall_seconds - before.stall_seconds) / plan.pairs,
        read_bytes=(after.bytes_read - before.bytes_read) // plan.pairs,
        written_bytes=(after.bytes_written - before.bytes_written) // plan.pairs,
        ratio_median=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def report(rows: list[Row], parameters: int) -> Table:
    """Return the result as a table."""
    table = Table(title=f"Optimizer step, {parameters / 1e6:.1f}M parameters")
    for heading in ("case", "resident s", "step s", "ratio (min..max)", "synchronize s", "stall s"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    table.add_column("read / written, bytes per parameter", justify="right")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.resident_s:.3f}",
            f"{row.step_s:.3f}",
            f"{row.ratio_median:.2f} ({row.ratio_min:.2f}..{row.ratio_max:.2f})",
            f"{row.synchronize_s:.3f}",
            f"{row.stall_s:.3f}",
            f"{row.read_bytes / parameters:.2f} / {row.written_bytes / parameters:.2f}",
        )
    return table


def main(
    directory: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; default: a temporary one.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A few seconds, to see it work.")] = False,
    full: Annotated[bool, typer.Option("--full", help="A 0.5B-parameter model.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write it all.")] = None,
) -> None:
    """Compare the optimizer step with paged state to the resident one."""
    if small and full:
        raise typer.BadParameter("--small and --full exclude each other")
    plan = PLANS["small" if small else "full" if full else "default"]
    rows = []
    parameters = sum(p.numel() for p in make_model(plan, torch.bfloat16).parameters())
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        rows.append(measure(f"{name}, resident", plan, dtype, None))
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix="tierstore-bench-") as scratch,
            tierstore.TierStore(
                Path(scratch) / "run", host_memory="1GiB", page_bytes="64MiB", buffers=4
            ) as store,
        ):
            rows.append(measure(f"{name}, {store.stats().engine}", plan, dtype, store))
    Console(width=120).print(report(rows, parameters))
    if json_path is not None:
        result = {
            "plan": asdict(plan),
            "parameters": parameters,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "rows": [asdict(row) for row in rows],
        }
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
