"""A module without values that has the parameters of a planned model."""

from __future__ import annotations

import re

import torch
from torch import nn

from tierstore.errors import PlanError
from tierstore.tools.plan.models import Model, ModelParameter

# The last part of the names of tables of tokens or positions.
_EMBEDDING = re.compile(r"embed|^wte$|^wpe$")


def skeleton_of(model: Model) -> nn.Module:
    """Return modules on the meta device whose parameters have the model's names, shapes and order.

    Optimizers route parameters by name and by class of the module. A module has its class in the
    model if that is known. Otherwise a module with a matrix "weight" is an ``nn.Embedding`` if its
    name says so, else an ``nn.Linear``; all other modules are plain ones.

    Raises:
        PlanError: no module can have parameters of these names in this order.
    """
    layers: dict[str, nn.Module] = {}
    for parameter in model.parameters:
        path, _, own = parameter.name.rpartition(".")
        if path and (own == "weight" or path not in layers):
            layers[path] = _layer_of(parameter)
    root = nn.Module()
    for parameter in model.parameters:
        path, _, own = parameter.name.rpartition(".")
        try:
            owner = _owner(root, path, layers)
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            owner.register_parameter(own, nn.Parameter(empty))
        except KeyError as error:
            raise PlanError(
                f"{parameter.name!r} cannot be a parameter beside the others ({error}): list the "
                "names of named_parameters()"
            ) from error
    for parameter, (name, _) in zip(model.parameters, root.named_parameters(), strict=True):
        if parameter.name != name:
            raise PlanError(
                f"{parameter.name!r} is listed where a module with these parameters has {name!r}: "
                "list the parameters in the order of named_parameters()"
            )
    return root


def _layer_of(parameter: ModelParameter) -> nn.Module:
    """Return an empty module of the class that a parameter belongs to."""
    path, _, own = parameter.name.rpartition(".")
    layer = parameter.layer
    if layer is None:
        is_named = _EMBEDDING.search(path.rpartition(".")[2])
        is_matrix = own == "weight" and len(parameter.shape) == 2
        layer = ("embedding" if is_named else "linear") if is_matrix else "other"
    made: nn.Module = nn.Module()
    if layer == "embedding":
        # Initialization of values on the meta device would import a compiler.
        made = nn.Embedding(1, 1, _weight=torch.empty(1, 1, device="meta"))
    elif layer == "linear":
        made = nn.Linear(1, 1, bias=False, device="meta")
    made._parameters.clear()
    return made


def _owner(root: nn.Module, path: str, layers: dict[str, nn.Module]) -> nn.Module:
    """Return the module at a path; make absent modules."""
    owner, walked = root, ""
    for part in path.split(".") if path else ():
        walked = f"{walked}.{part}" if walked else part
        if part not in owner._modules:
            owner.add_module(part, layers.get(walked, nn.Module()))
        found = owner._modules[part]
        assert found is not None
        owner = found
    return owner
