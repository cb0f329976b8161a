"""The statistics example, against the same figures in float64 from singular values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
from examples.matrix_statistics import MatrixStatistics
from tests.muon.test_coefficients import MATRICES, random
from tests.support.forked_programs import run_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "matrix_statistics.py"
STEPS = 5


def stable_rank(matrix: torch.Tensor) -> float:
    values = torch.linalg.svdvals(matrix.double())
    return float((values**2).sum() / values[0] ** 2)


def taken(
    gradient: torch.Tensor, matrices: Any = (), **options: Any
) -> dict[tuple[int, ...], dict[str, float]]:
    """Return the figures of one step of a parameter with this gradient, by first element."""
    hook = MatrixStatistics()
    hook.is_on = True
    parameter = torch.nn.Parameter(torch.ones_like(gradient))
    group = {"params": [("w", parameter)], "matrices": matrices}
    options = {"momentum": 0.0, "nesterov": False, "ns_dtype": torch.float32, **options}
    optimizer = muon.Muon([group], hooks=[hook], **options)
    parameter.grad = gradient.clone()
    optimizer.step()
    return {starts: figures for (_, starts), figures in hook.take().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MATRICES)
def test_equals_the_formulas(name: str, dtype: torch.dtype) -> None:
    whole = MATRICES[name]().to(dtype)
    parameter = torch.nn.Parameter(random(*whole.shape).to(dtype))
    hook = MatrixStatistics()
    hook.is_on = True
    options = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "lr": 0.1}
    optimizer = muon.Muon([("w", parameter)], ns_dtype=dtype, hooks=[hook], **options)
    for _ in range(STEPS):
        before = parameter.detach().clone()
        parameter.grad = whole
        optimizer.step()
    ratio = float((parameter.detach() - before).norm() / before.norm())
    [(place, found)] = hook.take().items()
    assert place == ("w", (0, 0))
    # An update of 0.1 of the weights, subtracted in the dtype.
    assert found["update_ratio"] == pytest.approx(ratio, rel=1e-5 if dtype.itemsize == 4 else 1e-12)
    assert found["dead_rows"] == (1 if name == "zero" else 0)
    if name == "zero":
        assert math.isnan(found["stable_rank"])
        return
    exact = stable_rank(whole)
    # One iteration finds the square of the largest singular value, or 0.62 of it and more.
    assert exact * (1 - 1e-5) <= found["stable_rank"] <= exact * 1.6
    if name in ("rank 1", "one row"):
        assert found["stable_rank"] == pytest.approx(1, rel=1e-5)


def test_inputs_in_bfloat16() -> None:
    whole = random(60, 8).bfloat16()
    [found] = taken(whole, ns_dtype=torch.bfloat16).values()
    assert stable_rank(whole) * 0.999 <= found["stable_rank"] <= stable_rank(whole) * 1.6


@pytest.mark.parametrize("dead", [0, 1, 13, 39])
def test_rows_without_gradients_are_dead(dead: int) -> None:
    whole = random(40, 24).float()
    whole[:dead] = 0
    whole[0] *= 1e-4
    assert taken(whole)[0, 0]["dead_rows"] == max(dead, 1) / 40


def test_outputs_of_transposed_matrices_are_columns() -> None:
    whole = random(12, 8).float()
    whole[:, 2:] = 0
    assert taken(whole, (("transposed",),))[0, 0]["dead_rows"] == 6 / 8


def test_each_matrix_of_a_parameter_has_figures() -> None:
    whole = random(24, 10).float()
    found = taken(whole, (("blocks", 0, 8),))
    assert found.keys() == {(0, 0), (8, 0), (16, 0)}
    for (row, _), figures in found.items():
        exact = stable_rank(whole[row : row + 8])
        assert exact * 0.999 <= figures["stable_rank"] <= exact * 1.6


def test_steps_that_are_not_sampled_have_no_figures_and_no_step_changes(tmp_path: Path) -> None:
    values = []
    for hooks in ([], [MatrixStatistics()]):
        parameter = torch.nn.Parameter(random(16, 12).float())
        optimizer = muon.Muon([("w", parameter)], hooks=hooks)
        for step in range(1, 8):
            parameter.grad = random(16, 12).float().roll(step, 0)
            for hook in hooks:
                hook.is_on = step % 3 == 0
            optimizer.step()
            for hook in hooks:
                hook.append_lines(str(tmp_path / "lines"), step)
        values.append(parameter.detach())
    assert torch.equal(*values)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(line["parameter"], line["starts"], line["step"]) for line in lines] == [
        ("w", [0, 0], 3),
        ("w", [0, 0], 6),
    ]


def test_a_line_has_null_for_nan(tmp_path: Path) -> None:
    hook = MatrixStatistics()
    hook.is_on = True
    parameter = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = muon.Muon([("w", parameter)], hooks=[hook])
    parameter.grad = torch.zeros(4, 6)
    optimizer.step()
    hook.append_lines(str(tmp_path / "lines"), 1)
    line = json.loads((tmp_path / "lines").read_text())
    assert (line["stable_rank"], line["dead_rows"], line["update_ratio"]) == (None, 1, 0)


def test_the_program_writes_lines(tmp_path: Path) -> None:
    done = run_program(EXAMPLE, tmp_path / "lines")
    assert done.returncode == 0, done
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(10, 51, 10))
    assert all(0 < line["update_ratio"] < 1 for line in lines)
