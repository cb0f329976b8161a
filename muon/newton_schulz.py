"""Newton-Schulz: the nearest matrix whose singular values are all about one."""

from __future__ import annotations

import math
import time

import torch

# Chosen by Keller Jordan to have the steepest slope at zero: after five steps every
# singular value lies in about [0.7, 1.2]. https://kellerjordan.github.io/posts/muon/
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


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
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.T if is_tall else wide


def fastest_dtype(shape: tuple[int, ...], device: torch.device) -> torch.dtype:
    """Return bfloat16 or float32, whichever orthogonalizes such a matrix faster on a device.

    On some CPUs bfloat16 is hundreds of times slower than on others, so that only a
    measurement tells. It is made on a matrix of at most 256 rows and columns.

    Args:
        shape: (rows, columns).
        device: where to compute.
    """
    matrix = torch.ones(*(min(size, 256) for size in shape), device=device)
    seconds = {dtype: _seconds(matrix, dtype) for dtype in (torch.bfloat16, torch.float32)}
    return min(seconds, key=lambda dtype: seconds[dtype])


def _seconds(matrix: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the shortest of some times, the first of which warm up."""
    shortest = math.inf
    for _ in range(4):
        copy = matrix.to(dtype, copy=True)
        if copy.is_cuda:
            torch.cuda.synchronize(copy.device)
        began = time.perf_counter()
        orthogonalize_(copy)
        if copy.is_cuda:
            torch.cuda.synchronize(copy.device)
        shortest = min(shortest, time.perf_counter() - began)
    return shortest
