"""Training steps with optimizer state on disk, compared with DeepSpeed.

DeepSpeed runs ZeRO-3 with the optimizer on NVMe, with the fastest of the settings that are tried
first. The contenders take turns, step by step; tierstore has two turns in each round to show the
noise, and one with its states in as few bytes as it can.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from measuring import (
    MIB,
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
from training import DeepSpeed, Model, Ours, Plan, Settings, Step, Worker

ABSENT = """\
not measured: DeepSpeed is not installed. It builds parts of itself when they are first used,
which takes some minutes. After torch, and with Debian's packages g++ and libaio-dev:

    DS_BUILD_OPS=0 pip install --no-build-isolation ninja deepspeed==0.19.8"""

RULES = ("muon", "adamw")
FEWEST_BYTES = {
    "master": "24bit",
    "momentum_dtype": torch.int8,
    "moments_dtype": torch.int8,
}

PLANS = {
    "small": Plan(
        width=256,
        layers=2,
        vocabulary=2048,
        tokens=16,
        tuning_steps=1,
        pairs=2,
        page_bytes="2MiB",
        group_elements=400_000,
        block_bytes=MIB,
    ),
    "default": Plan(
        width=768,
        layers=12,
        vocabulary=16384,
        tokens=64,
        tuning_steps=2,
        pairs=15,
        page_bytes="64MiB",
        group_elements=12_000_000,
        block_bytes=8 * MIB,
    ),
}


def settings_to_try(plan: Plan, rule: str) -> list[Settings]:
    """Return the settings of DeepSpeed to try.

    The first has the values of DeepSpeed's documentation, except for the size of a subgroup:
    without a limit all state would be in memory at once.
    """
    documented = Settings(
        group_elements=plan.group_elements,
        buffer_count=5,
        pipelined=False,
        block_bytes=MIB,
        queue_depth=8,
    )
    pipelined = replace(
        documented, buffer_count=12, pipelined=True, block_bytes=plan.block_bytes, queue_depth=32
    )
    tried = [
        documented,
        pipelined,
        replace(pipelined, group_elements=3 * plan.group_elements),
    ]
    if rule == "muon":
        tried.append(replace(pipelined, ns_method="standard"))
    return tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of one setting of DeepSpeed: medians, or an error."""

    rule: str
    settings: Settings
    whole_s: float | None = None
    step_s: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None
    peak_bytes: int | None = None
    error: str | None = None


def try_settings(plan: Plan, rule: str, settings: Settings, directory: Path) -> Trial:
    """Train for a few steps in a new process."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        try:
            with Worker(Path(scratch), DeepSpeed, plan, rule, settings) as worker:
                worker.receive()
                steps = [worker.ask("step") for _ in range(plan.tuning_steps)]
                facts = worker.ask("facts")
        except RuntimeError as error:
            return Trial(rule=rule, settings=settings, error=str(error))
    return Trial(
        rule=rule,
        settings=settings,
        whole_s=statistics.median(step.whole_s for step in steps),
        step_s=statistics.median(step.step_s for step in steps),
        read_bytes=statistics.median(step.read_bytes for step in steps),
        written_bytes=statistics.median(step.written_bytes for step in steps),
        peak_bytes=facts["peak_bytes"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender: medians over all rounds, ratios to DeepSpeed in the same round."""

    rule: str
    contender: str
    forward_backward_s: float
    step_s: float
    synchronize_s: float
    whole_s: float
    cpu_s: float
    read_bytes: float
    written_bytes: float
    peak_bytes: int
    """Peak memory of the steps, without mapped files."""
    start_peak_bytes: int
    """Peak memory of startup and warm-up steps, without mapped files."""
    optimizer_ratio: tuple[float, ...]
    """Time of the step until it is durable: extremes and quartiles."""
    whole_ratio: tuple[float, ...]
    bytes_ratio: float
    peak_ratio: float
    facts: dict[str, Any]
    steps: list[Step]


def rows_of(rule: str, steps: dict[str, list[Step]], facts: dict[str, dict[str, Any]]) -> list[Row]:
    """Return one row for each contender."""
    theirs = steps["DeepSpeed"]
    rows: list[Row] = []
    for name in steps:

        def middle(value: Callable[[Step], float], name: str = name) -> float:
            return statistics.median(value(step) for step in steps[name])

        pairs = list(zip(steps[name], theirs, strict=True))
        moved = middle(lambda step: step.read_bytes + step.written_bytes)
        moved_by_first = middle(lambda step: step.read_bytes + step.written_bytes, "DeepSpeed")
        peak = facts[name]["peak_bytes"]
        rows.append(
            Row(
                rule=rule,
                contender=name,
                forward_backward_s=middle(lambda step: step.forward_backward_s),
                step_s=middle(lambda step: step.step_s),
                synchronize_s=middle(lambda step: step.synchronize_s),
                whole_s=middle(lambda step: step.whole_s),
                cpu_s=middle(lambda step: step.cpu_s),
                read_bytes=middle(lambda step: step.read_bytes),
                written_bytes=middle(lambda step: step.written_bytes),
                peak_bytes=peak,
                start_peak_bytes=facts[name]["start_peak_bytes"],
                optimizer_ratio=spread([a.optimizer_s / b.optimizer_s for a, b in pairs]),
                whole_ratio=spread([a.whole_s / b.whole_s for a, b in pairs]),
                bytes_ratio=moved / moved_by_first,
                peak_ratio=peak / (rows[0].peak_bytes if rows else peak),
                facts=facts[name],
                steps=steps[name],
            )
        )
    return rows


