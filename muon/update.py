"""Update rules of Muon and AdamW, in place on the tensors of chunks.

All operations are elementwise, so results do not depend on where a parameter is cut, and
gradients are never modified. A learning rate that is a tensor of one element is used in its own
precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from muon.encoded import AnyState, opened

_PIECE_ELEMENTS = 1 << 18
ADJUST_LR_FNS = (None, "original", "match_rms_adamw", "spectral", "unit")


def momentum_(
    grad: torch.Tensor,
    momentum_buffer: AnyState,
    *,
    momentum: float,
    nesterov: bool,
    out: torch.Tensor,
    maximize: bool = False,
) -> None:
    """Update the momentum and write the input of Newton-Schulz to ``out``.

    As in ``torch.optim.Muon``: the average m is ``momentum * m + (1 - momentum) * grad``, and the
    input is m, or with ``nesterov`` ``(1 - momentum) * grad + momentum * m``. Both are computed
    in float32 or wider; a buffer of lower precision stores m rounded.

    Args:
        grad: shape (rows, columns) of the chunk, any floating-point dtype.
        momentum_buffer: the shape of ``grad``; updated in place.
        momentum: weight of the past, in [0, 1].
        nesterov: look one step ahead.
        out: the shape of ``grad``, in the dtype of Newton-Schulz; overwritten.
        maximize: follow the gradient upwards: ``grad`` is negated.
    """
    wide_grad_dtype = torch.promote_types(grad.dtype, torch.float32)
    for grad_piece, state, out_piece in pieces(grad, momentum_buffer, out):
        with opened([state]) as [buffer]:
            wide = torch.promote_types(wide_grad_dtype, buffer.dtype)
            wide_grad = grad_piece.to(wide)  # (rows, columns)
            if maximize:
                wide_grad = -wide_grad
            average = buffer.to(wide)  # (rows, columns); the buffer itself if it is wide
            average.lerp_(wide_grad, 1 - momentum)  # m = momentum m + (1 - momentum) g
            buffer.copy_(average)
            out_piece.copy_(wide_grad.lerp(average, momentum) if nesterov else average)


def muon_(
    master: AnyState,
    update: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    adjusted_lr: float | torch.Tensor,
    weight_decay: float,
    cautious: bool = False,
) -> None:
    """Decay the master, then subtract the orthogonalized update, as ``torch.optim.Muon`` does.

    master = (1 - lr * weight_decay) * master - adjusted_lr * update.

    Args:
        master: shape (rows, columns) of the chunk; updated in place.
        update: the shape of ``master``, in the dtype of Newton-Schulz.
        lr: learning rate before adjust_lr(), which scales the weight decay.
        adjusted_lr: learning rate after adjust_lr(), which scales the update.
        weight_decay: decoupled, as in AdamW.
        cautious: decay only elements that the update does not move away from zero.
    """
    decay, alpha = float(1 - lr * weight_decay), -float(adjusted_lr)
    for update_piece, state in pieces(update, master):
        with opened([state]) as [values]:
            if cautious:
                _decay_cautiously_(values, update_piece, decay)
            else:
                values.mul_(decay)
            values.add_(update_piece, alpha=alpha)


def _decay_cautiously_(
    values: torch.Tensor, direction: torch.Tensor, decay: float | torch.Tensor
) -> None:
    """Multiply the values by ``decay`` where they do not have the other sign than ``direction``.

    The direction is subtracted from the values (https://arxiv.org/abs/2510.12402, algorithm 1).
    """
    decays = values.sign() * direction.sign() >= 0  # The product of signs is exact.
    values.mul_(torch.ones_like(values).masked_fill_(decays, decay))


def adjust_lr(
    lr: float | torch.Tensor, adjust_lr_fn: str | None, rows: int, columns: int
) -> float | torch.Tensor:
    """Return the learning rate for matrices of one shape.

    None and "original" scale by sqrt(max(1, rows / columns)), as Keller Jordan does.
    "match_rms_adamw" scales by 0.2 sqrt(max(rows, columns)): the update then has about the RMS
    of an AdamW update, and learning rates of AdamW carry over
    (https://arxiv.org/abs/2502.16982). "spectral" scales by sqrt(rows / columns): an input whose
    elements have RMS 1 changes the output by an RMS of ``lr`` at most, whatever the shape
    (https://arxiv.org/abs/2310.17813). Megatron calls that "unit_rms_norm"; what Megatron calls
    "spectral" is five times "match_rms_adamw". "unit" does not scale.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjust_lr_fn == "spectral":
        return lr * math.sqrt(rows / columns)
    if adjust_lr_fn == "unit":
        return lr
    return lr * math.sqrt(max(1, rows / columns))


def adamw_(
    masters: Sequence[AnyState],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[AnyState],
    exp_avg_sqs: Sequence[AnyState],
    *,
    steps: Sequence[float],
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    cautious: bool = False,
) -> None:
    """Do one step of AdamW (https://arxiv.org/abs/1711.05101), as ``torch.optim.AdamW`` does.

    Each sequence has one item for each chunk; the tensors of a chunk have one shape.

    Args:
        masters: of any shape; updated in place.
        grads: of any floating-point dtype.
        exp_avgs: running means m of gradients, of the dtype of the master; updated in place.
        exp_avg_sqs: running means v of squared gradients, of the dtype of the master; updated in
            place.
        steps: number of this step for the parameter, from 1.
        lr: learning rate.
        betas: weights of the past in m and v.
        eps: added to the root of v.
        weight_decay: decoupled: the masters shrink by ``lr * weight_decay``.
        maximize: follow the gradients upwards: they are negated.
        cautious: decay only elements that the step does not move away from zero.
    """
    beta1, beta2 = betas
    decay = 1 - lr * weight_decay
    if isinstance(decay, torch.Tensor):
        # Not a float: as in torch.optim, float64 decays a chunk without dimensions in float64.
        decay = decay.reshape(()).cpu()
    sizes = {step: float(lr / (1 - beta1**step)) for step in set(steps)}
    roots = {step: (1 - beta2**step) ** 0.5 for step in sizes}
    for indices, narrow_grads, *states in _batches(grads, masters, exp_avgs, exp_avg_sqs):
        with (
            opened(states[0]) as values,  # Lists of the same length.
            opened(states[1]) as means,
            opened(states[2]) as mean_sqs,
        ):
            wide_grads = [g.to(m.dtype) for g, m in zip(narrow_grads, means, strict=True)]
            if maximize:
                wide_grads = list(torch._foreach_neg(wide_grads))
            if weight_decay != 0 and not cautious:
                torch._foreach_mul_(values, decay)
            torch._foreach_lerp_(means, wide_grads, 1 - beta1)  # m = beta1 m + (1 - beta1) g
            if weight_decay != 0 and cautious:
                for value, mean in zip(values, means, strict=True):
                    _decay_cautiously_(value, mean, decay)
            torch._foreach_mul_(mean_sqs, beta2)
            torch._foreach_addcmul_(mean_sqs, wide_grads, wide_grads, 1 - beta2)  # v, with g^2
            denominators = torch._foreach_sqrt(mean_sqs)
            torch._foreach_div_(denominators, [roots[steps[index]] for index in indices])
            torch._foreach_add_(denominators, eps)
            # lr m / (1 - beta1^step) / denominator
            step_sizes = [-sizes[steps[index]] for index in indices]
            torch._foreach_addcdiv_(values, means, denominators, step_sizes)


def _batches(
    grads: Sequence[torch.Tensor], *columns: Sequence[AnyState]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of several sequences of tensors in batches, each as a list per sequence.

    Small tensors are joined and large ones cut as by pieces(), so that the temporaries of a batch
    stay in the cache. The tensors of one row have one shape.

    Yields:
        The index in the sequences of each item of the lists, and the lists.
    """
    indices: list[int] = []
    rows: list[tuple[Any, ...]] = []
    numel = 0
    for index, row in enumerate(zip(grads, *columns, strict=True)):
        for piece in pieces(*row):
            if rows and numel + piece[0].numel() > _PIECE_ELEMENTS:
                yield indices, *map(list, zip(*rows, strict=True))
                indices, rows, numel = [], [], 0
            indices.append(index)
            rows.append(piece)
            numel += piece[0].numel()
    if rows:
        yield indices, *map(list, zip(*rows, strict=True))


def pieces(first: torch.Tensor, *others: AnyState) -> Iterator[tuple[Any, ...]]:
    """Yield the same part of all tensors, of one shape, small enough for temporaries in the cache.

    On a CPU, larger temporaries would be allocated from the system and returned each time, which
    takes several times as long as the computation. Rows of a matrix are not cut. Tensors on a GPU
    are yielded whole.
    """
    if first.is_cpu:
        yield from _pieces((first, *others), 0)
    else:
        yield first, *others


def _pieces(tensors: tuple[Any, ...], dimension: int) -> Iterator[tuple[Any, ...]]:
    """Cut along a dimension, and along the next ones where that does not suffice."""
    first = tensors[0]
    if first.numel() <= _PIECE_ELEMENTS or dimension == max(1, first.ndim - 1):
        yield tensors
        return
    size = first.shape[dimension]
    rows = max(1, _PIECE_ELEMENTS * size // first.numel())
    for start in range(0, size, rows):
        part = (*(slice(None),) * dimension, slice(start, start + rows))
        yield from _pieces(tuple(tensor[part] for tensor in tensors), dimension + 1)
