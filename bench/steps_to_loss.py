"""Steps to a validation loss: Muon beside AdamW, both tuned over the same grid.

A byte-level GPT is trained on the source of Python's standard library, with one learning rate for
its hidden matrices and one for all other parameters, which AdamW steps in both cases. Muon scales
its updates to AdamW's size (``match_rms_adamw``), so both have the same grid of pairs of rates,
and the same schedule, weight decay, initial parameters and batches. Each pair of the grid is
trained once; the best of each optimizer is trained with more seeds. Losses do not depend on other
work on the machine.

``--pictures FOLDER`` draws the validation losses of the best pairs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from measuring import JsonOption, SmallOption, write_report
from rich.console import Console
from rich.table import Table
from trainings import losses_of, train_all

import muon

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Options, training_device

OPTIMIZERS = ("AdamW", "Muon")
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    options: Options
    matrix_rates: tuple[float, ...]
    """Learning rates of hidden matrices."""
    other_rates: tuple[float, ...]
    """Learning rates of all other parameters, of AdamW."""
    seeds: int
    """Number of times that the best pair is trained."""
    every: int
    """Steps from one validation loss to the next."""


PLANS = {
    "small": Plan(
        options=Options(steps=4, layers=1, width=64, batch=4, context=16, seed=0, dropout=0.0),
        matrix_rates=(1e-3, 1e-2),
        other_rates=(1e-2,),
        seeds=2,
        every=2,
    ),
    "default": Plan(
        options=Options(steps=300, layers=4, width=128, batch=16, context=128, seed=0, dropout=0.0),
        matrix_rates=(1e-3, 3e-3, 1e-2, 3e-2),
        other_rates=(1e-3, 3e-3, 1e-2, 3e-2),
        seeds=3,
        every=15,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    optimizer: str
    matrix_rate: float
    other_rate: float
    seed: int
    losses: list[tuple[int, float]]
    """(step, validation loss in nats per byte)."""

    @property
    def last(self) -> float:
        """The last validation loss; infinite if the training diverged."""
        loss = self.losses[-1][1]
        return loss if loss == loss else float("inf")


def make_optimizer(
    name: str, model: GPT, matrix_rate: float, other_rate: float
) -> torch.optim.Optimizer:
    """Return AdamW, or Muon with AdamW for what is not a hidden matrix."""
    groups = muon.param_groups(
        model,
        lr=matrix_rate,
        adamw_lr=other_rate,
        weight_decay=WEIGHT_DECAY,
        adamw_weight_decay=WEIGHT_DECAY,
        betas=BETAS,
    )
    if name == "Muon":
        return muon.Muon(groups, adjust_lr_fn="match_rms_adamw", ns_dtype=model.dtype)
    plain = [
        {"params": [tensor for _, tensor in group["params"]], "lr": group["lr"]} for group in groups
    ]
    return torch.optim.AdamW(plain, betas=BETAS, weight_decay=WEIGHT_DECAY)


def train(plan: Plan, name: str, rates: tuple[float, float], seed: int) -> Run:
    """Train one model; all optimizers see the same parameters and batches for a seed."""
    torch.manual_seed(seed)
    model = GPT(plan.options).to(training_device())
    optimizer = make_optimizer(name, model, *rates)
    losses = losses_of(model, optimizer, plan.options, seed=seed, every=plan.every)
    return Run(optimizer=name, matrix_rate=rates[0], other_rate=rates[1], seed=seed, losses=losses)


def median_losses(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return the median of the validation losses of several runs, step by step."""
    steps = [step for step, _ in runs[0].losses]
    columns = zip(*([loss for _, loss in run.losses] for run in runs), strict=True)
    return [(step, statistics.median(losses)) for step, losses in zip(steps, columns, strict=True)]


def steps_to(losses: Sequence[tuple[int, float]], wanted: float) -> int | None:
    """Return the first step at which a loss is reached."""
    return next((step for step, loss in losses if loss <= wanted), None)


def report(grid: list[Run], plan: Plan) -> Table:
    """Return the last losses of the grid as a table."""
    table = Table(title=f"validation loss after {plan.options.steps} steps, nats per byte")
    for heading in ("optimizer", "lr of matrices"):
        table.add_column(heading)
    for rate in plan.other_rates:
        table.add_column(f"others at {rate:g}", justify="right")
    for name, rate in itertools.product(OPTIMIZERS, plan.matrix_rates):
        row = [run for run in grid if (run.optimizer, run.matrix_rate) == (name, rate)]
        table.add_row(name, f"{rate:g}", *(f"{run.last:.4f}" for run in row))
    return table


def draw(path: Path, best: dict[str, list[Run]], reached: int | None) -> None:
    """Draw the median validation losses, and the range over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (name, runs), colour in zip(best.items(), ("#4292c6", "#e6550d"), strict=True):
        steps, losses = zip(*median_losses(runs), strict=True)
        rates = f"lr {runs[0].matrix_rate:g}, others {runs[0].other_rate:g}"
        axes.plot(steps, losses, color=colour, label=f"{name} ({rates})")
        low, high = (
            [limit(run.losses[at][1] for run in runs) for at in range(len(steps))]
            for limit in (min, max)
        )
        axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
    wanted = median_losses(best["AdamW"])[-1][1]
    axes.axhline(wanted, color="#737373", linewidth=0.8, linestyle="--")
    if reached is not None:
        axes.axvline(reached, color="#737373", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="validation loss, nats per byte", yscale="log")
    axes.yaxis.set_minor_formatter("{x:g}")  # Not as powers of ten.
    axes.legend()
    figure.savefig(path)


def main(
    small: SmallOption = False,
    json_path: JsonOption = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the picture.")] = None,
) -> None:
    """Train both optimizers over the same grid, and compare the best of each."""
    plan = PLANS["small" if small else "default"]
    pairs = list(itertools.product(plan.matrix_rates, plan.other_rates))
    cases = itertools.product(OPTIMIZERS, pairs)
    grid = train_all(train, [(plan, name, pair, 0) for name, pair in cases], "grid")
    best = {}
    for name in OPTIMIZERS:
        first = min((run for run in grid if run.optimizer == name), key=lambda run: run.last)
        rates = first.matrix_rate, first.other_rate
        further = [(plan, name, rates, seed) for seed in range(1, plan.seeds)]
        best[name] = [first, *train_all(train, further, f"best of {name}")]
    wanted = median_losses(best["AdamW"])[-1][1]
    reached = steps_to(median_losses(best["Muon"]), wanted)
    console = Console(width=120)
    console.print(report(grid, plan))
    for name, runs in best.items():
        console.print(f"{name}: {', '.join(f'{run.last:.4f}' for run in runs)} with its best rates")
    console.print(f"Muon reaches the last loss of AdamW, {wanted:.4f}, after {reached} steps")
    if pictures is not None:
        draw(pictures / "steps-to-loss.svg", best, reached)
    write_report(
        json_path,
        plan=asdict(plan),
        grid=[asdict(run) for run in grid],
        best={name: [asdict(run) for run in runs] for name, runs in best.items()},
        wanted=wanted,
        reached=reached,
    )


if __name__ == "__main__":
    typer.run(main)
