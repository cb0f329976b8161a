"""Activations of one forward and backward, estimated from the shapes of the parameters.

A matrix has inputs and outputs for each token. The elements that a layer keeps for backward, and
the elements that backward adds, are multiples of their number. The factors were counted for models
like Llama whose attention keeps no scores; see docs/internals/benchmarks.md "Activations".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tierstore.tools.plan.models import Model, ModelParameter, layer_of

_KEPT = 1.33
"""Elements that a layer keeps for backward, for each input and output of its matrices."""
_IN_BACKWARD = 1.83
"""Elements that exist at once while backward goes through one layer, the kept ones included."""
_OF_LOGIT = 3
"""Numbers in float32 or wider for each logit: its value, its logarithm, and its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of one rank."""

    kept: int
    """Of all layers, from forward to backward: with checkpointing, the inputs of layers."""
    in_layer: int
    """In the backward of the largest layer."""
    logits: int
    """In the loss, which is made before backward goes through the last layer."""


def activations_of(
    model: Model, tokens: int, *, checkpointing: bool, loss_tokens: int | None
) -> Activations:
    """Return the activations of a forward and backward.

    Args:
        model: the model.
        tokens: of one forward and backward of one rank.
        checkpointing: whether each layer is computed again in backward.
        loss_tokens: most tokens whose logits exist at once; None: all.
    """
    itemsize = max(parameter.dtype.itemsize for parameter in model.parameters)
    sides: Counter[str] = Counter()
    outside = [p.shape for p in model.parameters if layer_of(p.name) is None and len(p.shape) == 2]
    for parameter in model.parameters:
        layer = layer_of(parameter.name)
        if layer is not None:
            sides[layer] += _sides(parameter)
    width = min((min(shape) for shape in outside), default=0)
    vocabulary = max((max(shape) for shape in outside), default=0)
    if not sides:  # Names have no numbers of layers: all is one layer.
        vocabulary, sides[""] = 0, sum(map(_sides, model.parameters))
    largest = max(sides.values(), default=0)
    if checkpointing:
        kept, in_layer = float(len(sides) * width), _IN_BACKWARD * largest
    else:
        kept, in_layer = _KEPT * sum(sides.values()), (_IN_BACKWARD - _KEPT) * largest
    narrow = itemsize if itemsize < 4 else 0  # The value before it is widened.
    in_loss = tokens if loss_tokens is None else min(tokens, loss_tokens)
    return Activations(
        kept=round(tokens * itemsize * kept),
        in_layer=round(tokens * itemsize * in_layer),
        logits=in_loss * vocabulary * (_OF_LOGIT * max(4, itemsize) + narrow),
    )


def _sides(parameter: ModelParameter) -> int:
    """Return the inputs and outputs of a token in a matrix, or in the experts that it visits."""
    shape = parameter.shape
    if len(shape) == 2:
        return sum(shape)
    return round(parameter.share * shape[0] * sum(shape[1:])) if len(shape) == 3 else 0
