"""Models as a plan sees them: name, shape and dtype of each parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.errors import PlanError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Name -> dtype that a parameter in pages may have."""

ELEMENTS_MAX = 10**15
"""Most elements of a model: a thousand times the elements of the largest published models."""


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: str | None = field(default=None, compare=False)
    """Class of its module: "embedding", "linear" or "other"; None if only the name can tell."""
    share: float = field(default=1.0, compare=False)
    """Share of its elements that a token passes through: of stacked experts, the visited ones."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of a model in the order of ``named_parameters()``, tied ones once.

    Raises:
        PlanError: the model has no elements, or more than ELEMENTS_MAX.
    """

    name: str
    """For messages: the type of the model, or the file that lists its parameters."""
    parameters: tuple[ModelParameter, ...]

    def __post_init__(self) -> None:
        if not 0 < self.parameter_count <= ELEMENTS_MAX:
            raise PlanError(
                f"the parameters of {self.name} have {self.parameter_count:.4g} elements, expected "
                f"1 to {ELEMENTS_MAX:.0g}: describe a model that can be trained"
            )

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters together."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def active_count(self) -> int:
        """Number of elements that a token passes through."""
        return round(sum(parameter.share * parameter.numel for parameter in self.parameters))


def layer_of(name: str) -> str | None:
    """Return the name of a parameter up to the first number, or None if it has none.

    Example: "model.layers.7.mlp.up_proj.weight" is of "model.layers.7".
    """
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: position + 1])
    return None


def model_from_module(module: nn.Module) -> Model:
    """Return the parameters of a module, which may be on the meta device.

    Buffers are left out. Parameters without ``requires_grad`` are included.

    Raises:
        PlanError: the model has no parameters, or a lazy one without a shape.
    """
    named = list(module.named_parameters())
    layers = {
        id(p): _layer(owner) for owner in module.modules() for p in owner._parameters.values()
    }
    for name, parameter in named:
        if nn.parameter.is_lazy(parameter):
            raise PlanError(
                f"parameter {name!r} has no shape yet, its module is lazy: call the model once "
                "with a batch before planning"
            )
    parameters = (ModelParameter(name, tuple(p.shape), p.dtype, layers[id(p)]) for name, p in named)
    return Model(type(module).__name__, tuple(parameters))


def _layer(module: nn.Module) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    return "linear" if isinstance(module, nn.Linear) else "other"
