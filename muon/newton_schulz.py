"""Newton-Schulz: the nearest matrix whose singular values are all about one."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import torch

# Chosen by Keller Jordan to have the steepest slope at zero: after five steps every
# singular value lies in about [0.7, 1.2]. https://kellerjordan.github.io/posts/muon/
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
_STRIP_ROWS = 256
_MEASURED_ROUNDS = 8


def orthogonalize_(
    matrix: torch.Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
) -> torch.Tensor:
    """Replace the singular values of a matrix by values near one, keeping its directions.

    Each step maps X to a X + (b A + c A^2) X with A = X X^T, which applies the odd
    polynomial a s + b s^3 + c s^5 to every singular value s.

    Args:
        matrix: shape (rows, columns), contiguous, of the dtype to compute in. Its content
            is used up.
        coefficients: (a, b, c).
        steps: number of iterations.
        eps: the norm by which a smaller matrix is divided, so that zero stays zero.

    Returns:
        The update, of the same shape and dtype, bit for bit what ``torch.optim.Muon``
        computes from the same contiguous matrix: a tall one is worked on as a transposed view.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if is_tall else matrix
    # The Frobenius norm bounds the largest singular value, which must not exceed one.
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(steps):
        gram = _symmetric_addmm(None, wide, wide.T, beta=0, alpha=1)
        polynomial = _symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.T if is_tall else wide


def _symmetric_addmm(
    addend: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float,
    alpha: float,
) -> torch.Tensor:
    """Return ``beta * addend + alpha * left @ right``, known to be symmetric.

    In bfloat16 on a CPU each element is summed in the same order whatever the other rows and
    columns are. So there the lower half is computed, strip by strip, and mirrored: the same
    bits in about 0.7 of the time. In float32 other bits would come out.
    """
    size = left.size(0)
    count = size // _STRIP_ROWS
    if count < 2 or not left.is_cpu or left.dtype != torch.bfloat16:
        if addend is None:
            return left @ right
        return torch.addmm(addend, left, right, beta=beta, alpha=alpha)
    product = left.new_empty(size, size)
    addend = product if addend is None else addend
    # Equal strips: a single row at the end would be summed in another order.
    bounds = [size * index // count for index in range(count + 1)]
    for start, end in pairwise(bounds):
        torch.addmm(
            addend[start:end, :end],
            left[start:end],
            right[:, :end],
            beta=beta,
            alpha=alpha,
            out=product[start:end, :end],
        )
    for start, end in pairwise(bounds):
        product[start:end, end:] = product[end:, start:end].T
    return product


def fastest_dtype(shape: tuple[int, ...], device: torch.device) -> torch.dtype:
    """Return the dtype that orthogonalizes such a matrix faster on a device.

    That is float32 only where bfloat16 takes more than 1.5 times as long: below that the choice
    would be noise, and bfloat16 is half the bytes.

    On some CPUs bfloat16 is hundreds of times slower than on others, so that only a
    measurement tells. It is made on a matrix of at most 256 rows and columns, by one thread:
    several wait for each other for as long as other work has their cores. Both take turns, and
    the shortest time of each counts.

    Args:
        shape: (rows, columns).
        device: where to compute.
    """
    matrix = torch.ones(*(min(size, 256) for size in shape), device=device)
    seconds = {torch.bfloat16: math.inf, torch.float32: math.inf}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_MEASURED_ROUNDS):
            for dtype in seconds:
                seconds[dtype] = min(seconds[dtype], _seconds(matrix.to(dtype, copy=True)))
    finally:
        torch.set_num_threads(threads)
    is_slow = seconds[torch.bfloat16] > 1.5 * seconds[torch.float32]
    return torch.float32 if is_slow else torch.bfloat16


def _seconds(matrix: torch.Tensor) -> float:
    """Return how long one matrix takes, which is used up."""
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    began = time.perf_counter()
    orthogonalize_(matrix)
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - began
