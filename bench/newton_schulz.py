"""Time of Newton-Schulz on this CPU, compared with the iteration as it is usually written.

Both take turns on the same matrix, the usual iteration twice. The distance of each result to the
result in float64 shows the error of the shorter computation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import typer
from measuring import JsonOption, SmallOption, ratio_text, spread, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

import muon


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of one run of the benchmark."""

    shapes: tuple[tuple[int, int], ...]
    rounds: int


PLANS = {
    "small": Plan(shapes=((64, 256), (512, 768)), rounds=2),
    "default": Plan(
        shapes=((768, 768), (2304, 768), (768, 3072), (2048, 2048), (2048, 8192)), rounds=15
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result: medians over all rounds."""

    shape: tuple[int, int]
    dtype: str
    usual_s: float
    ours_s: float
    ratio: tuple[float, ...]
    """Ours over the mean of both turns of the usual iteration: extremes and quartiles."""
    usual_ratio: tuple[float, ...]
    """Second turn of the usual iteration over its first."""
    usual_error: float
    """Distance to the result in float64, over the norm of that result."""
    ours_error: float


def usual(matrix: torch.Tensor) -> torch.Tensor:
    """Orthogonalize a matrix by five iterations with full products."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445
        )
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def seconds(function: Callable[[torch.Tensor], torch.Tensor], matrix: torch.Tensor) -> float:
    """Return the seconds of a function on a copy of a matrix."""
    copy = matrix.clone()
    began_s = time.perf_counter()
    function(copy)
    return time.perf_counter() - began_s


def measure(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> Row:
    """Measure one shape in one dtype."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = usual(matrix.double())

    def error(update: torch.Tensor) -> float:
        return float((update.double() - exact).norm() / exact.norm())

    usual_error, ours_error = error(usual(matrix)), error(muon.orthogonalize_(matrix.clone()))
    turns = [
        [seconds(function, matrix) for function in (usual, muon.orthogonalize_, usual)]
        for _ in range(rounds)
    ]
    return Row(
        shape=shape,
        dtype=str(dtype).removeprefix("torch."),
        usual_s=statistics.median(first for first, _, _ in turns),
        ours_s=statistics.median(ours for _, ours, _ in turns),
        ratio=spread([ours / statistics.mean((a, b)) for a, ours, b in turns]),
        usual_ratio=spread([b / a for a, _, b in turns]),
        usual_error=usual_error,
        ours_error=ours_error,
    )


def report(rows: list[Row]) -> Table:
    """Return the results as a table."""
    table = Table(title="Newton-Schulz, medians (quartiles)")
    for heading in ("matrix", "dtype"):
        table.add_column(heading)
    for heading in ("usual ms", "ours ms", "of usual", "usual of itself", "errors"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.shape[0]} x {row.shape[1]}",
            row.dtype,
            f"{row.usual_s * 1e3:.1f}",
            f"{row.ours_s * 1e3:.1f}",
            ratio_text(row.ratio),
            ratio_text(row.usual_ratio),
            f"{row.usual_error:.1e}, {row.ours_error:.1e}",
        )
    return table


def main(small: SmallOption = False, json_path: JsonOption = None) -> None:
    """Compare Newton-Schulz with the iteration as it is usually written."""
    plan = PLANS["small" if small else "default"]
    rows = [
        measure(shape, dtype, plan.rounds)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in track(plan.shapes, description=str(dtype))
    ]
    Console(width=120).print(report(rows))
    write_report(json_path, plan=asdict(plan), rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    typer.run(main)
