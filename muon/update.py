"""The two update rules, over plain tensors that are any chunk of a parameter.

Everything here is elementwise, so that a result does not depend on where a parameter was
cut. Gradients are never modified. Tensors of one call have one shape. A learning rate that
is a tensor of one element is computed with in its own precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

_PIECE_ELEMENTS = 1 << 18
ADJUST_LR_FNS = (None, "original", "match_rms_adamw")


def momentum_(
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor,
    *,
    momentum: float,
    nesterov: bool,
    out: torch.Tensor,
) -> None:
    """Update the momentum and write what Newton-Schulz is to orthogonalize into ``out``.

    The running average is ``momentum * buffer + (1 - momentum) * grad``, in float32 or
    wider; a buffer of lower precision stores it rounded.

    Args:
        grad: any floating-point dtype.
        momentum_buffer: updated in place.
        momentum: weight of the past, in [0, 1].
        nesterov: look one step ahead, as ``torch.optim.Muon`` does.
        out: overwritten, in the dtype of Newton-Schulz.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    wide = torch.promote_types(wide, momentum_buffer.dtype)
    for grad_piece, buffer, out_piece in _pieces(grad, momentum_buffer, out):
        wide_grad = grad_piece.to(wide)  # (rows, columns)
        average = buffer.to(wide)  # (rows, columns); the buffer itself where it is wide already
        average.lerp_(wide_grad, 1 - momentum)  # momentum * average + (1 - momentum) * grad
        buffer.copy_(average)
        out_piece.copy_(wide_grad.lerp(average, momentum) if nesterov else average)


def muon_(
    master: torch.Tensor,
    update: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    adjusted_lr: float | torch.Tensor,
    weight_decay: float,
) -> None:
    """Decay the master, then subtract the orthogonalized update.

    Args:
        master: updated in place.
        update: in the dtype of Newton-Schulz.
        lr: learning rate before adjust_lr(): it alone scales the weight decay.
        adjusted_lr: learning rate of the update.
        weight_decay: decoupled, as in AdamW.
    """
    decay, alpha = float(1 - lr * weight_decay), -float(adjusted_lr)
    for master_piece, update_piece in _pieces(master, update):
        master_piece.mul_(decay).add_(update_piece, alpha=alpha)


def adjust_lr(
    lr: float | torch.Tensor, adjust_lr_fn: str | None, rows: int, columns: int
) -> float | torch.Tensor:
    """Return the learning rate of a matrix of this shape.

    None and "original" scale by sqrt(max(1, rows / columns)) (Keller Jordan);
    "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), so that the update has about the RMS
    of AdamW's and its learning rate carries over (https://arxiv.org/abs/2502.16982).
    """
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: float,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW (https://arxiv.org/abs/1711.05101).

    Args:
        master: updated in place.
        grad: any floating-point dtype.
        exp_avg: running mean of gradients, updated in place, of the master's dtype.
        exp_avg_sq: running mean of squared gradients, likewise.
        step: number of this step for the parameter, from 1.
        lr: learning rate.
        betas: weight of the past in the two running means.
        eps: added to the root of the second mean.
        weight_decay: decoupled: the master shrinks by ``lr * weight_decay``.
    """
    beta1, beta2 = betas
    decay, size = float(1 - lr * weight_decay), float(lr / (1 - beta1**step))
    for values, grad_piece, mean, mean_sq in _pieces(master, grad, exp_avg, exp_avg_sq):
        wide_grad = grad_piece.to(mean.dtype)  # (rows, ...)
        if weight_decay != 0:
            values.mul_(decay)
        mean.lerp_(wide_grad, 1 - beta1)  # m = beta1 m + (1 - beta1) g
        mean_sq.mul_(beta2).addcmul_(wide_grad, wide_grad, value=1 - beta2)  # v, with g^2
        denominator = (mean_sq.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)  # (rows, ...)
        values.addcdiv_(mean, denominator, value=-size)  # lr m / (1 - beta1^step) / denominator


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the same rows of tensors of one shape, so many that temporaries stay in the cache.

    Memory for larger ones is taken from the system and given back each time, which on a CPU
    takes several times as long as what is computed. Tensors on a GPU come whole.
    """
    first = tensors[0]
    if not first.is_cpu or first.numel() <= _PIECE_ELEMENTS:
        yield tensors
        return
    rows = max(1, _PIECE_ELEMENTS * len(first) // first.numel())
    for start in range(0, len(first), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)  # (rows, ...) of each
