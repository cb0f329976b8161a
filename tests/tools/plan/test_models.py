"""Models from modules: the parameters that an optimizer would get, without their values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tierstore.errors import PlanError
from tierstore.tools.plan.models import Model, ModelParameter, model_from_module


class Tied(nn.Module):
    """An embedding whose table is also the output layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4, dtype=torch.bfloat16)
        self.register_buffer("positions", torch.arange(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_are_listed_once(device: str) -> None:
    with torch.device(device):
        model = model_from_module(Tied())
    assert model == Model(
        "Tied",
        (
            ModelParameter("embed.weight", (10, 4), torch.float32),
            ModelParameter("norm.weight", (4,), torch.bfloat16),
            ModelParameter("norm.bias", (4,), torch.bfloat16),
        ),
    )
    assert model.parameter_count == 48


def test_a_terabyte_on_the_meta_device_takes_no_memory() -> None:
    with torch.device("meta"):
        model = model_from_module(nn.Linear(2**20, 2**20, dtype=torch.bfloat16))
    assert model.parameter_count == 2**40 + 2**20


def test_a_scalar_has_one_element() -> None:
    assert ModelParameter("scale", (), torch.float32).numel == 1


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"'1\.weight' has no shape yet.*call the model once"):
        model_from_module(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))
