"""Time of Newton-Schulz: beside the products that it is made of, and in a step.

Four take turns on the same matrix: the 15 products of five iterations with nothing between them;
the iteration as it is usually written, which is what muon computes for smaller matrices; what muon
computes; and what it computes with ns_method="gram". Operations are counted nominally, as
20 r^2 c + 10 r^3 for r rows and c columns, r <= c, also where fewer are done. The distance of each
result to the result in float64 shows the error of the shorter computations.

Then each shape of a model of 1.2B parameters is stepped by torch.optim.Muon and by muon.Muon in
turns. The sums weigh each shape by its number of matrices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from measuring import JsonOption, SmallOption, ratio_text, rotated, spread, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step import now_s

import muon
from muon import newton_schulz

ITERATIONS = 5
_Shape = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    shapes: tuple[_Shape, ...]
    rounds: int
    model: tuple[tuple[_Shape, int], ...]
    """Shapes of the matrices of a model, and their numbers."""
    step_rounds: int


PLANS = {
    "small": Plan(
        shapes=((32, 64), (96, 128)),
        rounds=2,
        model=(((32, 32), 2), ((64, 32), 1)),
        step_rounds=2,
    ),
    "default": Plan(
        shapes=((768, 768), (2304, 768), (768, 3072), (2048, 2048), (2048, 8192), (2048, 11059)),
        rounds=9,
        # 16 layers of hidden size 2048: q and o, k and v, gate and up, down.
        model=(((2048, 2048), 32), ((512, 2048), 32), ((8192, 2048), 32), ((2048, 8192), 16)),
        step_rounds=7,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the first table. Ratios are extremes and quartiles over all rounds."""

    shape: _Shape
    dtype: str
    products_s: float
    """Median of the products alone."""
    usual_of_products: tuple[float, ...]
    """Rate of the usual iteration over the rate of the products."""
    ours_of_products: tuple[float, ...]
    ratio: tuple[float, ...]
    """Time of ours over the time of the usual iteration."""
    gram_ratio: tuple[float, ...]
    """Time of ours with ns_method="gram" over the time of the usual iteration."""
    usual_error: float
    """Distance to the result in float64, over the norm of that result."""
    ours_error: float
    gram_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the second table: medians over all rounds."""

    shape: _Shape
    count: int
    theirs_s: float
    ours_s: float
    ratio: tuple[float, ...]


def wide_of(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, or its transpose, with no more rows than columns."""
    return matrix.T if matrix.size(0) > matrix.size(1) else matrix


def products(matrix: torch.Tensor) -> None:
    """Do the products of five iterations, without what is done between them."""
    wide = wide_of(matrix)
    for _ in range(ITERATIONS):
        gram = torch.matmul(wide, wide.T)  # (rows, rows)
        torch.matmul(gram, gram)
        torch.matmul(gram, wide)  # (rows, columns)


