"""Models as a plan sees them: name, shape and dtype of each parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tierstore.errors import PlanError


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of a model in the order of ``named_parameters()``, tied ones once."""

    name: str
    """For messages: what kind of model it is, or the file that lists its parameters."""
    parameters: tuple[ModelParameter, ...]

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters together."""
        return sum(parameter.numel for parameter in self.parameters)


def model_from_module(module: nn.Module) -> Model:
    """Return the parameters of a module, which may be on the meta device.

    Buffers are left out, and parameters without ``requires_grad`` are not.

    Raises:
        PlanError: a parameter of a lazy module has no shape yet.
    """
    named = list(module.named_parameters())
    for name, parameter in named:
        if nn.parameter.is_lazy(parameter):
            raise PlanError(
                f"parameter {name!r} has no shape yet, as its module is lazy: call the model once "
                "with a batch before planning"
            )
    parameters = (ModelParameter(name, tuple(p.shape), p.dtype) for name, p in named)
    return Model(type(module).__name__, tuple(parameters))
