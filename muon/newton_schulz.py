"""Newton-Schulz: the nearest matrix whose singular values are all about one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
_STEEPEST = 3.6  # Rounding errors of what rises more are larger than they are worth.
_MEASURED_ROUNDS = 8
_BATCH_NUMEL = 1 << 24  # Of all in a batch, which is a copy.


def orthogonalize_(
    matrix: torch.Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
) -> torch.Tensor:
    """Replace the singular values of matrices by values near one, keeping their directions.

    Each step maps X to a X + (b A + c A^2) X with A = X X^T, which applies the odd
    polynomial a s + b s^3 + c s^5 to every singular value s.

    Args:
        matrix: shape (rows, columns), or (count, rows, columns) for several at once,
            contiguous, of the dtype to compute in. Its content is used up.
        coefficients: (a, b, c).
        steps: number of iterations.
        eps: the norm by which a smaller matrix is divided, so that zero stays zero.

    Returns:
        The update, of the same shape and dtype. That of one matrix is bit for bit what
        ``torch.optim.Muon`` computes from the same contiguous matrix: a tall one is worked on
        as a transposed view. On a CPU, where the shorter side is at least 512, it has other
        bits: there the same is done with fewer operations.
    """
    is_tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if is_tall else matrix  # (..., rows, columns), rows <= columns
    is_single = wide.ndim == 2
    # The Frobenius norm bounds the largest singular value, which must not exceed one.
    # Its shape is () for one matrix and (count, 1, 1) for several.
    norm = wide.norm() if is_single else torch.linalg.matrix_norm(wide, keepdim=True)
    wide.div_(norm.clamp(min=eps))
    if is_single and wide.is_cpu and wide.size(0) >= _LARGE_ROWS:
        wide = _iterate_on_gram(wide, coefficients, steps)  # (rows, columns)
    else:
        wide = _iterate(wide, coefficients, steps)  # (..., rows, columns)
    return wide.mT if is_tall else wide


def orthogonalize_all(
    matrices: Sequence[torch.Tensor],
    *,
    batched: bool,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
) -> list[torch.Tensor]:
    """Orthogonalize matrices, each alone or several small ones of one shape at once.

    At once is quicker on a GPU; the last bits then depend on which others there are.

    Args:
        matrices: on one device and of one dtype, else as for ``orthogonalize_``.
        batched: whether to do several at once.
        coefficients: as for ``orthogonalize_``.
        steps: likewise.
        eps: likewise.

    Returns:
        The update of each.
    """
    updates: dict[int, torch.Tensor] = {}
    for batch in batches([matrix.shape for matrix in matrices], batched=batched):
        if len(batch) == 1:
            stacked = matrices[batch[0]]  # (rows, columns)
        else:
            stacked = torch.stack([matrices[index] for index in batch])  # (count, rows, columns)
        update = orthogonalize_(stacked, coefficients=coefficients, steps=steps, eps=eps)
        unstacked = [update] if len(batch) == 1 else update.unbind()  # count x (rows, columns)
        updates.update(zip(batch, unstacked, strict=True))
    return [updates[index] for index in range(len(matrices))]


def batches(shapes: Sequence[tuple[int, ...]], *, batched: bool) -> list[list[int]]:
    """Return which matrices of some shapes are worked on together, by position and in order."""
    if not batched:
        return [[index] for index in range(len(shapes))]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(index)
    together = []
    for shape, indices in by_shape.items():
        count = max(1, _BATCH_NUMEL // max(1, math.prod(shape)))
        together += [indices[at : at + count] for at in range(0, len(indices), count)]
    return together


def cost(shape: tuple[int, int]) -> int:
    """Return how many multiplications a step of Newton-Schulz takes, for comparing shapes.

    For r rows and c columns, r <= c, r^2 c for X X^T, r^3 for its square and r^2 c for the
    product with X. What large matrices take on a CPU has other proportions, but ranks balanced
    by these were still balanced there: 1.08 of the mean at most, for Llama's shapes on 64.
    """
    rows, columns = sorted(shape)
    return rows**2 * (2 * columns + rows)


def _iterate(
    wide: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    a, b, c = coefficients
    addmm = torch.addmm if wide.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = wide @ wide.mT  # (..., rows, rows): A = X X^T
        polynomial = addmm(gram, gram, gram, beta=b, alpha=c)  # (..., rows, rows): b A + c A^2
        wide = addmm(wide, polynomial, wide, beta=a)  # (..., rows, columns): a X + (b A + c A^2) X
    return wide


def _iterate_on_gram(
    wide: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    """Do the same with fewer operations: several steps on A = X X^T, then one product with X.

    All that a step multiplies are polynomials in A, so they commute and are symmetric: with
    P = a I + b A + c A^2 a step takes A to P A P, and the product Q of all P to P Q. About the
    mean of the diagonal of P is kept apart as a number, so that rounding adds little to what is
    left. It still grows up to a times with each step, so after two Q is applied and A made anew;
    all five at once diverge. In the first steps nearly all singular values are small, so Q is
    nearly a number and one step more does no harm. Of a nearly square X a product costs little
    more than of A, so that steps together gain nothing.
    """
    rows, columns = wide.shape
    is_worth_it = columns >= 2 * rows and abs(coefficients[0]) <= _STEEPEST
    done = 0
    while done < steps:
        together = (2 if done else 3) if is_worth_it else 1
        count = min(together, steps - done)
        gram = _symmetric_addmm(None, wide, wide.T)  # (rows, rows): A
        scale, rest = _polynomial(gram, coefficients, centred=count > 1)  # (rows, rows)
        total, product = scale, rest  # (rows, rows): Q = total I + product
        for _ in range(count - 1):
            half = _symmetric_addmm(gram, rest, gram, beta=scale)  # (rows, rows): P A
            gram = _symmetric_addmm(half, half, rest, beta=scale)  # (rows, rows): P A P
            scale, rest = _polynomial(gram, coefficients, centred=True)  # (rows, rows)
            addend = (product * scale).add_(rest, alpha=total)  # (rows, rows)
            product = _symmetric_addmm(addend, rest, product)  # (rows, rows)
            total *= scale
        wide = torch.addmm(wide, product, wide, beta=total)  # (rows, columns): Q X
        done += count
    return wide


def _polynomial(
    gram: torch.Tensor, coefficients: tuple[float, float, float], *, centred: bool
) -> tuple[float, torch.Tensor]:
    """Return ``a I + b A + c A^2`` as a number times I, and the matrix that is left.

    The number is a, or with ``centred`` near the mean of the diagonal. It takes few values,
    since torch keeps a compiled kernel for each that the addend of a bfloat16 product has.
    """
    a, b, c = coefficients
    dtype = torch.promote_types(gram.dtype, torch.float32)
    mean = 0.0
    if centred and b != 0:
        trace = float(gram.diagonal().sum(dtype=dtype))
        norm = float(torch.linalg.vector_norm(gram, dtype=dtype))
        mean = (b * trace + c * norm**2) / len(gram)
    if not 0.125 <= abs(mean) < 1e6:  # Too little to matter, or it diverges, or is a NaN.
        return a, _symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
    mean = round(4 * mean) / 4
    addend = gram.clone()  # (rows, rows)
    addend.diagonal().sub_(mean / b)
    return a + mean, _symmetric_addmm(addend, gram, gram, beta=b, alpha=c)


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
    product = left.new_empty(size, size)  # (rows, rows)
    if addend is None:
        addend, beta = product, 0
    count = size // _STRIP_ROWS
    bounds = [size * index // count for index in range(count + 1)]
    for start, end in pairwise(bounds):
        torch.addmm(
            addend[start:end, :end],  # (end - start, end)
            left[start:end],  # (end - start, inner)
            right[:, :end],  # (inner, end)
            beta=beta,
            alpha=alpha,
            out=product[start:end, :end],  # (end - start, end)
        )
    for start, end in pairwise(bounds):
        product[start:end, end:] = product[end:, start:end].T  # (end - start, rows - end)
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
    sizes = [min(size, 256) for size in shape]
    matrix = torch.ones(sizes, device=device)  # (rows, columns), 256 at most
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
