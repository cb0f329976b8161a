"""Native kernels for a CPU: update rules in one pass over memory, and random bits.

They have the bits of ``muon.kernels.plain`` and ``muon.kernels.rounding``.

Tensors are contiguous, in memory of the CPU, of float32 or bfloat16; see fit(). Masters and moments
are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from muon import _cpu_kernels

_DTYPES = (torch.float32, torch.bfloat16)
_PART_NUMEL = 1 << 16
"""Elements of a thread: few enough that the moments stay in its cache between two kernels."""


def fit(*states: Any) -> bool:
    """Return whether the kernels take these states; None stands for one that is not there.

    Not subclasses, which may have no memory of their own, nor freed tensors.
    """
    return all(
        state is None
        or (
            type(state) in (torch.Tensor, torch.nn.Parameter)
            and state.dtype in _DTYPES
            and state.is_cpu
            and state.is_contiguous()
            and not state.is_neg()
            and state.data_ptr() != 0
        )
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
    _cpu_kernels.momentum(
        *_typed(grad),
        *_typed(buffer),
        *_typed(out),
        grad.numel(),
        momentum,
        bool(nesterov),
        bool(maximize),
        _threads(grad.numel()),
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
    numel = master.numel()
    changed = _cpu_kernels.muon(
        master.data_ptr(),
        0 if parameter is None else parameter.data_ptr(),
        *_typed(update),
        numel,
        decay,
        alpha,
        _threads(numel),
    )
    torch.autograd.graph.increment_version(master if parameter is None else parameter)
    return torch.tensor(True) if changed else None


def adamw_(
    masters: list[torch.Tensor],
    parameters: Sequence[torch.Tensor | None],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    *,
    roots: Sequence[float],
    sizes: Sequence[float],
    decay: float,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> list[torch.Tensor | None]:
    """Do what ``muon.kernels.plain.adamw_`` does."""
    chunks = zip(masters, parameters, grads, exp_avgs, exp_avg_sqs, roots, sizes, strict=True)
    options: dict[str, Any] = {"decay": decay, "betas": betas, "eps": eps, "maximize": maximize}
    return [_adamw(*chunk, **options) for chunk in chunks]


def _adamw(
    master: torch.Tensor,
    parameter: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    root: float,
    size: float,
    *,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    maximize: bool,
) -> torch.Tensor | None:
    numel = master.numel()
    threads = _threads(numel)
    part = threads * _PART_NUMEL
    values = torch.empty(min(part, numel), dtype=torch.float32, device="cpu")
    is_changed = False
    for begin in range(0, numel, part):
        count = min(part, numel - begin)
        grad_at, mean_at, mean_sq_at, master_at = (
            tensor.data_ptr() + begin * tensor.itemsize
            for tensor in (grad, exp_avg, exp_avg_sq, master)
        )
        _cpu_kernels.moments(
            grad_at,
            grad.dtype == torch.bfloat16,
            mean_at,
            mean_sq_at,
            values.data_ptr(),
            count,
            *betas,
            bool(maximize),
            threads,
        )
        values[:count].sqrt_()
        is_changed |= _cpu_kernels.adamw(
            master_at,
            0 if parameter is None else parameter.data_ptr() + begin * parameter.itemsize,
            mean_at,
            mean_sq_at,
            values.data_ptr(),
            count,
            decay,
            root,
            eps,
            size,
            threads,
        )
    torch.autograd.graph.increment_version(master if parameter is None else parameter)
    return torch.tensor(True) if is_changed else None


def random_bits(rows: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """Return 16 random bits for each element, as ``muon.kernels.rounding.Chances`` does: int32.

    Args:
        rows: int32, contiguous: a number for each row.
        first: the first column.
        columns: how many.
    """
    bits = torch.empty((*rows.shape, columns), dtype=torch.int32, device="cpu")
    _cpu_kernels.random_bits(
        rows.data_ptr(), bits.data_ptr(), rows.numel(), first, columns, _threads(bits.numel())
    )
    return bits


def _typed(tensor: torch.Tensor) -> tuple[int, bool]:
    """Return the address, and whether the elements are bfloat16."""
    return tensor.data_ptr(), tensor.dtype == torch.bfloat16


def _threads(numel: int) -> int:
    return min(torch.get_num_threads(), 1 + numel // _PART_NUMEL)