def usual(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalize a matrix by five iterations with full products."""
    wide = wide_of(matrix)
    wide = wide / wide.norm()
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445
        )
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def seconds(function: Callable[[torch.Tensor], object], matrix: torch.Tensor) -> float:
    """Return the seconds of a function on a copy of a matrix."""
    copy = matrix.clone()
    began_s = now_s()
    function(copy)
    return now_s() - began_s


def measure(shape: _Shape, dtype: torch.dtype, rounds: int, device: torch.device) -> Row:
    """Measure one shape in one dtype."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    matrix /= matrix.norm()  # Products of it stay finite.
    exact = usual(matrix.double())

    def error(update: torch.Tensor) -> float:
        return float((update.double() - exact).norm() / exact.norm())

    gram = partial(muon.orthogonalize_, method="gram")
    functions = (products, usual, muon.orthogonalize_, gram)
    usual_error, ours_error, gram_error = (error(each(matrix.clone())) for each in functions[1:])
    for each in functions:  # The first product of a dtype loads the kernels of a GPU.
        seconds(each, matrix)
    turns: list[dict[Callable[..., object], float]] = []
    for number in range(rounds):
        turns.append({each: seconds(each, matrix) for each in rotated(functions, number)})

    def ratios(first: Callable[..., object], second: Callable[..., object]) -> tuple[float, ...]:
        return spread([turn[first] / turn[second] for turn in turns])

    return Row(
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        products_s=statistics.median(turn[products] for turn in turns),
        usual_of_products=ratios(products, usual),
        ours_of_products=ratios(products, muon.orthogonalize_),
        ratio=ratios(muon.orthogonalize_, usual),
        gram_ratio=ratios(gram, usual),
        usual_error=usual_error,
        ours_error=ours_error,
        gram_error=gram_error,
    )


def step_seconds(optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds of a step."""
    began_s = now_s()
    optimizer.step()
    return now_s() - began_s


def measure_step(
    shape: _Shape, count: int, rounds: int, device: torch.device
) -> tuple[Step, list[tuple[float, float]]]:
    """Step one float32 matrix with both optimizers; also return both times of each round."""
    optimizers: list[torch.optim.Optimizer] = []
    for make in (torch.optim.Muon, muon.Muon):
        parameter = torch.nn.Parameter(torch.zeros(shape, device=device))
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        parameter.grad = gradient.to(device)
        optimizers.append(make([parameter], lr=0.02))
        optimizers[-1].step()  # The first makes the states.
    turns = []
    for number in range(rounds):
        found = {id(each): step_seconds(each) for each in rotated(optimizers, number)}
        turns.append((found[id(optimizers[0])], found[id(optimizers[1])]))
    step = Step(
        shape=shape,
        count=count,
        theirs_s=statistics.median(theirs for theirs, _ in turns),
        ours_s=statistics.median(ours for _, ours in turns),
        ratio=spread([ours / theirs for theirs, ours in turns]),
    )
    return step, turns


def weighted(
    model: Sequence[tuple[_Shape, int]], turns: Sequence[Sequence[tuple[float, float]]]
) -> tuple[float, ...]:
    """Return the ratio of the times of all matrices of the model, round by round."""
    counts = [count for _, count in model]
    ratios = []
    for of_round in zip(*turns, strict=True):
        theirs, ours = (
            sum(count * pair[at] for count, pair in zip(counts, of_round, strict=True))
            for at in (0, 1)
        )
        ratios.append(ours / theirs)
    return spread(ratios)


def report(rows: list[Row]) -> Table:
    """Return the first table."""
    table = Table(title="Newton-Schulz: rates of nominal operations, medians (quartiles)")
    for heading in ("matrix", "dtype"):
        table.add_column(heading)
    for heading in ("products, Gop/s", "usual, of it", "ours, of it", "ours, of usual time"):
        table.add_column(heading, justify="right")
    table.add_column("gram, of usual time", justify="right")
    table.add_column("errors: usual, ours, gram", justify="right")
    for row in rows:
        table.add_row(
            f"{row.shape[0]} x {row.shape[1]}",
            row.dtype,
            f"{newton_schulz.flops(row.shape) / row.products_s / 1e9:.0f}",
            ratio_text(row.usual_of_products),
            ratio_text(row.ours_of_products),
            ratio_text(row.ratio),
            ratio_text(row.gram_ratio),
            f"{row.usual_error:.1e}, {row.ours_error:.1e}, {row.gram_error:.1e}",
        )
    return table


def step_report(steps: list[Step], total: tuple[float, ...]) -> Table:
    """Return the second table."""
    table = Table(title="A step, beside torch.optim.Muon: medians (quartiles)")
    for heading in ("matrix", "count", "torch, ms", "ours, ms", "ours, of torch"):
        table.add_column(heading, justify="left" if heading == "matrix" else "right")
    for step in steps:
        times = (f"{step.theirs_s * 1e3:.0f}", f"{step.ours_s * 1e3:.0f}")
        name = f"{step.shape[0]} x {step.shape[1]}"
        table.add_row(name, str(step.count), *times, ratio_text(step.ratio))
    table.add_row("all of them", "", "", "", ratio_text(total))
    return table


def main(
    small: SmallOption = False,
    json_path: JsonOption = None,
    device_name: Annotated[
        str, typer.Option("--device", help="Where to compute: cpu or cuda.")
    ] = "cpu",
) -> None:
    """Compare Newton-Schulz with its products, the usual iteration and torch.optim.Muon."""
    plan = PLANS["small" if small else "default"]
    device = torch.device(device_name)
    rows = [
        measure(shape, dtype, plan.rounds, device)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in track(plan.shapes, description=str(dtype))
    ]
    measured = [
        measure_step(shape, count, plan.step_rounds, device)
        for shape, count in track(plan.model, description="steps")
    ]
    steps = [step for step, _ in measured]
    total = weighted(plan.model, [turns for _, turns in measured])
    console = Console(width=170)
    console.print(report(rows))
    console.print(step_report(steps, total))
    write_report(
        json_path,
        plan=asdict(plan),
        device=device_name,
        rows=[asdict(row) for row in rows],
        steps=[asdict(step) for step in steps],
        step_ratio=total,
    )


if __name__ == "__main__":
    typer.run(main)
