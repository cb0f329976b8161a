"""Update rules as kernels of Triton: one pass over memory each, with the bits of ``plain``.

A rule made of torch operations passes over its tensors once per operation: ten times for the
weights of Muon. Where torch's kernels round a product and a sum once, the code here has ``tl.fma``.
Nothing else may be fused: ``a * b + c`` is used only in launches that forbid fusion. Divisions and
roots that the compiler may approximate are not used.

Tensors are contiguous, on one GPU, of float32, bfloat16 or float16; see fit().
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

_BLOCK = 2048  # Elements of one program.
_HAS_PTX = tl.constexpr(torch.version.hip is None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fit(*states: Any) -> bool:
    """Return whether the kernels take these states."""
    return all(
        isinstance(state, torch.Tensor)
        and state.is_contiguous()
        and state.dtype in DTYPES
        and state.numel() > 0
        for state in states
    )


def momentum_(
    grad: torch.Tensor,
    buffer: torch.Tensor,
    out: torch.Tensor,
    *,
    momentum: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Do what ``muon.kernels.plain.momentum_`` does."""
    with torch.cuda.device_of(grad):
        _momentum[_grid(grad)](
            grad,
            buffer,
            out,
            grad.numel(),
            1 - momentum,
            momentum,
            nesterov=nesterov,
            maximize=maximize,
            grad_weight_small=is_small(1 - momentum),
            average_weight_small=is_small(momentum),
            block=_BLOCK,
        )


def muon_(
    master: torch.Tensor,
    parameter: torch.Tensor | None,
    update: torch.Tensor,
    *,
    decay: float,
    alpha: float,
) -> torch.Tensor | None:
    """Do what ``muon.kernels.plain.muon_`` does."""
    changed = None
    if parameter is not None:
        changed = torch.zeros((), dtype=torch.uint8, device=master.device)
    with torch.cuda.device_of(master):
        _muon[_grid(master)](
            master,
            master if parameter is None else parameter,
            update,
            master if changed is None else changed,
            master.numel(),
            decay,
            alpha,
            is_rounded=parameter is not None,
            block=_BLOCK,
        )
    torch.autograd.graph.increment_version(master if parameter is None else parameter)
    return None if changed is None else changed.view(torch.bool)


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
) -> list[torch.Tensor | None]:
    """Do what ``muon.kernels.plain.adamw_`` does."""
    chunks = zip(masters, parameters, grads, exp_avgs, exp_avg_sqs, sizes, epsilons, strict=True)
    options: dict[str, Any] = {"decay": decay, "betas": betas, "maximize": maximize}
    return [_step_adamw(*chunk, **options) for chunk in chunks]


def _step_adamw(
    master: torch.Tensor,
    parameter: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    size: float,
    epsilon: float,
    *,
    decay: float,
    betas: tuple[float, float],
    maximize: bool,
) -> torch.Tensor | None:
    changed = None
    if parameter is not None:
        changed = torch.zeros((), dtype=torch.uint8, device=master.device)
    with torch.cuda.device_of(master):
        _adamw[_grid(master)](
            master,
            master if parameter is None else parameter,
            grad,
            exp_avg,
            exp_avg_sq,
            master if changed is None else changed,
            master.numel(),
            decay,
            betas[0],
            1 - betas[0],
            betas[1],
            1 - betas[1],
            size,
            epsilon,
            is_rounded=parameter is not None,
            enable_fp_fusion=False,
            maximize=maximize,
            block=_BLOCK,
        )
    torch.autograd.graph.increment_version(master if parameter is None else parameter)
    return None if changed is None else changed.view(torch.bool)


def is_small(weight: float) -> bool:
    """Return whether torch's ``lerp`` computes from the start instead of from the end."""
    return bool(abs(np.float32(weight)) < 0.5)


def _grid(tensor: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), _BLOCK),)


@triton.jit
def divided(a, b):
    """Return a / b, rounded once. Triton 3.5 compiles ``tl.div_rn`` to flush subnormal numbers."""
    if _HAS_PTX:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(a, b)


