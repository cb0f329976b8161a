"""Adam of torch on pages beside the class as it is: large parameters, and thousands of small ones.

All contenders have the same bits. Seconds are processor time of the training thread, and
time of the clock. torchao's offload needs a GPU: ``gpu_day.py steps`` has it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from measuring import (
    DirectoryOption,
    JsonOption,
    SmallOption,
    ratio_text,
    rotated,
    scratch_folder,
    spread,
    write_report,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tierstore

BASE = "plain, foreach"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    large: int
    """Rows and columns of each of 8 large parameters."""
    small: int
    """Number of small parameters of 8 x 8."""
    rounds: int


PLANS = {
    "default": Plan(large=2048, small=5000, rounds=9),
    "small": Plan(large=64, small=50, rounds=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A contender."""

    parameters: str
    contender: str
    cpu_s: float
    """Median seconds of the training thread's processor for a step."""
    cpu_ratio: tuple[float, ...]
    """To BASE in the same round: smallest, quartiles and largest."""
    step_s: float
    step_ratio: tuple[float, ...]


def contenders(
    shapes: list[tuple[int, int]], directory: Path, stack: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return a step of each contender, with gradients."""

    def ready(make: Callable[[list[torch.nn.Parameter]], Any]) -> Callable[[], object]:
        random = torch.Generator().manual_seed(0)
        tensors = [torch.randn(shape, generator=random) for shape in shapes]
        parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        optimizer = make(parameters)
        optimizer.step()  # Makes the states.
        step: Callable[[], object] = optimizer.step
        return step

    def on_pages(store: tierstore.TierStore | None, **options: Any) -> Callable[[], object]:
        options = {"foreach": True, "store": store, **options}
        return ready(lambda parameters: tierstore.Paged(parameters, torch.optim.Adam, **options))

    store = stack.enter_context(tierstore.TierStore(directory / "run"))
    plain: dict[str, Callable[[], object]] = {
        BASE: ready(lambda parameters: torch.optim.Adam(parameters, foreach=True)),
        "plain, for": ready(lambda parameters: torch.optim.Adam(parameters, foreach=False)),
        "pages in memory": on_pages(None),
        "pages in memory, nonfinite='allow'": on_pages(None, nonfinite="allow"),
    }
    return {**plain, "pages on NVMe": on_pages(store)} if len(shapes) < 100 else plain


def measure(name: str, shapes: list[tuple[int, int]], plan: Plan, directory: Path) -> list[Row]:
    """Step all contenders in turn."""
    with ExitStack() as stack:
        turns = contenders(shapes, directory, stack)
        cpu: dict[str, list[float]] = {turn: [] for turn in turns}
        wall: dict[str, list[float]] = {turn: [] for turn in turns}
        for number in track(range(plan.rounds), description=name):
            for turn in rotated([*turns], number):
                began_s, thread_s = time.perf_counter(), time.thread_time()
                turns[turn]()
                cpu[turn].append(time.thread_time() - thread_s)
                wall[turn].append(time.perf_counter() - began_s)

    def ratio(seconds: dict[str, list[float]], turn: str) -> tuple[float, ...]:
        return spread([a / b for a, b in zip(seconds[turn], seconds[BASE], strict=True)])

    return [
        Row(
            parameters=name,
            contender=turn,
            cpu_s=statistics.median(cpu[turn]),
            cpu_ratio=ratio(cpu, turn),
            step_s=statistics.median(wall[turn]),
            step_ratio=ratio(wall, turn),
        )
        for turn in turns
    ]


def report(rows: list[Row]) -> Table:
    """Return the contenders as a table."""
    table = Table(title=f"Adam, {torch.get_num_threads()} threads, medians (quartiles)")
    for heading in ("parameters", "contender"):
        table.add_column(heading)
    for heading in ("thread s", "of plain foreach", "step s", "of plain foreach"):
        table.add_column(heading, justify="right")
    for row in rows:
        cpu, step = ratio_text(row.cpu_ratio), ratio_text(row.step_ratio)
        table.add_row(
            row.parameters, row.contender, f"{row.cpu_s:.3f}", cpu, f"{row.step_s:.3f}", step
        )
    return table


def main(
    directory: DirectoryOption = Path(),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare steps of Adam on pages with steps of the class as it is."""
    plan = PLANS["small" if small else "default"]
    with scratch_folder(directory) as scratch:
        large = f"8 of {plan.large} x {plan.large}"
        rows = measure(large, [(plan.large, plan.large)] * 8, plan, scratch / "large")
        rows += measure(f"{plan.small} of 8 x 8", [(8, 8)] * plan.small, plan, scratch / "small")
    Console(width=140).print(report(rows))
    write_report(json_path, plan=asdict(plan), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
