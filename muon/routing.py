"""Routing: the update rule of each parameter of a model."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import nn

# Names of the last layer of a language model in common model code.
_HEAD_NAMES = frozenset(
    {"lm_head", "head", "output", "embed_out", "unembed", "classifier", "score"}
)


class ParamGroups(list[dict[str, Any]]):
    """Param groups for ``muon.Muon``; prints as a table of parameters and their groups."""

    def __str__(self) -> str:
        table = Table(box=SIMPLE, title="param groups")
        for column in ("group", "algorithm", "lr", "weight decay", "parameter", "shape"):
            table.add_column(column)
        for index, group in enumerate(self):
            # An optimizer takes the names out of "params".
            names = group.get("param_names")
            named = zip(names, group["params"], strict=True) if names else group["params"]
            for position, (name, tensor) in enumerate(named):
                shape = " x ".join(str(size) for size in tensor.shape) or "scalar"
                rates = (f"{group['lr']:g}", f"{group['weight_decay']:g}")
                heading = (str(index), group["algorithm"], *rates) if position == 0 else [""] * 4
                table.add_row(*heading, name, shape)
        # The console is as wide as the table, so that no name is cut.
        width = Console(width=sys.maxsize).measure(table).maximum
        console = Console(width=width, no_color=True, highlight=False, markup=False, emoji=False)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def param_groups(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    adamw_lr: float = 1e-3,
    weight_decay: float = 0.1,
    adamw_weight_decay: float = 0.01,
    adamw_names: Collection[str] = (),
) -> ParamGroups:
    """Route the parameters of a model: hidden matrices to Muon, all other parameters to AdamW.

    AdamW gets embeddings, the head, parameters with fewer than two dimensions, and
    ``adamw_names``. The head is found by the name of its module, by the model's
    ``get_output_embeddings()``, or as the last Linear layer if its width is the number of entries
    of an embedding. Frozen parameters are left out; a tied parameter appears once.

    Args:
        model: the model, after ``requires_grad`` was set.
        lr: learning rate of the Muon group; the default is that of ``torch.optim.Muon``.
        adamw_lr: learning rate of the AdamW group; the default is that of ``torch.optim.AdamW``.
        weight_decay: weight decay of the Muon group.
        adamw_weight_decay: weight decay of the AdamW group.
        adamw_names: names of more parameters for AdamW.

    Returns:
        One group for each algorithm that has parameters, with named parameters.

    Raises:
        ValueError: a parameter has more than two dimensions and is not in ``adamw_names``, the
            model has no parameter of a name in ``adamw_names``, or no parameter requires a
            gradient.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    aliases = dict(model.named_parameters(remove_duplicate=False))
    unknown = sorted(set(adamw_names) - set(aliases))
    if unknown:
        raise ValueError(f"the model has no parameter {unknown[0]!r}, named in adamw_names")
    elementwise = _embeddings_and_head(model) | {id(aliases[name]) for name in adamw_names}
    matrices, others = [], []
    for name, parameter in parameters.items():
        if id(parameter) in elementwise or parameter.ndim < 2:
            others.append((name, parameter))
        elif parameter.ndim == 2:
            matrices.append((name, parameter))
        else:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(parameter.shape)}: Muon needs "
                "two-dimensional parameters. Name it in adamw_names"
            )
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient")
    rates = {"muon": (matrices, lr, weight_decay), "adamw": (others, adamw_lr, adamw_weight_decay)}
    return ParamGroups(
        {"params": params, "algorithm": algorithm, "lr": rate, "weight_decay": decay}
        for algorithm, (params, rate, decay) in rates.items()
        if params
    )


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the ids of the weights of all embeddings and of the output layer."""
    found: set[int] = set()
    vocabularies: set[int] = set()
    last_linear: nn.Linear | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found.add(id(module.weight))
            vocabularies.add(module.num_embeddings)
        elif isinstance(module, nn.Linear):
            last_linear = module
            if name.rpartition(".")[2] in _HEAD_NAMES:
                found.add(id(module.weight))
    if last_linear is not None and last_linear.out_features in vocabularies:
        found.add(id(last_linear.weight))
    get_output_embeddings = getattr(model, "get_output_embeddings", None)  # Hugging Face
    if callable(get_output_embeddings):
        head = get_output_embeddings()
        if head is not None and isinstance(head.weight, torch.Tensor):
            found.add(id(head.weight))
    return found
