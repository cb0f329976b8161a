"""Native kernels for a CPU: update rules in one pass over memory, and random bits.

They have the bits of muon.update and muon.rounding.

Tensors are contiguous, in memory of the CPU, of float32 or bfloat16; see fit(). Masters and moments
are float32.
"""

from __future__ import annotations

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
    *,
    momentum: float,
    nesterov: bool,
    out: torch.Tensor,
    maximize: bool,
) -> None:
    """Do what ``muon.update.momentum_`` does."""
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
    """Do what ``muon.gpu_kernels.muon_`` does, and return None also if nothing was changed."""
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
    return torch.tensor(True) if changed else None


def adamw_(
    master: torch.Tensor,
    parameter: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    decay: float,
    betas: tuple[float, float],
    root: float,
    eps: float,
    size: float,
    maximize: bool,
) -> torch.Tensor | None:
    """Do what ``muon.gpu_kernels.adamw_`` does, and return None also if nothing was changed."""
    numel = master.numel()
    threads = _threads(numel)
    part = threads * _PART_NUMEL
    roots = torch.empty(min(part, numel), dtype=torch.float32, device="cpu")
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
            roots.data_ptr(),
            count,
            *betas,
            bool(maximize),
            threads,
        )
        roots[:count].sqrt_()
        is_changed |= _cpu_kernels.adamw(
            master_at,
            0 if parameter is None else parameter.data_ptr() + begin * parameter.itemsize,
            mean_at,
            mean_sq_at,
            roots.data_ptr(),
            count,
            decay,
            root,
            eps,
            size,
            threads,
        )
    return torch.tensor(True) if is_changed else None


def random_bits(rows: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """Return 16 random bits for each element, as ``muon.rounding.Chances`` does: int32.

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
