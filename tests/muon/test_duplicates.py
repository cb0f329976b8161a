"""Parameters that are in a param group twice."""

from __future__ import annotations

import pytest
import torch

import muon
from tests.support.twins import parameter


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_duplicate_parameter_warns_and_steps_once(algorithm: str, is_named: bool) -> None:
    once, other, twice, another = (parameter(seed) for seed in (0, 1, 0, 1))
    params = [("a", twice), ("b", another), ("c", twice)]
    with pytest.warns(UserWarning, match="duplicate"):
        second = muon.Muon(
            [
                {
                    "params": params if is_named else [tensor for _, tensor in params],
                    "algorithm": algorithm,
                }
            ]
        )
    first = muon.Muon([{"params": [once, other], "algorithm": algorithm}])
    once.grad = twice.grad = parameter(2).detach()
    other.grad = another.grad = parameter(3).detach()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert torch.equal(once, twice)
    assert torch.equal(other, another)
    assert second.param_groups[0].get("param_names") == (["a", "b"] if is_named else None)
