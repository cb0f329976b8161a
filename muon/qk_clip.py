"""QK-clip: heads whose attention logits grow too large get smaller queries and keys.

A head whose largest logit S is above the threshold gets g = threshold / S. Its queries and keys are
scaled by powers of g whose product is g (Kimi K2, arXiv 2507.20534, algorithm 1):

- a head with its own keys: sqrt(g) for its queries and for its keys;
- a head with shared keys, as in grouped-query attention: g for its queries, because smaller keys
  would change the other heads. In latent attention all heads share the rotary key: g for the rotary
  part of the queries, sqrt(g) for the other part and its keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import tierstore

_QK_NORMS = frozenset(
    {"q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"}
    | {"query_layernorm", "key_layernorm", "norm_q", "norm_k"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of a parameter from which the queries or keys of one head are computed."""

    parameter: torch.Tensor
    head: int
    start: int
    stop: int
    power: float
    """The rows are multiplied by g to this power."""
    dimension: int = 0
    """Dimension of the rows: 1 for weights whose columns are the outputs, as in GPT-2."""

    def __post_init__(self) -> None:
        shape = tuple(self.parameter.shape)
        if not 0 <= self.dimension < len(shape):
            raise ValueError(f"dimension must be one of a tensor of shape {shape}, got {self}")
        if not 0 <= self.start < self.stop <= shape[self.dimension]:
            raise ValueError(
                f"rows must lie within the {shape[self.dimension]} of dimension {self.dimension}, "
                f"got {self.start} to {self.stop}"
            )
        if self.head < 0 or not 0 <= self.power < math.inf:
            raise ValueError(f"head and power must not be negative, got {self.head}, {self.power}")


@dataclass(frozen=True, slots=True)
class Scale:
    """A factor for some indices of a dimension of a parameter."""

    dimension: int
    start: int
    stop: int
    factor: float


class QKClip:
    """Rows to scale where the attention logits of a head exceed a threshold.

    Pass it to ``muon.Muon(qk_clip=)``, and the largest logits to ``step(qk_logits=)``. Queries and
    keys with norms (QK-norm) have bounded logits and do not need QK-clip.

    Args:
        layers: name of each attention layer -> the rows of its heads.
        threshold: the largest logit that is not scaled; 100 in Kimi K2.

    Raises:
        ValueError: ``layers`` is empty, or the threshold is not a positive number.
    """

    def __init__(
        self, layers: Mapping[str, Sequence[HeadRows]], *, threshold: float = 100.0
    ) -> None:
        if not layers:
            raise ValueError("QK-clip needs the heads of one attention layer or more")
        if not 0 < threshold < math.inf:
            raise ValueError(f"threshold must be a positive number, got {threshold!r}")
        self.layers = dict(layers)
        """Name of an attention layer -> the rows of its heads."""
        self.threshold = threshold

    @classmethod
    def of(cls, model: nn.Module, *, threshold: float = 100.0) -> QKClip:
        """Find the attention layers of a model that is built like the models in ``transformers``.

        Finds modules with ``q_proj``, ``k_proj`` and ``head_dim`` (Llama, Qwen2, Mixtral), with
        ``kv_b_proj`` (latent attention of DeepSeek-V3 and Kimi K2), and with ``c_attn`` (GPT-2).
        Their names are keys of ``qk_logits``. Other modules are skipped. Call it after the model
        was sharded.

        Raises:
            ValueError: no layer was found, or one has QK-norm.
        """
        layers = {}
        for name, module in model.named_modules():
            rows = list(_rows_of(module))
            children = {n for n, c in module.named_children() if not isinstance(c, nn.Identity)}
            norms = sorted(_QK_NORMS & children)
            if rows and norms:
                raise ValueError(
                    f"attention layer {name!r} has the QK-norm {norms[0]!r}, which bounds its "
                    "logits: train it without QK-clip"
                )
            if rows:
                layers[name] = rows
        if not layers:
            raise ValueError(
                "no attention layer was found: give QKClip(layers) the rows of the heads of each"
            )
        return cls(layers, threshold=threshold)

    def scales(
        self,
        logits: Mapping[str, Sequence[float]],
        find: Callable[[torch.Tensor], tierstore.pages.PagedParameter | None],
    ) -> dict[str, list[Scale]]:
        """Return name -> factors, for each parameter with a head above the threshold.

        Args:
            logits: for each layer, the largest logit of each head; -inf for a head without a
                logit.
            find: returns the parameter of a tensor, if a param group has it.

        Raises:
            ValueError: a layer is unknown, has another number of heads, has a logit that is NaN or
                infinitely large, or has rows of a parameter that no param group has.
        """
        found: dict[str, list[Scale]] = {}
        for layer, maxima in logits.items():
            if layer not in self.layers:
                known = ", ".join(map(repr, [*self.layers][:3]))
                raise ValueError(f"qk_logits has the layer {layer!r}, expected one of {known}, ...")
            heads = 1 + max(rows.head for rows in self.layers[layer])
            if len(maxima) != heads:
                raise ValueError(
                    f"qk_logits of layer {layer!r} must be {heads} numbers, one for each head, got "
                    f"{len(maxima)}"
                )
            for head, logit in enumerate(maxima):
                if math.isnan(logit) or logit == math.inf:
                    raise ValueError(
                        f"the largest logit of head {head} of layer {layer!r} is {logit}: its "
                        "attention overflowed, so the step was not done"
                    )
            for rows in self.layers[layer]:
                # Check all rows, so that the first step raises, not the first scaled head.
                parameter = find(rows.parameter)
                if parameter is None:
                    raise ValueError(
                        f"QK-clip scales a parameter of layer {layer!r}, of shape "
                        f"{list(rows.parameter.shape)}, that is in no param group: make QKClip of "
                        "the model of the groups, after it was sharded, and do not pass qk_logits "
                        "for layers with frozen projections"
                    )
                # Negative logits are not scaled: the largest does not measure their size.
                if maxima[rows.head] > self.threshold:
                    factor = (self.threshold / maxima[rows.head]) ** rows.power
                    scale = Scale(rows.dimension, rows.start, rows.stop, factor)
                    found.setdefault(parameter.name, []).append(scale)
        return found


