"""A module without values that has the parameters of a planned model."""

from __future__ import annotations

import re

import torch
from torch import nn

from tierstore.plan.models import Model

# The last part of the names of tables of tokens or positions.
_EMBEDDING = re.compile(r"embed|^wte$|^wpe$")


def skeleton_of(model: Model) -> nn.Module:
    """Return modules on the meta device whose parameters have the model's names and order.

    Optimizers route parameters by name and by class of the module: a matrix named "weight" becomes
    that of an ``nn.Embedding`` if its module is named as one, else of an ``nn.Linear``; all other
    parameters become those of a plain ``nn.Module``.
    """
    root = nn.Module()
    for parameter in model.parameters:
        *path, own = parameter.name.split(".")
        owner, parents = root, path if own != "weight" or len(parameter.shape) != 2 else path[:-1]
        for part in parents:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if len(parents) == len(path):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            owner.register_parameter(own, nn.Parameter(empty))
            continue
        rows, columns = parameter.shape
        if _EMBEDDING.search(path[-1]):
            layer: nn.Module = nn.Embedding(rows, columns, device="meta", dtype=parameter.dtype)
        else:
            layer = nn.Linear(columns, rows, bias=False, device="meta", dtype=parameter.dtype)
        owner.add_module(path[-1], layer)
    return root
