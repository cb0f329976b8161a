"""Routing rules: they find parameters that are not hidden matrices, by place and name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

# Names of modules that are, or end in, an output layer of the model.
_HEAD = re.compile(
    r"(^|_)heads?$|(?<!pre_)classifier$|^(cls|score|embed_out|unembed|qa_outputs)$"
    r"|(^|(?<!pre)_)logits(_|$)|_score$|^bbox_pred|^proj_out(_2)?$|^head_dist$|^aux",
    re.IGNORECASE,
)

# Names of an output layer, if it is the last layer of the model.
_LAST = re.compile(r"fc\d*")

# Names of patch embeddings.
_INPUT = re.compile(r"patch_embed|(^|\.)(x_embedder|img_in)(\.|$)")

# Names of parameters that multiply activations.
_WEIGHT = re.compile(
    r"weight|proj|kernel|lora_|^w(_?(q|k|v|o|in|out|up|down|gate))?\d?$", re.IGNORECASE
)

# Parts that wrappers add to names: torch.compile, checkpoint_wrapper, FullyShardedDataParallel.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# "linear.parametrizations.weight.original0" is a part of "linear.weight".
_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original\d*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A parameter under one of its names. A tied parameter has several names."""

    name: str
    parameter: nn.Parameter
    layer: str
    """Name of the module of the parameter, without the parts of wrappers."""
    module: nn.Module
    own: str
    """Name of the parameter in this module."""


Rule = Callable[[Use], bool]


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that wrappers add.

    DataParallel and DistributedDataParallel add "module" at the start.
    """
    parts = _inner_name(name).split(".")
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def uses_named(uses: Collection[Use], name: str, fits: Callable[[str, str], bool]) -> list[Use]:
    """Return the parameters whose names match a name, with or without the parts of wrappers.

    If none matches, also ignore the parts of wrappers in ``name``, and "module" at its start.
    """
    # Some layers may be wrapped, others not: an exact match does not end the search.
    found = [use for use in uses if fits(use.name, name) or fits(_inner_name(use.name), name)]
    plain = plain_name(name)
    return found or [use for use in uses if fits(plain_name(use.name), plain)]


def _inner_name(name: str) -> str:
    """Return a name without the parts that wrappers of any module in the model add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def uses_of(model: nn.Module) -> list[Use]:
    """Return all parameters under all their names, in the order of modules."""
    modules = dict(model.named_modules(remove_duplicate=False))
    uses = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer, _, own = _PARAMETRIZED.sub(r"\1\2", name).rpartition(".")
        uses.append(
            Use(
                name=name,
                parameter=parameter,
                layer=plain_name(layer),
                module=modules[layer],
                own=own,
            )
        )
    return uses


def rules_by_place(
    model: nn.Module, uses: Collection[Use], head: str | Collection[str] | None
) -> dict[str, Rule]:
    """Return the rules for AdamW by name. The first rule that applies decides.

    Args:
        model: the model.
        uses: its parameters.
        head: names of parameters or modules; None: find the head.

    Raises:
        ValueError: the model lacks a parameter or module that ``head`` names.
    """
    first = next((use for use in uses if use.own == "weight" and use.parameter.ndim > 1), None)
    return {
        "embedding": _is_embedding,
        "head": _found_head(model, uses) if head is None else _named_head(uses, head),
        "vector": lambda use: sum(size > 1 for size in use.parameter.shape) < 2,
        "table": _is_table,
        "input": lambda use: (
            _INPUT.search(use.layer) is not None
            or (
                isinstance(use.module, _CONVOLUTIONS)
                and first is not None
                and use.module is first.module
            )
        ),
        "kernel": lambda use: use.parameter.ndim > 2,
        "router": _is_router,
    }


def _named_head(uses: Collection[Use], head: str | Collection[str]) -> Rule:
    named: set[str] = set()
    for name in [head] if isinstance(head, str) else head:
        found = uses_named(uses, name, _is_within)
        if not found:
            raise ValueError(f"the model has no parameter or module {name!r}, named in head")
        named.update(use.name for use in found)
    return lambda use: use.name in named


def _found_head(model: nn.Module, uses: Collection[Use]) -> Rule:
    # A wrapper and its inner module have one plain name. The second, the inner module, counts.
    named_modules = [*model.named_modules(remove_duplicate=False)]
    modules = {plain_name(name): module for name, module in named_modules}
    layers = {
        name: module
        for name, module in modules.items()
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS))
    }
    linears = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    heads: set[str] = set()
    for name, module in modules.items():
        own = name.rpartition(".")[2]
        # Blocks that end a hidden layer are often also named "output".
        named = _HEAD.search(own) is not None or (own == "output" and name in linears)
        if not named or _is_numbered(name):
            continue
        several = isinstance(module, nn.ModuleList)
        for entry in [f"{name}.{index}" for index in range(len(module))] if several else [name]:
            inside = [layer for layer in layers if _is_within(layer, entry)]
            for last in inside[-1:]:
                # A square matrix at the end of a longer module precedes another head.
                if last in linears and (last == entry or not _is_square(linears[last])):
                    heads.add(last)
    for name in [*layers][-1:]:
        if name in linears and _LAST.fullmatch(name.rpartition(".")[2]) and not _is_numbered(name):
            heads.add(name)
    widths = {use.parameter.shape[0] for use in uses if _is_embedding(use)}
    for name in [*linears][-1:]:
        if linears[name].out_features in widths:
            heads.add(name)
    get_output_embeddings = getattr(modules[""], "get_output_embeddings", None)  # Hugging Face
    output = get_output_embeddings() if callable(get_output_embeddings) else None
    heads.update(plain_name(name) for name, module in named_modules if module is output)
    return lambda use: use.own == "weight" and use.layer in heads


def _is_numbered(name: str) -> bool:
    """True if a module is inside a numbered layer. A number at the start counts for the model."""
    return any(part.isdigit() for part in name.split(".")[1:-1])


def _is_square(layer: nn.Linear) -> bool:
    return layer.in_features == layer.out_features


def _is_within(name: str, module: str) -> bool:
    """True if a name is the name of a module, or is inside the module."""
    return name == module or name.startswith(f"{module}.")


def _is_embedding(use: Use) -> bool:
    """True for the weight of an embedding, including embedding classes of other libraries."""
    is_layer = isinstance(use.module, nn.Embedding | nn.EmbeddingBag)
    return use.own == "weight" and (is_layer or "Embedding" in type(use.module).__name__)


def _is_table(use: Use) -> bool:
    """True for a parameter that is added or multiplied elementwise, or looked up."""
    own = use.own.lower()
    return _WEIGHT.search(own) is None or "bias" in own or "Norm" in type(use.module).__name__


def _is_router(use: Use) -> bool:
    """True for scores of experts. The gate of a gated MLP has at least as many rows as columns."""
    rows, columns = use.parameter.shape
    named = use.layer.rpartition(".")[2] == "gate" or "router" in use.layer
    return named and rows < columns
