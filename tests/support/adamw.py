"""AdamW as docs/reference/torch-optim.md defines it: a reference that knows nothing of ``muon``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def power(base: float, exponent: int) -> float:
    """Return the product of base^1, base^2, base^4 and so on that make the power, in this order."""
    squares = [base]
    while len(squares) < exponent.bit_length():
        squares.append(squares[-1] * squares[-1])
    return math.prod((s for bit, s in enumerate(squares) if exponent >> bit & 1), start=1.0)


def corrected(
    step: int, *, lr: float, betas: tuple[float, float], eps: float
) -> tuple[float, float]:
    """Return size and epsilon of a step."""
    beta1, beta2 = betas
    root = math.sqrt(1 - power(beta2, step))
    return lr / (1 - power(beta1, step)) * root, eps * root


def stepped(
    w: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    size: float,
    epsilon: float,
    decay: float,
    betas: tuple[float, float],
    maximize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights and both moments after a step.

    Args:
        w: float32 or float64, of any shape; so are all.
        g: of any floating-point dtype.
        m: of the dtype of ``w``.
        v: of the dtype of ``w``.
        size: what m is multiplied by.
        epsilon: added to the root of v.
        decay: what w is multiplied by.
        betas: weights of the past in m and v.
        maximize: g is negated.
    """
    (beta1, beta2), g = betas, -g.to(w.dtype) if maximize else g.to(w.dtype)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    return decay * w - size * m / (v.double().sqrt().to(w.dtype) + epsilon), m, v


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with another step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient; return what the closure does."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            columns: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *columns)
            parameters, grads, means, mean_sqs, _, steps = columns
            for step, grad, *own in zip(steps, grads, parameters, means, mean_sqs, strict=True):
                step += 1
                self._step(int(step), grad, own, group)
        return loss

    def _step(
        self, step: int, grad: torch.Tensor, own: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        """Step a parameter and its moments."""
        lr, betas = float(group["lr"]), group["betas"]
        size, epsilon = corrected(step, lr=lr, betas=betas, eps=group["eps"])
        w, m, v = own
        found = stepped(
            *(w, grad, m, v),
            size=size,
            epsilon=epsilon,
            decay=1 - lr * group["weight_decay"],
            betas=betas,
            maximize=group["maximize"],
        )
        for tensor, new in zip(own, found, strict=True):
            tensor.copy_(new)
