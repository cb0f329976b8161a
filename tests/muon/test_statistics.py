"""Statistics of steps, against the same in float64 from the singular values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.muon.test_coefficients import MATRICES, random

STEPS = 5


def stable_rank(matrix: torch.Tensor) -> float:
    values = torch.linalg.svdvals(matrix.double())
    return float((values**2).sum() / values[0] ** 2)


def stepped(
    whole: torch.Tensor,
    steps: int = STEPS,
    store: tierstore.TierStore | None = None,
    **options: Any,
) -> tuple[muon.Muon, float]:
    """Return an optimizer after some steps, and the relative size of the last one."""
    parameter = torch.nn.Parameter(random(*whole.shape).to(whole.dtype))
    options = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "lr": 0.1, **options}
    optimizer = muon.Muon([("w", parameter)], store=store, statistics_every=1, **options)
    ratio = 0.0
    for _ in range(steps):
        before = parameter.detach().clone()
        parameter.grad = whole
        optimizer.step()
        ratio = float((parameter.detach() - before).norm() / before.norm())
    return optimizer, ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MATRICES)
def test_equals_the_formulas(name: str, dtype: torch.dtype) -> None:
    whole = MATRICES[name]().to(dtype)
    optimizer, ratio = stepped(whole, ns_dtype=dtype)
    found = optimizer.statistics()["w"]
    assert found.step == STEPS
    # An update of 0.1 of the weights, subtracted in the dtype.
    assert found.update_ratio == pytest.approx(ratio, rel=1e-5 if dtype == torch.float32 else 1e-12)
    assert found.dead_rows == (1 if name == "zero" else 0)
    if name == "zero":
        assert math.isnan(found.stable_rank)
        return
    exact = stable_rank(whole)
    # One iteration finds the square of the largest singular value, or 0.62 of it and more.
    assert exact * (1 - 1e-5) <= found.stable_rank <= exact * 1.6
    if name in ("rank 1", "one row"):
        assert found.stable_rank == pytest.approx(1, rel=1e-5)


def test_bfloat16_inputs() -> None:
    whole = random(300, 40).bfloat16()
    found = stepped(whole)[0].statistics()["w"]
    assert stable_rank(whole) * 0.999 <= found.stable_rank <= stable_rank(whole) * 1.6


@pytest.mark.parametrize("dead", [0, 1, 13, 39])
def test_rows_without_gradients_are_dead(dead: int) -> None:
    whole = random(40, 24).float()
    whole[:dead] = 0
    whole[0] *= 1e-4
    assert stepped(whole)[0].statistics()["w"].dead_rows == max(dead, 1) / 40


def test_large_matrices_are_taken_in_pieces() -> None:
    whole = random(1500, 1000).float()
    found = stepped(whole, steps=1)[0].statistics()["w"]
    assert stable_rank(whole) * 0.999 <= found.stable_rank <= stable_rank(whole) * 1.6


def test_matrices_of_a_parameter_count_together() -> None:
    whole = random(24, 10).float()
    blocks = whole.split(8)
    parameter = torch.nn.Parameter(torch.ones_like(whole))
    before = parameter.detach().clone()
    group = {"params": [("w", parameter)], "matrices": (("blocks", 0, 8),), "lr": 0.1}
    optimizer = muon.Muon([group], statistics_every=1, momentum=0.0, nesterov=False, weight_decay=0)
    parameter.grad = whole.clone()
    optimizer.step()
    found = optimizer.statistics()["w"]
    exact = sum(map(stable_rank, blocks)) / 3
    assert exact * 0.999 <= found.stable_rank <= exact * 1.6
    ratio = (parameter.detach() - before).norm() / before.norm()
    assert found.update_ratio == pytest.approx(float(ratio), rel=1e-5)


def test_only_steps_that_are_due_are_sampled(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(random(8, 6).float()) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": [("a", parameters[0]), ("b", parameters[1])]},
        {"params": [("c", parameters[2])], "algorithm": "adamw"},
    ]
    lines = tmp_path / "statistics.jsonl"
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(groups, store=store, statistics_every=3)
        steps = []
        for step in range(1, 8):
            for number, parameter in enumerate(parameters):
                parameter.grad = None if number == 1 and step == 6 else torch.ones_like(parameter)
            optimizer.step()
            found = optimizer.statistics(lines if step % 3 == 0 else None)
            steps.append({name: one.step for name, one in found.items()})
    assert steps == [{}, {}, *[{"a": 3, "b": 3}] * 3, {"a": 6}, {"a": 6}]
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(line["parameter"], line["step"]) for line in written] == [("a", 3), ("b", 3), ("a", 6)]
    assert written[0].keys() == {"parameter", "step", "stable_rank", "update_ratio", "dead_rows"}
    assert written[0]["stable_rank"] == pytest.approx(1, rel=1e-5)


def test_samples_change_no_result() -> None:
    values = []
    for every in (None, 2):
        parameter = torch.nn.Parameter(random(16, 12).float())
        optimizer = muon.Muon([parameter], statistics_every=every)
        for step in range(1, 6):
            parameter.grad = random(16, 12).float().roll(step, 0)
            optimizer.step()
        values.append(parameter.detach())
    assert torch.equal(*values)


def test_a_line_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    optimizer, _ = stepped(torch.zeros(4, 6))
    optimizer.statistics(tmp_path / "lines")
    written = json.loads((tmp_path / "lines").read_text())
    assert (written["stable_rank"], written["dead_rows"], written["update_ratio"]) == (None, 1, 0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="statistics_every must be a whole number above 0, got 0"):
        muon.Muon([torch.nn.Parameter(torch.ones(2, 2))], statistics_every=0)


def test_outputs_of_transposed_matrices_are_columns() -> None:
    whole = random(12, 8).float()
    whole[:, 2:] = 0
    parameter = torch.nn.Parameter(torch.ones(12, 8))
    group = {"params": [("w", parameter)], "matrices": (("transposed",),)}
    optimizer = muon.Muon([group], statistics_every=1)
    parameter.grad = whole
    optimizer.step()
    assert optimizer.statistics()["w"].dead_rows == 6 / 8


def test_a_step_that_is_skipped_leaves_the_last_sample() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 5))
    optimizer = muon.Muon([("w", parameter)], statistics_every=1, nonfinite="skip")
    parameter.grad = torch.ones(4, 5)
    optimizer.step()
    before = optimizer.statistics()
    parameter.grad[0] = torch.nan
    with pytest.warns(UserWarning, match="This step is skipped"):
        optimizer.step()
    assert optimizer.statistics() == before
    assert before["w"].step == 1


def test_restore_forgets_the_sample_of_a_later_step(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 5))
    with tierstore.TierStore(tmp_path, commit_every=2) as store:
        optimizer = muon.Muon([("w", parameter)], store=store, statistics_every=1)
        for _ in range(3):
            parameter.grad = torch.ones(4, 5)
            optimizer.step()
        assert optimizer.statistics()["w"].step == 3
        assert optimizer.restore() == 2
        assert optimizer.statistics() == {}


def test_experts_of_zeros_do_not_count_for_the_stable_rank() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4, 5))
    group = {"params": [("w", parameter)], "matrices": (("stack",),)}
    optimizer = muon.Muon([group], statistics_every=1)
    parameter.grad = torch.ones(3, 4, 5)
    parameter.grad[1] = 0
    optimizer.step()
    assert optimizer.statistics()["w"].stable_rank == pytest.approx(1, rel=1e-5)
