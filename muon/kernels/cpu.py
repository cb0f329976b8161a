"""Native kernels for a CPU: update rules in one pass over memory, and random bits.

Results have the same bits as ``muon.kernels.plain`` and ``muon.kernels.rounding``.

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
"""Elements for which one more thread is worthwhile."""


def fit(*states: Any) -> bool:
    """Return whether the kernels take these states.

    False for subclasses, because they may have no memory of their own, and for freed tensors.
    """
    for state in states:  # A generator would be slower, which matters for small tensors.
        if not (
            type(state) in (torch.Tensor, torch.nn.Parameter)
            and state.dtype in _DTYPES
            and state.is_cpu
            and state.is_contiguous()
            and not state.is_neg()
            and state.data_ptr() != 0
        ):
            return False
    return True


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
    sizes: Sequence[float],
    epsilons: Sequence[float],
    decay: float,
    betas: tuple[float, float],
    maximize: bool,
) -> list[torch.Tensor | None]:
    """Do what ``muon.kernels.plain.adamw_`` does."""
    found = []
    chunks = zip(masters, parameters, grads, exp_avgs, exp_avg_sqs, sizes, epsilons, strict=True)
    for master, parameter, grad, exp_avg, exp_avg_sq, size, epsilon in chunks:
        numel = master.numel()
        changed = _cpu_kernels.adamw(
            master.data_ptr(),
            0 if parameter is None else parameter.data_ptr(),
            *_typed(grad),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            numel,
            decay,
            *betas,
            size,
            epsilon,
            maximize,
            _threads(numel),
        )
        torch.autograd.graph.increment_version(master if parameter is None else parameter)
        found.append(torch.tensor(True) if changed else None)
    return found


def random_bits(rows: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """Return 16 random bits for each element, as ``muon.kernels.rounding.Chances`` does: int32.

    Args:
        rows: int32, contiguous: a number for each row.
        first: the first column.
        columns: number of columns.
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
    if numel < _PART_NUMEL:
        return 1
    return min(torch.get_num_threads(), 1 + numel // _PART_NUMEL)
