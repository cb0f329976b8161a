"""Newton-Schulz iteration: replaces the singular values of a matrix by values near one.

The quintic iteration is by Keller Jordan (https://kellerjordan.github.io/posts/muon/), as in
``torch.optim.Muon``. The module also counts its multiplications and measures its fastest dtype.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from muon.coefficients import KELLER_JORDAN, Coefficients, Triple, of_steps

# Keller Jordan's coefficients have the steepest slope at zero: after five steps every singular
# value lies in about [0.7, 1.2].
COEFFICIENTS = KELLER_JORDAN
STEPS = 5
EPS = 1e-7
NORMS = (None, "scaled")
METHODS = (None, "gram")
_LARGE_ROWS = 512  # Fewest rows for which _iterate_on_gram() is faster on a CPU.
_STRIP_ROWS = 256
_MANY_THREADS = 8  # A product of _STRIP_ROWS does not occupy more threads.
_GPU_MULTIPLE = 8  # On a GPU, products with other row lengths take up to five times as long.
_STEEPEST = 3.6  # A steeper polynomial would amplify rounding errors too much.
_MEASURED_ROUNDS = 8
_MEASURED_ROWS = 128  # Rows of the matrices in bfloat16_slowness().
_BATCH_COUNT = 8  # Matrices of a batch. Fewer if larger: a GPU computes large ones well alone.
_BATCH_NUMEL = 1 << 20


def orthogonalize_(
    matrix: torch.Tensor,
    *,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    norm: str | None = None,
    method: str | None = None,
) -> torch.Tensor:
    """Replace the singular values of matrices by values near one, keeping their directions.

    Each step maps X to a X + (b A + c A^2) X with A = X X^T, which applies the odd
    polynomial a s + b s^3 + c s^5 to every singular value s.

    Args:
        matrix: shape (rows, columns), or (count, rows, columns) for a batch; contiguous, in
            the dtype of the computation. The content is overwritten.
        coefficients: (a, b, c), one such triple for each step, or the name of a table of
            ``muon.coefficients``. The last triple of a table is repeated.
        steps: number of iterations.
        eps: smallest norm to divide by. A zero matrix then stays zero.
        norm: "scaled": first scale each matrix by a power of two, so that its largest magnitude is
            in [0.5, 1). A matrix times a power of two then has the same update bit for bit, and
            squares of its elements neither overflow nor vanish. None: do not scale.
        method: "gram": if the shorter side is at least 512 and the other side twice as long,
            iterate on X X^T, with full products and without reading from the device: 0.88 of the
            operations for sides of 1 : 2, 0.7 for 1 : 3.5. Rounds differently. None: do not.

    Returns:
        The update, of the same shape and dtype. For one contiguous matrix it equals the update
        of ``torch.optim.Muon`` bit for bit: a tall matrix is computed as a transposed view. There
        are exceptions. On a CPU, matrices whose shorter side is at least 512 take fewer operations,
        which round differently. In 16 bits with more than 8 threads, the limit is 1024, and the
        other side must be twice as long. On a GPU, a 16-bit matrix with a side that is not a
        multiple of 8 is padded with zeros, which may round differently.
    """
    for name, value, values in (("norm", norm, NORMS), ("method", method, METHODS)):
        if value not in values:
            raise ValueError(f"{name} must be None or {values[1]!r}, got {value!r}")
    rows, columns = matrix.shape[-2:]
    is_tall = rows > columns
    wide = matrix.mT if is_tall else matrix  # (..., rows, columns), rows <= columns
    is_single = wide.ndim == 2
    if norm == "scaled":
        _scale_(wide)
    elif wide.dtype == torch.float16:  # Norms exceed its largest number, 65504.
        _scale_(wide, only_down=True)
    # The Frobenius norm bounds the largest singular value, which must not exceed one.
    # Its shape is () for one matrix and (count, 1, 1) for several.
    length = wide.norm() if is_single else torch.linalg.matrix_norm(wide, keepdim=True)
    wide.div_(length.clamp(min=eps))
    below, right = -rows % _GPU_MULTIPLE, -columns % _GPU_MULTIPLE
    is_filled = wide.is_cuda and wide.itemsize == 2 and below + right > 0
    if is_filled:  # Rows and columns of zeros stay zero and do not change sums.
        matrix = functional.pad(matrix, (0, right, 0, below))
        wide = matrix.mT if is_tall else matrix
    iterate = _iteration(wide, method)
    wide = iterate(wide, of_steps(coefficients, steps))  # (..., rows, columns)
    update = wide.mT if is_tall else wide  # (..., rows, columns) of the matrix given
    return update[..., :rows, :columns].contiguous() if is_filled else update


def orthogonalize_all(
    matrices: Sequence[torch.Tensor],
    *,
    batched: bool,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    norm: str | None = None,
    method: str | None = None,
) -> list[torch.Tensor]:
    """Orthogonalize matrices one by one, or in batches of equal shape.

    Batches are faster on a GPU, and round differently. A batch is padded with zeros to
    ``batch_count()`` matrices. An update then does not depend on the other matrices in its batch.

    Args:
        matrices: shapes (rows, columns), on one device and of one dtype. They are overwritten.
        batched: compute small matrices of one shape in batches.
        coefficients: as for ``orthogonalize_``.
        steps: as for ``orthogonalize_``.
        eps: as for ``orthogonalize_``.
        norm: as for ``orthogonalize_``.
        method: as for ``orthogonalize_``.

    Returns:
        The updates, in the order of ``matrices``.
    """
    updates: dict[int, torch.Tensor] = {}
    for batch in batches([matrix.shape for matrix in matrices], batched=batched):
        first = matrices[batch[0]]  # (rows, columns)
        count = batch_count(first.shape) if batched else 1
        stacked = first if count == 1 else first.new_zeros(count, *first.shape)
        for index, place in zip(batch, stacked, strict=False) if count > 1 else ():
            place.copy_(matrices[index])
        update = orthogonalize_(
            stacked, coefficients=coefficients, steps=steps, eps=eps, norm=norm, method=method
        )
        unstacked = [update] if count == 1 else update[: len(batch)].unbind()
        updates.update(zip(batch, unstacked, strict=True))  # (rows, columns) of each
    return [updates[index] for index in range(len(matrices))]


def batches(shapes: Sequence[tuple[int, ...]], *, batched: bool) -> list[list[int]]:
    """Return the positions of the matrices in each batch, given the shapes of all matrices."""
    if not batched:
        return [[index] for index in range(len(shapes))]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(index)
    found = []
    for shape, indices in by_shape.items():
        count = batch_count(shape)
        found += [indices[at : at + count] for at in range(0, len(indices), count)]
    return found


def batch_count(shape: Sequence[int]) -> int:
    """Return the number of matrices of this shape in a batch, including padding of zeros."""
    return max(1, min(_BATCH_COUNT, _BATCH_NUMEL // max(1, math.prod(shape))))


def numel_needed(
    shape: Sequence[int], count: int, *, on_gpu: bool, method: str | None = None
) -> int:
    """Return the elements that live at the peak of ``orthogonalize_all()`` of one batch.

    On a GPU these are the given matrices, the matrices before and after a step, and two square
    products of the shorter side (up to five with ``method="gram"``). Batching needs one more copy,
    and so does padding. On a CPU about five of each were measured: products there keep packed
    copies of their operands.

    Args:
        shape: (rows, columns) of each matrix.
        count: number of matrices of the batch. Inputs and results are in separate memory.
        on_gpu: whether the matrices are on a GPU.
        method: as for ``orthogonalize_``.
    """
    rows, columns = sorted(shape)
    is_filled = any(size % _GPU_MULTIPLE for size in shape)
    products = 5 if count == 1 and method == "gram" and _is_long(rows, columns) else 2
    copies, squares = (3 + (count > 1) + is_filled, products) if on_gpu else (5, 5)
    return count * rows * (copies * columns + squares * rows)


def cost(shape: tuple[int, int]) -> int:
    """Return the multiplications of one Newton-Schulz step, for comparing shapes.

    For r rows and c columns, r <= c: r^2 c for X X^T, r^3 for its square and r^2 c for the
    product with X. Large matrices have other proportions on a CPU, but ranks that are balanced by
    this cost stay balanced there: at most 1.08 of the mean, for the shapes of Llama on 64 ranks.
    """
    rows, columns = sorted(shape)
    return rows**2 * (2 * columns + rows)


def flops(shape: tuple[int, int], steps: int = STEPS) -> int:
    """Return the nominal floating-point operations of Newton-Schulz, even if fewer are done."""
    return 2 * steps * cost(shape)


def _scale_(wide: torch.Tensor, *, only_down: bool = False) -> None:
    """Multiply each matrix by a power of two, so that its largest magnitude is in [0.5, 1).

    A matrix of zeros, or with NaN or infinite elements, does not change.

    Args:
        wide: shape (..., rows, columns).
        only_down: do not change smaller matrices.
    """
    largest = torch.linalg.vector_norm(wide, math.inf, dim=(-2, -1), keepdim=True)
    wider = torch.promote_types(wide.dtype, torch.float32)
    exponent = torch.frexp(largest.to(wider)).exponent  # (..., 1, 1)
    if only_down:
        exponent = exponent.clamp(min=0)
    # Use two factors: a single factor would overflow for a subnormal number.
    for part in (exponent // 2, exponent - exponent // 2):
        wide.mul_(torch.ldexp(torch.ones_like(largest), -part))


def _iteration(
    wide: torch.Tensor, method: str | None
) -> Callable[[torch.Tensor, Sequence[Triple]], torch.Tensor]:
    """Return the function that iterates on a matrix. Add other implementations here.

    Args:
        wide: shape (..., rows, columns), rows <= columns.
        method: as for ``orthogonalize_``.
    """
    if wide.ndim > 2:
        return _iterate
    if method == "gram" and _is_long(*wide.shape):
        return functools.partial(_iterate_on_gram, is_fixed=True)
    return _iterate_on_gram if _is_large(wide) else _iterate


def _is_long(rows: int, columns: int) -> bool:
    """Return whether full products with X X^T are large and take fewer operations."""
    return rows >= _LARGE_ROWS and columns >= 2 * rows


def _is_large(wide: torch.Tensor) -> bool:
    """Return whether _iterate_on_gram() is faster on this CPU for shape (rows, columns)."""
    rows, columns = wide.shape
    if wide.itemsize == 2 and torch.get_num_threads() > _MANY_THREADS:
        return wide.is_cpu and rows >= 2 * _LARGE_ROWS and columns >= 2 * rows
    return wide.is_cpu and rows >= _LARGE_ROWS


def _iterate(wide: torch.Tensor, table: Sequence[Triple]) -> torch.Tensor:
    addmm = torch.addmm if wide.ndim == 2 else torch.baddbmm
    for a, b, c in table:
        gram = wide @ wide.mT  # (..., rows, rows): A = X X^T
        # (..., rows, rows): b A + c A^2
        polynomial = addmm(gram, gram, gram, beta=b, alpha=c) if c else gram.mul_(b)
        wide = addmm(wide, polynomial, wide, beta=a)  # (..., rows, columns): a X + (b A + c A^2) X
    return wide


def _iterate_on_gram(
    wide: torch.Tensor, table: Sequence[Triple], *, is_fixed: bool = False
) -> torch.Tensor:
    """Iterate with fewer operations: several steps on A = X X^T, then one product with X.

    With P = a I + b A + c A^2, a step maps X to P X, hence A to P A P, and multiplies the
    product Q of all P so far by P. All factors are polynomials in A: they commute and are
    symmetric, so half of each product suffices. A number near the mean of the diagonal of P is
    kept separately. The rest is then small and rounds little. Rounding errors still grow up to a
    times with each step. Therefore Q is applied to X after two steps, and A is computed again.
    All five steps at once would diverge. The first three steps may share one Q, because nearly
    all singular values are then small and Q is nearly a multiple of I. For a nearly square X, a
    product with X costs little more than a product with A, so every step applies its own P. Steps
    near a steep step do the same.

    With ``is_fixed`` nothing is read from the device, and products are full: a GPU computes each
    in one launch. The separate number is then the middle between singular values of zero and one.
    """
    addmm = torch.addmm if is_fixed else _symmetric_addmm
    rows, columns = wide.shape
    done = 0
    while done < len(table):
        together = table[done : done + (2 if done else 3)]
        if columns < 2 * rows or any(abs(a) > _STEEPEST for a, _, _ in together):
            together = together[:1]
        # (rows, rows): A
        gram = wide @ wide.T if is_fixed else _symmetric_addmm(None, wide, wide.T)
        is_centred = len(together) > 1
        scale, rest = _polynomial(gram, together[0], is_fixed, centred=is_centred)  # (rows, rows)
        total, product = scale, rest  # (rows, rows): Q = total I + product
        for coefficients in together[1:]:
            half = addmm(gram, rest, gram, beta=scale)  # (rows, rows): P A
            gram = addmm(half, half, rest, beta=scale)  # (rows, rows): P A P
            scale, rest = _polynomial(gram, coefficients, is_fixed, centred=True)  # (rows, rows)
            addend = (product * scale).add_(rest, alpha=total)  # (rows, rows)
            product = addmm(addend, rest, product)  # (rows, rows)
            total *= scale
        wide = torch.addmm(wide, product, wide, beta=total)  # (rows, columns): Q X
        done += len(together)
    return wide


def _polynomial(
    gram: torch.Tensor, coefficients: Triple, is_fixed: bool, *, centred: bool
) -> tuple[float, torch.Tensor]:
    """Return P = a I + b A + c A^2 as (number, rest), with P = number I + rest.

    The number is a, or with ``centred`` near the mean of the diagonal of P, or the middle of P for
    A = 0 and A = I. It is rounded to few values, because torch caches one compiled kernel per
    factor of a bfloat16 product.
    """
    a, b, c = coefficients
    addmm = torch.addmm if is_fixed else _symmetric_addmm
    dtype = torch.promote_types(gram.dtype, torch.float32)
    mean = 0.0
    if centred and b != 0 and is_fixed:
        mean = (b + c) / 2
    elif centred and b != 0:
        trace = float(gram.diagonal().sum(dtype=dtype))
        norm = float(torch.linalg.vector_norm(gram, dtype=dtype))
        mean = (b * trace + c * norm**2) / len(gram)
    if not 0.125 <= abs(mean) < 1e6:  # Negligible, divergent or NaN.
        return a, addmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b
    mean = round(4 * mean) / 4
    addend = gram.clone()  # (rows, rows)
    addend.diagonal().sub_(mean / b)
    return a + mean, addmm(addend, gram, gram, beta=b, alpha=c) if c else addend.mul_(b)


def _symmetric_addmm(
    addend: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """Return ``beta * addend + alpha * left @ right``, which must be symmetric.

    The lower half is computed strip by strip and mirrored. None as addend means zero.
    """
    size = left.size(0)
    product = left.new_empty(size, size)  # (rows, rows)
    if addend is None:
        addend, beta = product, 0
    count = size // (_STRIP_ROWS * (2 if torch.get_num_threads() >= _MANY_THREADS else 1))
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


@functools.cache
def bfloat16_slowness() -> float:
    """Return the time of a bfloat16 matrix product on this CPU, relative to float32.

    The measurement takes at most about 0.1 s, once per process. Both dtypes take turns on one
    thread, and the shortest time of each dtype counts, as in fastest_dtype().
    """
    matrices = [
        torch.ones(_MEASURED_ROWS, _MEASURED_ROWS, dtype=dtype, device="cpu")
        for dtype in (torch.bfloat16, torch.float32)
    ]
    shortest = [math.inf, math.inf]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        end = time.perf_counter() + 0.1
        for _ in range(_MEASURED_ROUNDS):
            for index, matrix in enumerate(matrices):
                began = time.perf_counter()
                matrix @ matrix
                shortest[index] = min(shortest[index], time.perf_counter() - began)
            if time.perf_counter() > end:
                break
    finally:
        torch.set_num_threads(threads)
    return shortest[0] / shortest[1]


def fastest_dtype(shape: tuple[int, ...], device: torch.device) -> torch.dtype:
    """Measure whether bfloat16 or float32 orthogonalizes faster on a device.

    bfloat16 is hundreds of times slower on some CPUs than on others, so it must be measured.
    The measurement uses a matrix of at most 256 rows and columns and one thread, because
    several threads would wait for cores that other work occupies. Both dtypes take turns, and
    the shortest time of each dtype counts.

    Args:
        shape: (rows, columns).
        device: where to compute.

    Returns:
        float32 if it takes less than two thirds of the time of bfloat16, else bfloat16.
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
            if number and slowness > 10:  # More rounds could take minutes and change nothing.
                break
    finally:
        torch.set_num_threads(threads)
    return torch.float32 if slowness > 1.5 else torch.bfloat16


def _seconds(matrix: torch.Tensor) -> float:
    """Return the seconds for one matrix. Its content is overwritten."""
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    began = time.perf_counter()
    orthogonalize_(matrix)
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - began
