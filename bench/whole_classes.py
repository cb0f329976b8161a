"""Classes with states of other shapes on NVMe, beside the class in memory: bytes and memory.

The states take 8 times the budget of host memory. Bytes are the kernel's, of drives. Each
contender is a process of its own, and all have the same bits.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import typer
from measuring import (
    DirectoryOption,
    JsonOption,
    SmallOption,
    kernel_bytes,
    peak_anonymous_bytes,
    scratch_folder,
    write_report,
)
from pytorch_optimizer import SOAP, Shampoo
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tierstore

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SOAP": (SOAP, {"precondition_frequency": 4}),
    "Shampoo": (Shampoo, {"momentum": 0.9, "preconditioning_compute_steps": 4}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "AdamW": (torch.optim.AdamW, {}),
}
"""Name -> class and options. AdamW is for comparison."""

STATES_OF_BUDGET = 8
WARM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    matrices: int
    """Number of parameters, in bfloat16."""
    rows: int
    columns: int
    steps: int
    """Steps that are measured."""


PLANS = {
    "default": Plan(matrices=32, rows=768, columns=512, steps=4),
    "small": Plan(matrices=32, rows=96, columns=64, steps=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The cost of a step of one contender."""

    step_s: float
    """Median seconds."""
    read_bytes: float
    """Mean bytes that the kernel has read from drives."""
    written_bytes: float
    memory_bytes: int
    """Peak of the process, without what it had before the model, and model and gradients."""
    digest: str
    """Digest of all parameters in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A class on NVMe, beside the class in memory."""

    name: str
    state_bytes: int
    """Bytes of masters and states."""
    budget_bytes: int
    read_ratio: float
    """Bytes that a step reads, of the states' own."""
    written_ratio: float
    memory_bytes: int
    memory_plain_bytes: int
    step_s: float
    step_plain_s: float
    equal: bool
    """True if the parameters have the bits of the class in memory."""


def gradient(step: int, index: int, plan: Plan) -> torch.Tensor:
    """Return a gradient in bfloat16, the same in all processes."""
    random = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(plan.rows, plan.columns, generator=random).to(torch.bfloat16)


def parameters(plan: Plan) -> list[torch.nn.Parameter]:
    """Return the parameters, the same in all processes."""
    return [torch.nn.Parameter(gradient(0, index, plan)) for index in range(plan.matrices)]


def state_bytes(name: str, plan: Plan) -> int:
    """Return the bytes of masters and states."""
    cls, options = CLASSES[name]
    paged = tierstore.Paged(parameters(plan)[:1], cls, **options)
    [spec] = [parameter.spec for group in paged.paged_groups() for parameter in group.parameters]
    return plan.matrices * spec.nbytes


def run(name: str, plan: Plan, directory: Path | None, budget: int) -> Step:
    """Step a class in this process: on pages in a directory, or over float32 copies in memory."""
    cls, options = CLASSES[name]
    warm = torch.nn.Parameter(torch.ones(64, 64))
    warm.grad = torch.ones_like(warm)
    cls([warm], **options).step()  # Loads what steps load.
    idle = peak_anonymous_bytes()
    model = parameters(plan)
    with ExitStack() as stack:
        if directory is None:
            stepped = [torch.nn.Parameter(parameter.detach().float()) for parameter in model]
            optimizer: torch.optim.Optimizer = cls(stepped, **options)
        else:
            store = stack.enter_context(
                tierstore.TierStore(directory, page_bytes=budget // 8, host_memory=budget)
            )
            optimizer = tierstore.Paged(model, cls, store=store, **options)
        seconds, counted = [], []
        for step in range(1, WARM_STEPS + plan.steps + 1):
            for index, parameter in enumerate(model):
                parameter.grad = gradient(step, index, plan)
            if directory is None:
                for parameter, copy in zip(model, stepped, strict=True):
                    assert parameter.grad is not None
                    copy.grad = parameter.grad.float()
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            if directory is None:
                for parameter, copy in zip(model, stepped, strict=True):
                    parameter.data.copy_(copy.detach())
            else:
                store.synchronize()
            counted.append(kernel_bytes())
        memory = peak_anonymous_bytes() - idle
    digest = hashlib.sha256()
    for parameter in model:
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    first, last = counted[WARM_STEPS - 1], counted[-1]
    read, written = (
        (after - before) / plan.steps for before, after in zip(first, last, strict=True)
    )
    return Step(
        step_s=statistics.median(seconds[WARM_STEPS:]),
        read_bytes=read,
        written_bytes=written,
        memory_bytes=memory - 2 * sum(parameter.nbytes for parameter in model),
        digest=digest.hexdigest(),
    )


def run_apart(*arguments: Any) -> Step:
    """Call run() in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def measure(name: str, plan: Plan, directory: Path) -> Row:
    """Step one class in memory and on pages."""
    own = state_bytes(name, plan)
    budget = own // STATES_OF_BUDGET
    plain = run_apart(name, plan, None, 0)
    paged = run_apart(name, plan, directory / name, budget)
    return Row(
        name=name,
        state_bytes=own,
        budget_bytes=budget,
        read_ratio=paged.read_bytes / own,
        written_ratio=paged.written_bytes / own,
        memory_bytes=paged.memory_bytes,
        memory_plain_bytes=plain.memory_bytes,
        step_s=paged.step_s,
        step_plain_s=plain.step_s,
        equal=paged.digest == plain.digest,
    )


def report(rows: list[Row], plan: Plan) -> Table:
    """Return the classes as a table."""
    numel = plan.matrices * plan.rows * plan.columns
    title = f"{plan.matrices} of {plan.rows} x {plan.columns} bfloat16"
    table = Table(title=f"{title}, {torch.get_num_threads()} threads")
    table.add_column("class")
    for heading in (
        *("states, bytes per element", "budget", "read of states", "written of states"),
        *("peak memory", "of states", "in memory", "step s", "in memory", "bits"),
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.state_bytes / numel:.1f}",
            f"{row.budget_bytes / 2**20:.0f} MiB",
            f"{row.read_ratio:.3f}",
            f"{row.written_ratio:.3f}",
            f"{row.memory_bytes / 2**20:.0f} MiB",
            f"{row.memory_bytes / row.state_bytes:.2f}",
            f"{row.memory_plain_bytes / 2**20:.0f} MiB",
            f"{row.step_s:.2f}",
            f"{row.step_plain_s:.2f}",
            "equal" if row.equal else "differ",
        )
    return table


def main(
    directory: DirectoryOption = Path(),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Measure steps of classes whose states have other shapes than the parameters."""
    plan = PLANS["small" if small else "default"]
    with scratch_folder(directory) as scratch:
        rows = [measure(name, plan, scratch) for name in track(CLASSES)]
    Console(width=160).print(report(rows, plan))
    write_report(json_path, plan=asdict(plan), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
