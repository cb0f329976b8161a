"""Training with states in fewer bytes: validation losses beside full states.

A byte-level GPT with bfloat16 parameters is trained on the source of Python's standard library,
with Muon for its hidden matrices and AdamW for the rest, for each form of the states and each seed.
All forms see the same initial parameters and batches for a seed. Forward and backward are computed
in float32, so that processors without instructions for bfloat16 take no longer. Losses do not
depend on other work on the machine.

``--pictures FOLDER`` draws the validation losses.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import JsonOption, SmallOption, write_report
from rich.console import Console
from rich.table import Table
from trainings import losses_of, train_all

import muon

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Options, training_device

FORMS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "remainder": {"master": "remainder"},
    "24bit": {"master": "24bit"},
    "int8 momentum": {"momentum_dtype": torch.int8},
    "bfloat16 moments": {"moments_dtype": torch.bfloat16},
    "int8 moments": {"moments_dtype": torch.int8},
    "all": {"master": "24bit", "momentum_dtype": torch.int8, "moments_dtype": torch.int8},
}
"""Arguments of Muon. "full": float32 masters, bfloat16 momentum, float32 moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    options: Options
    matrix_rate: float
    """Learning rate of hidden matrices."""
    other_rate: float
    """Learning rate of all other parameters."""
    seeds: int
    every: int
    """Steps from one validation loss to the next."""


PLANS = {
    "small": Plan(
        options=Options(steps=4, layers=1, width=128, batch=4, context=16, seed=0, dropout=0.0),
        matrix_rate=1e-2,
        other_rate=1e-2,
        seeds=2,
        every=2,
    ),
    "default": Plan(
        options=Options(steps=300, layers=4, width=256, batch=16, context=128, seed=0, dropout=0.0),
        matrix_rate=1e-2,
        other_rate=3e-3,
        seeds=3,
        every=15,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    form: str
    seed: int
    losses: list[tuple[int, float]]
    """(step, validation loss in nats per byte)."""

    @property
    def last(self) -> float:
        """The last validation loss."""
        return self.losses[-1][1]


def train(plan: Plan, form: str, seed: int) -> Run:
    """Train one model."""
    torch.manual_seed(seed)
    model = GPT(plan.options).to(training_device())
    model.dtype = torch.float32
    # The optimizer has bfloat16 parameters, and the model their values.
    narrow = {
        name: torch.nn.Parameter(parameter.detach().to(torch.bfloat16))
        for name, parameter in model.named_parameters()
    }
    groups = muon.param_groups(model, lr=plan.matrix_rate, adamw_lr=plan.other_rate)
    for group in groups:
        group["params"] = [(name, narrow[name]) for name, _ in group["params"]]
    optimizer = muon.Muon(
        groups, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32, **FORMS[form]
    )

    @torch.no_grad()
    def widen() -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(narrow[name])

    def give_gradients() -> None:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            narrow[name].grad = parameter.grad.to(torch.bfloat16)
            parameter.grad = None

    losses = losses_of(
        *(model, optimizer, plan.options),
        seed=seed,
        every=plan.every,
        before=widen,
        after=give_gradients,
    )
    return Run(form=form, seed=seed, losses=losses)


def differences(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Return form -> difference of its last loss to full states, for each seed."""
    full = {run.seed: run.last for run in runs if run.form == "full"}
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.form, []).append(run.last - full[run.seed])
    return found


def report(runs: Sequence[Run], plan: Plan) -> Table:
    """Return the last losses as a table."""
    table = Table(title=f"validation loss after {plan.options.steps} steps, nats per byte")
    table.add_column("states")
    for heading in ("median", *(f"seed {seed}" for seed in range(plan.seeds)), "beside full"):
        table.add_column(heading, justify="right")
    for form, beside in differences(runs).items():
        last = [run.last for run in runs if run.form == form]
        table.add_row(
            form,
            f"{statistics.median(last):.4f}",
            *(f"{loss:.4f}" for loss in last),
            f"{statistics.median(beside):+.4f} ({min(beside):+.4f}..{max(beside):+.4f})",
        )
    return table


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw the validation losses of each form, and their differences to full states."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    full = {run.seed: dict(run.losses) for run in runs if run.form == "full"}
    for index, form in enumerate(FORMS):
        of_form = [run for run in runs if run.form == form]
        steps = [step for step, _ in of_form[0].losses]
        losses = [dict(run.losses) for run in of_form]
        above.plot(
            steps, [statistics.median(each[s] for each in losses) for s in steps], label=form
        )
        beside = [
            [dict(run.losses)[step] - full[run.seed][step] for run in of_form] for step in steps
        ]
        below.plot(steps, list(map(statistics.median, beside)), color=f"C{index}")
        low, high = (list(map(limit, beside)) for limit in (min, max))
        below.fill_between(steps, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
    above.set(ylabel="validation loss, nats per byte", yscale="log")
    above.yaxis.set_minor_formatter("{x:g}")  # Not as powers of ten.
    above.legend()
    below.set(xlabel="step", ylabel="difference to full states")
    figure.savefig(path)


def main(
    small: SmallOption = False,
    json_path: JsonOption = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder for the picture.")] = None,
) -> None:
    """Train with each form of the states."""
    plan = PLANS["small" if small else "default"]
    pairs = itertools.product(FORMS, range(plan.seeds))
    runs = train_all(train, [(plan, *pair) for pair in pairs], "training")
    Console(width=120).print(report(runs, plan))
    if pictures is not None:
        draw(pictures / "fewer-bytes.svg", runs)
    write_report(
        json_path,
        plan=asdict(plan),
        runs=[asdict(run) for run in runs],
        differences=differences(runs),
    )


if __name__ == "__main__":
    typer.run(main)