def largest(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the largest logit of each head over the ranks. Ranks may have different layers.

    Raises:
        ValueError: ranks have different numbers of heads for one layer.
    """
    found: dict[str, list[float]] = {}
    for logits in of_ranks:
        for layer, maxima in logits.items():
            known = found.setdefault(layer, list(maxima))
            if len(known) != len(maxima):
                raise ValueError(
                    f"qk_logits of layer {layer!r} has {len(known)} heads on one rank and "
                    f"{len(maxima)} on another"
                )
            # max() ignores a NaN in second place.
            pairs = zip(known, maxima, strict=True)
            found[layer] = [b if math.isnan(b) else max(a, b) for a, b in pairs]
    return found


def factors(
    scales: Sequence[Scale], chunk: tierstore.pages.Chunk, like: torch.Tensor
) -> list[torch.Tensor]:
    """Return tensors that broadcast to a chunk of a parameter, one for each scaled dimension.

    Args:
        scales: scales of the parameter. Where scales overlap, for example for layers that share a
            projection, the smallest factor applies.
        chunk: place of the chunk in the parameter.
        like: has the device of the chunk, and the dtype of the parameter.

    Example: rows 4 to 8 times 0.5 are, for a chunk of rows 2 to 6 of 10 columns, the factors
    1, 1, 0.5, 0.5 of shape (4, 1).
    """
    found = []
    for dimension in sorted({scale.dimension for scale in scales}):
        offset, size = chunk.offsets[dimension], chunk.sizes[dimension]
        values = torch.ones(size, dtype=torch.float64)
        for scale in scales:
            if scale.dimension == dimension:
                rows = slice(max(0, scale.start - offset), max(0, scale.stop - offset))
                values[rows].clamp_(max=scale.factor)
        shape = [size if index == dimension else 1 for index in range(len(chunk.sizes))]
        dtype = torch.promote_types(like.dtype, torch.float32)
        found.append(values.view(shape).to(like.device, dtype))
    return found


def _rows_of(module: Any) -> Iterator[HeadRows]:
    """Yield the rows of the heads of an attention layer; none for any other module."""
    has = {name for name, _ in module.named_children()}
    if "kv_b_proj" in has:
        yield from _latent(module)
    elif {"q_proj", "k_proj"} <= has and hasattr(module, "head_dim"):
        yield from _projections(module, module.head_dim)
    elif "c_attn" in has and "q_attn" not in has and hasattr(module, "num_heads"):
        layer, size = module.c_attn, module.head_dim
        width = module.num_heads * size
        if layer.weight.shape[1] != 3 * width:  # GPT-BigCode has a Linear of this name.
            return
        for head in range(module.num_heads):
            for start in (0, width):  # Queries, then keys.
                yield from _both(layer, start + head * size, size, head, 0.5, dimension=1)


def _projections(module: Any, size: int) -> Iterator[HeadRows]:
    heads, shared = (layer.weight.shape[0] // size for layer in (module.q_proj, module.k_proj))
    has_own = heads == shared
    for head in range(heads):
        yield from _both(module.q_proj, head * size, size, head, 0.5 if has_own else 1.0)
        if has_own:
            yield from _both(module.k_proj, head * size, size, head, 0.5)


def _latent(module: Any) -> Iterator[HeadRows]:
    plain, rotary, value = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    queries = getattr(module, "q_b_proj", None)  # Also None if queries are not compressed.
    queries = module.q_proj if queries is None else queries
    for head in range(queries.weight.shape[0] // (plain + rotary)):
        start = head * (plain + rotary)
        yield from _both(queries, start, plain, head, 0.5)
        yield from _both(queries, start + plain, rotary, head, 1.0)
        yield from _both(module.kv_b_proj, head * (plain + value), plain, head, 0.5)


def _both(
    layer: Any, start: int, size: int, head: int, power: float, dimension: int = 0
) -> Iterator[HeadRows]:
    """Yield the rows of the weight of a projection, and of its bias if it has one."""
    weight = HeadRows(
        parameter=layer.weight,
        head=head,
        start=start,
        stop=start + size,
        power=power,
        dimension=dimension,
    )
    yield weight
    if layer.bias is not None:
        yield replace(weight, parameter=layer.bias, dimension=0)
