"""DeepSpeed's own states, before any conversion."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from tests.peers.deepspeed_cases import CASES
from tests.peers.programs.deepspeed_writer import STEPS, Model, gradients_of

BETA1, MOMENTUM = 0.8, 0.9  # As in the program.


@pytest.mark.parametrize("name", CASES)
def test_states_are_averages_of_the_gradients(deepspeed: dict[str, Path], name: str) -> None:
    truth = numpy.load(deepspeed[name] / "truth.npz")
    model = Model(CASES[name].get("big", False))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    gradients = [gradients_of(step, shapes) for step in range(STEPS)]
    averages = 0
    for key in truth.files:
        parameter, state = key.split("|")
        if state not in ("exp_avg", "momentum_buffer"):
            continue
        beta = BETA1 if state == "exp_avg" else MOMENTUM
        expected = torch.zeros(shapes[parameter], dtype=torch.float64)
        for gradient in gradients:
            expected = beta * expected + (1 - beta) * gradient[parameter].double()
        # Muon's momentum may be kept in bf16, with a unit roundoff of 2**-8 in each of 3 steps.
        tolerance = 1e-6 if state == "exp_avg" else 4 * 2**-8
        torch.testing.assert_close(
            torch.from_numpy(truth[key]).double(), expected, rtol=tolerance, atol=tolerance
        )
        averages += 1
    assert averages == len(shapes)
