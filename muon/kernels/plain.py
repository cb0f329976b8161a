"""Update rules as operations of torch, in place on the tensors of chunks.

All operations are elementwise, so results do not depend on where a parameter is cut. Gradients are
never modified. ``cpu``, ``gpu`` and ``gpu_encoded`` have functions with the same names, arguments
(without ``cautious``) and bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tierstore


def momentum_(
    grad: torch.Tensor,
    buffer: torch.Tensor,
    out: torch.Tensor,
    *,
    momentum: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Update the momentum and write the input of Newton-Schulz; see ``muon.kernels.rules``.

    Args:
        grad: a tensor of any shape. The other tensors have the same shape.
        buffer: the running average; updated in place.
        out: overwritten.
        momentum: weight of the past, in [0, 1].
        nesterov: look one step ahead.
        maximize: the gradient is negated.
    """
    wide = torch.promote_types(torch.promote_types(grad.dtype, torch.float32), buffer.dtype)
    wide_grad = grad.to(wide)
    if maximize:
        wide_grad = -wide_grad
    average = buffer.to(wide)  # The buffer itself if it is wide.
    average.lerp_(wide_grad, 1 - momentum)  # m = momentum m + (1 - momentum) g
    buffer.copy_(average)
    out.copy_(wide_grad.lerp(average, momentum) if nesterov else average)


def muon_(
    master: torch.Tensor,
    parameter: torch.Tensor | None,
    update: torch.Tensor,
    *,
    decay: float,
    alpha: float,
    cautious: bool = False,
) -> torch.Tensor | None:
    """Decay the master, and add the orthogonalized update.

    master = decay * master + alpha * update.

    Args:
        master: float32 or wider, of any shape; updated in place.
        parameter: of the shape of ``master``, or None. Where it differs from the rounded master, it
            was changed, and replaces the master. It is set to the new rounded master.
        update: of the shape of ``master``.
        decay: factor of the master.
        alpha: the negative adjusted learning rate.
        cautious: decay only elements that the update does not move away from zero.

    Returns:
        Bool of shape (): whether an element of the parameter was changed; None if known to be no.
    """
    changed = _adopt(master, parameter)
    if cautious:
        _decay_cautiously_(master, update, decay)
    else:
        master.mul_(decay)
    master.add_(update, alpha=alpha)
    if parameter is not None:
        parameter.copy_(master)
    return changed


def adamw_(
    masters: list[torch.Tensor],
    parameters: Sequence[torch.Tensor | None],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    *,
    sizes: Sequence[float],
    epsilons: Sequence[float],
    decay: float,
    betas: tuple[float, float],
    maximize: bool,
    cautious: bool = False,
) -> list[torch.Tensor | None]:
    """Do one step of AdamW; see ``muon.kernels.rules``.

    Each list has one item for each chunk; the tensors of a chunk have one shape.

    Args:
        masters: float32 or wider; updated in place.
        parameters: as in muon_().
        grads: of any floating-point dtype.
        exp_avgs: of the dtype of the master; updated in place.
        exp_avg_sqs: of the dtype of the master; updated in place.
        sizes: factors of the first moments.
        epsilons: added to the roots of the second moments.
        decay: factor of the masters; 1 without decay.
        betas: weights of the past in the moments.
        maximize: the gradients are negated.
        cautious: decay only elements that the step does not move away from zero.

    Returns:
        As in muon_(), for each chunk.
    """
    changed = [_adopt(*pair) for pair in zip(masters, parameters, strict=True)]
    wide_grads = [g.to(m.dtype) for g, m in zip(grads, exp_avgs, strict=True)]
    if maximize:
        wide_grads = list(torch._foreach_neg(wide_grads))
    # Each line is one operation, because lerp, addcmul and addcdiv may round once or twice. On a
    # GPU, dividing a tensor by a number is a multiplication.
    if decay != 1 and not cautious:
        torch._foreach_mul_(masters, decay)
    torch._foreach_mul_(exp_avgs, betas[0])
    torch._foreach_add_(exp_avgs, torch._foreach_mul(wide_grads, 1 - betas[0]))
    if decay != 1 and cautious:
        for master, mean in zip(masters, exp_avgs, strict=True):
            _decay_cautiously_(master, mean, decay)
    squares = torch._foreach_mul(wide_grads, wide_grads)
    torch._foreach_mul_(squares, 1 - betas[1])
    torch._foreach_mul_(exp_avg_sqs, betas[1])
    torch._foreach_add_(exp_avg_sqs, squares)
    divisors = _roots(exp_avg_sqs)
    torch._foreach_add_(divisors, epsilons)
    steps = torch._foreach_mul(exp_avgs, sizes)
    torch._foreach_div_(steps, divisors)
    torch._foreach_sub_(masters, steps)
    for master, parameter in zip(masters, parameters, strict=True):
        if parameter is not None:
            parameter.copy_(master)
    return changed


def _roots(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the roots. In float32 they are correctly rounded. torch's own float32 root may not be.

    The root of a 24-bit number is farther from the middle of two such numbers than the last bit of
    a float64. An error in this bit therefore has no effect.
    """
    wide = [torch.empty_like(each, dtype=torch.float64) for each in values]
    torch._foreach_copy_(wide, values)
    torch._foreach_sqrt_(wide)
    roots = [torch.empty_like(each) for each in values]
    torch._foreach_copy_(roots, wide)
    return roots


def _adopt(master: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Take over changed elements of the parameter; return whether any changed, None for no."""
    found: list[torch.Tensor] = []
    if parameter is not None:
        tierstore.pages.RoundedMaster(master, parameter, found.append).read()
    return found[0] if found else None


def _decay_cautiously_(values: torch.Tensor, direction: torch.Tensor, decay: float) -> None:
    """Multiply the values by ``decay``, except where their sign is opposite to ``direction``.

    The direction is subtracted from the values (https://arxiv.org/abs/2510.12402, algorithm 1).
    """
    decays = values.sign() * direction.sign() >= 0  # The product of signs is exact.
    values.mul_(torch.ones_like(values).masked_fill_(decays, decay))