@triton.jit
def square_root(x):
    """Return the root, rounded once; see divided()."""
    if _HAS_PTX:
        return tl.inline_asm_elementwise(
            "sqrt.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt_rn(x)


@triton.jit
def lerp(start, end, weight, small: tl.constexpr):
    """Return the same result as torch's ``lerp``."""
    if small:  # As torch does: exact at both ends.
        return tl.fma(weight, end - start, start)
    return tl.fma(start - end, 1.0 - weight, end)


@triton.jit
def places_of(numel, block: tl.constexpr):
    """Return the places of the elements of a program, and a mask of places in the tensor."""
    places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    return places, places < numel


@triton.jit
def adopted(master, parameter_at, changed_at, places, inside):
    """Return the master with changed elements of the parameter taken over."""
    value = tl.load(parameter_at + places, mask=inside, other=0.0)
    rounded = master.to(value.dtype).to(tl.float32)
    value = value.to(tl.float32)
    both_nan = (value != value) & (rounded != rounded)
    differs = (value != rounded) & ~both_nan & inside
    if tl.max(differs.to(tl.int32), axis=None) > 0:
        tl.store(changed_at, 1)
    return tl.where(differs, value, master)


@triton.jit
def averaged(
    grad,
    average,
    grad_weight,
    average_weight,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    grad_weight_small: tl.constexpr,
    average_weight_small: tl.constexpr,
):
    """Return the new average of gradients, and the input of Newton-Schulz."""
    if maximize:
        grad = grad * -1.0  # Also the sign of a zero.
    average = lerp(average, grad, grad_weight, grad_weight_small)
    out = average
    if nesterov:
        out = lerp(grad, average, average_weight, average_weight_small)
    return average, out


@triton.jit
def _momentum(
    grad_at,
    buffer_at,
    out_at,
    numel,
    grad_weight,
    average_weight,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
    grad_weight_small: tl.constexpr,
    average_weight_small: tl.constexpr,
    block: tl.constexpr,
):
    places, inside = places_of(numel, block)
    grad = tl.load(grad_at + places, mask=inside).to(tl.float32)
    average = tl.load(buffer_at + places, mask=inside).to(tl.float32)
    average, out = averaged(
        grad,
        average,
        grad_weight,
        average_weight,
        nesterov,
        maximize,
        grad_weight_small,
        average_weight_small,
    )
    tl.store(buffer_at + places, average.to(buffer_at.dtype.element_ty), mask=inside)
    tl.store(out_at + places, out.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _muon(
    master_at,
    parameter_at,
    update_at,
    changed_at,
    numel,
    decay,
    alpha,
    is_rounded: tl.constexpr,
    block: tl.constexpr,
):
    places, inside = places_of(numel, block)
    master = tl.load(master_at + places, mask=inside, other=0.0)
    update = tl.load(update_at + places, mask=inside).to(tl.float32)
    if is_rounded:
        master = adopted(master, parameter_at, changed_at, places, inside)
    master = tl.fma(alpha, update, master * decay)
    tl.store(master_at + places, master, mask=inside)
    if is_rounded:
        tl.store(parameter_at + places, master.to(parameter_at.dtype.element_ty), mask=inside)


@triton.jit
def adamw_stepped(
    master,
    grad,
    mean,
    mean_sq,
    decay,
    beta1,
    grad_weight,
    beta2,
    square_weight,
    size,
    epsilon,
    maximize: tl.constexpr,
):
    """Return the master and the moments after a step. A launch needs enable_fp_fusion=False."""
    if maximize:
        grad = grad * -1.0  # Also the sign of a zero.
    mean = beta1 * mean + grad_weight * grad
    mean_sq = beta2 * mean_sq + square_weight * (grad * grad)
    step = divided(size * mean, square_root(mean_sq) + epsilon)
    return master * decay - step, mean, mean_sq


@triton.jit
def _adamw(
    master_at,
    parameter_at,
    grad_at,
    mean_at,
    mean_sq_at,
    changed_at,
    numel,
    decay,
    beta1,
    grad_weight,
    beta2,
    square_weight,
    size,
    epsilon,
    is_rounded: tl.constexpr,
    maximize: tl.constexpr,
    block: tl.constexpr,
):
    places, inside = places_of(numel, block)
    master = tl.load(master_at + places, mask=inside, other=0.0)
    grad = tl.load(grad_at + places, mask=inside).to(tl.float32)
    mean = tl.load(mean_at + places, mask=inside)
    mean_sq = tl.load(mean_sq_at + places, mask=inside)
    if is_rounded:
        master = adopted(master, parameter_at, changed_at, places, inside)
    master, mean, mean_sq = adamw_stepped(
        master,
        grad,
        mean,
        mean_sq,
        decay,
        beta1,
        grad_weight,
        beta2,
        square_weight,
        size,
        epsilon,
        maximize,
    )
    tl.store(master_at + places, master, mask=inside)
    tl.store(mean_at + places, mean, mask=inside)
    tl.store(mean_sq_at + places, mean_sq, mask=inside)
    if is_rounded:
        tl.store(parameter_at + places, master.to(parameter_at.dtype.element_ty), mask=inside)
