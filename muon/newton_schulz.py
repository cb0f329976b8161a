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
# From here on fewer operations take less time.
_LARGE_ROWS = 512
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
        On a CPU, where the shorter side is at least 512, it has other bits: there the same is
        done with fewer operations.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if is_tall else matrix
    # The Frobenius norm bounds the largest singular value, which must not exceed one.
    wide.div_(wide.norm().clamp(min=eps))
    if wide.is_cpu and wide.size(0) >= _LARGE_ROWS:
        wide = _iterate_on_gram(wide, coefficients, steps)
    else:
        wide = _iterate(wide, coefficients, steps)
    return wide.T if is_tall else wide


def _iterate(
    wide: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide


def _iterate_on_gram(
    wide: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    """Do the same with fewer operations: several steps on A = X X^T, then one product with X.

    All that a step multiplies are polynomials in A, so they commute and are symmetric: with
    R = b A + c A^2 a step takes A to (a I + R) A (a I + R), and the product of all a I + R,
    kept as s I + S, to (a I + R) (s I + S). What rounding adds to S grows up to a times with
    each step, so it is applied, and A made anew, before that is a tenth: in bfloat16 after two
    steps (all five at once diverge), in float32 after the last. Of a nearly square X a product
    costs no more than of A, so that steps together gain nothing.
    """
    a, b, c = coefficients
    rows, columns = wide.shape
    together = steps if 2 * columns >= 3 * rows else 1
    if abs(a) > 1:
        exact = int(math.log(0.1 / torch.finfo(wide.dtype).eps, abs(a)))
        together = max(1, min(together, exact))
    for start in range(0, steps, together):
        gram = _symmetric_addmm(None, wide, wide.T)
        rest = _symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
        scale, product = a, rest
        for _ in range(min(together, steps - start) - 1):
            half = _symmetric_addmm(gram, rest, gram, beta=a)
            gram = _symmetric_addmm(half, half, rest, beta=a)
            rest = _symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
            addend = (product * a).add_(rest, alpha=scale)
            scale, product = a * scale, _symmetric_addmm(addend, rest, product)
        wide = torch.addmm(wide, product, wide, beta=scale)
    return wide


def _symmetric_addmm(
    addend: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Return ``beta * addend + alpha * left @ right``, known to be symmetric.

    The lower half is computed, strip by strip, and mirrored.
    """
    size = left.size(0)
    product = left.new_empty(size, size)
    if addend is None:
        addend, beta = product, 0
    count = size // _STRIP_ROWS
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
    """Return the dtype to orthogonalize such a matrix in: bfloat16, unless it is slow there.

    On some CPUs bfloat16 is hundreds of times slower than on others, so that only a
    measurement tells; float32 is returned where it takes less than two thirds of the time. It
    is made on a matrix of at most 256 rows and columns, by one thread: several wait for each
    other for as long as other work has their cores. Both take turns, and the shortest time of
    each counts.

    Args:
        shape: (rows, columns).
        device: where to compute.
    """
    matrix = torch.ones(*(min(size, 256) for size in shape), device=device)
    seconds = {torch.bfloat16: math.inf, torch.float32: math.inf}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(_MEASURED_ROUNDS):
            for dtype in seconds:
                seconds[dtype] = min(seconds[dtype], _seconds(matrix.to(dtype, copy=True)))
            slowness = seconds[torch.bfloat16] / seconds[torch.float32]
            if number and slowness > 10:  # More rounds could take minutes, and change nothing.
                break
    finally:
        torch.set_num_threads(threads)
    return torch.float32 if slowness > 1.5 else torch.bfloat16


def _seconds(matrix: torch.Tensor) -> float:
    """Return how long one matrix takes, which is used up."""
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    began = time.perf_counter()
    orthogonalize_(matrix)
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - began