def compare(plan: Plan, rule: str, settings: Settings, directory: Path) -> list[Row]:
    """Measure the contenders in turn; DeepSpeed is the first row."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        workers = {
            "DeepSpeed": stack.enter_context(Worker(scratch, DeepSpeed, plan, rule, settings)),
            "ours": stack.enter_context(Worker(scratch, Ours, plan, rule)),
            "ours again": stack.enter_context(Worker(scratch, Ours, plan, rule)),
            "ours, fewest bytes": stack.enter_context(
                Worker(scratch, Ours, plan, rule, FEWEST_BYTES)
            ),
        }
        for worker in workers.values():
            worker.receive()
        names = list(workers)
        steps: dict[str, list[Step]] = {name: [] for name in names}
        for index in track(range(plan.pairs), description=rule):
            for name in rotated(names, index):
                steps[name].append(workers[name].ask("step"))
        facts = {name: worker.ask("facts") for name, worker in workers.items()}
    return rows_of(rule, steps, facts)


def ours_against_itself(rows: list[Row]) -> tuple[float, ...]:
    """Return the ratio of both turns of tierstore in each round."""
    first, second = (row.steps for row in rows if row.contender in ("ours", "ours again"))
    return spread([b.whole_s / a.whole_s for a, b in zip(first, second, strict=True)])


def print_trials(console: Console, trials: list[Trial], parameters: int) -> None:
    """Print the results of all settings of DeepSpeed."""
    table = Table(title="DeepSpeed's settings: a training step, medians")
    columns = ("rule", "group M", "buffers", "pipelined", "block MiB", "depth", "NS")
    for column in (*columns, "s", "read / written B/param", "peak MB"):
        table.add_column(column, justify="right")
    for trial in trials:
        settings = trial.settings
        cells = [
            trial.rule,
            f"{settings.group_elements / 1e6:g}",
            str(settings.buffer_count),
            "yes" if settings.pipelined else "no",
            str(settings.block_bytes // MIB),
            str(settings.queue_depth),
            settings.ns_method if trial.rule == "muon" else "",
        ]
        if trial.error is not None:
            cells.append(trial.error.strip().splitlines()[-1])
        else:
            bytes_moved = (trial.read_bytes or 0, trial.written_bytes or 0)
            cells += [
                f"{trial.whole_s:.2f}",
                " / ".join(f"{nbytes / parameters:.1f}" for nbytes in bytes_moved),
                f"{(trial.peak_bytes or 0) / 1e6:.0f}",
            ]
        table.add_row(*cells)
    console.print(table)


def print_rows(console: Console, rows: list[Row], parameters: int) -> None:
    """Print one rule's comparison."""
    table = Table(title=f"{rows[0].rule}, {parameters / 1e6:.1f}M parameters: medians (quartiles)")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.contender, justify="right")
    lines: dict[str, Callable[[Row], str]] = {
        "forward and backward, s": lambda row: f"{row.forward_backward_s:.2f}",
        "step, s": lambda row: f"{row.step_s:.2f}",
        "until all is durable, s": lambda row: f"{row.synchronize_s:.2f}",
        "whole training step, s": lambda row: f"{row.whole_s:.2f}",
        "step until durable, ratio": lambda row: ratio_text(row.optimizer_ratio),
        "whole training step, ratio": lambda row: ratio_text(row.whole_ratio),
        "read, bytes per parameter": lambda row: f"{row.read_bytes / parameters:.2f}",
        "written, bytes per parameter": lambda row: f"{row.written_bytes / parameters:.2f}",
        "bytes, ratio": lambda row: f"{row.bytes_ratio:.2f}",
        "peak memory of steps, MB": lambda row: f"{row.peak_bytes / 1e6:.0f}",
        "peak memory before, MB": lambda row: f"{row.start_peak_bytes / 1e6:.0f}",
        "peak memory of steps, ratio": lambda row: f"{row.peak_ratio:.2f}",
        "processor, s": lambda row: f"{row.cpu_s:.2f}",
        "loss, first and last": lambda row: f"{row.steps[0].loss:.4f}, {row.steps[-1].loss:.4f}",
    }
    for heading, cell in lines.items():
        table.add_row(heading, *(cell(row) for row in rows))
    console.print(table)
    console.print(f"ours again over ours, whole step: {ratio_text(ours_against_itself(rows))}")


def main(
    directory: DirectoryOption = Path("."),
    small: SmallOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare training steps with both optimizers' state on disk."""
    if importlib.util.find_spec("deepspeed") is None:
        typer.echo(ABSENT)
        return
    plan = PLANS["small" if small else "default"]
    parameters = sum(parameter.numel() for parameter in Model(plan).parameters())
    trials: list[Trial] = []
    rows: list[Row] = []
    console = Console(width=120)
    with scratch_folder(directory) as scratch:
        for rule in RULES:
            tried = [
                try_settings(plan, rule, settings, scratch)
                for settings in track(settings_to_try(plan, rule), description=f"tuning, {rule}")
            ]
            print_trials(console, tried, parameters)
            trials += tried
            working = [trial for trial in tried if trial.whole_s is not None]
            if not working:
                typer.echo(f"not measured: DeepSpeed does not train with {rule}:\n{tried[0].error}")
                continue
            best = min(working, key=lambda trial: trial.whole_s or 0.0)
            compared = compare(plan, rule, best.settings, scratch)
            print_rows(console, compared, parameters)
            rows += compared
            write_report(  # After each rule, because a rule takes long.
                json_path,
                plan=asdict(plan),
                parameters=parameters,
                trials=[asdict(trial) for trial in trials],
                rows=[asdict(row) for row in rows],
            )


if __name__ == "__main__":
    typer.run(main)
