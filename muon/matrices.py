"""Logical matrices: the matrices that a parameter holds, and their parts in its chunks.

A declaration is a sequence of cuts. Each cut applies to all matrices that the earlier cuts made:

- ``("split", dim, sizes)``: consecutive matrices of these sizes along a dimension.
- ``("blocks", dim, size)``: consecutive matrices of one size, such as the heads of a projection.
- ``("interleaved", dim, count)``: matrix i has the indices i, i + count, i + 2 count, ...
- ``("grid", rows, columns)``: equal blocks; the numbers are the blocks along rows and columns.
- ``("stack",)``: one matrix for each index of all but the last two dimensions.
- ``("flatten",)``: one row for each index of the first dimension, as in convolutions.
- ``("transposed",)``: rows are the inputs of the layer, as in GPT-2's Conv1D. The scale of the
  learning rate depends on this.

Example: the ``qkv`` of grouped-query attention with 32 query heads and 8 key heads of 128, each
head a matrix: ``(("split", 0, (4096, 1024, 1024)), ("blocks", 0, 128))``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tierstore

Declaration = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of a matrix that lie in a chunk."""

    index: tuple[slice, ...]
    """Indices in the chunk."""
    chunk: tierstore.pages.Chunk
    """Place in the matrix of shape ``Matrix.sizes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix of a parameter: its indices in each dimension. Indices may have steps."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    """Number of indices in each dimension. The matrix is row-major in this shape."""
    row_dimensions: int = 1
    """Number of the first dimensions that make the rows; the others make the columns."""
    is_transposed: bool = False
    """True if rows are the inputs of the layer."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        rows, columns = self.sizes[: self.row_dimensions], self.sizes[self.row_dimensions :]
        return math.prod(rows), math.prod(columns)

    @property
    def outputs_and_inputs(self) -> tuple[int, int]:
        """The shape, outputs of the layer first."""
        rows, columns = self.shape
        return (columns, rows) if self.is_transposed else (rows, columns)

    def part(self, chunk: tierstore.pages.Chunk) -> Part | None:
        """Return the elements that lie in a chunk of the parameter; None if none do."""
        index, offsets, sizes = [], [], []
        dimensions = zip(
            *(self.starts, self.steps, self.sizes, chunk.offsets, chunk.sizes), strict=True
        )
        for start, step, count, offset, size in dimensions:
            first = min(max(0, -(-(offset - start) // step)), count)
            stop = min(max(0, -(-(offset + size - start) // step)), count)
            if first >= stop:
                return None
            begin = start + first * step - offset
            index.append(slice(begin, begin + (stop - first - 1) * step + 1, step))
            offsets.append(first)
            sizes.append(stop - first)
        return Part(tuple(index), tierstore.pages.Chunk(tuple(offsets), tuple(sizes)))


def declared(group: Mapping[str, Any]) -> Declaration:
    """Return the declaration of a param group. Lists count as tuples.

    Raises:
        ValueError: the declaration is not a sequence of cuts.
    """
    value = group.get("matrices")
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(map(_is_cut, value)):
        raise ValueError(
            "matrices must be a tuple of cuts, each one of ('split', dim, sizes), "
            "('blocks', dim, size), ('interleaved', dim, count), ('grid', rows, columns), "
            f"('stack',), ('flatten',) and ('transposed',), got {value!r}"
        )
    return tuple(
        tuple(tuple(one) if isinstance(one, list) else one for one in cut) for cut in value
    )


def _is_cut(cut: object) -> bool:
    match cut:
        case ["split", dim, [*sizes]]:
            return all(type(number) is int for number in (dim, *sizes))
        case ["blocks" | "interleaved" | "grid", first, second]:
            return type(first) is int and type(second) is int
        case ["stack" | "flatten" | "transposed"]:
            return True
    return False


def matrices_of(shape: Sequence[int], declaration: Declaration = ()) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter.

    Args:
        shape: shape of the parameter.
        declaration: from ``declared()``.

    Raises:
        ValueError: the declaration does not fit the shape, or leaves more than two dimensions.
    """
    return _matrices_of(tuple(shape), declaration)


@functools.cache
def _matrices_of(shape: tuple[int, ...], declaration: Declaration) -> tuple[Matrix, ...]:
    whole = Matrix(starts=(0,) * len(shape), steps=(1,) * len(shape), sizes=shape)
    found, is_matrix = [whole], len(shape) == 2
    for kind, *arguments in declaration:
        if kind == "stack" and len(shape) < 3:
            raise ValueError("a stack of matrices has three dimensions or more")
        if kind in ("stack", "flatten"):
            is_matrix = len(shape) >= 2
            rows = len(shape) - 1 if kind == "stack" else 1
            found = [replace(matrix, row_dimensions=rows) for matrix in found]
        if kind == "transposed":
            found = [replace(matrix, is_transposed=True) for matrix in found]
        elif kind == "stack":
            for dimension in range(len(shape) - 2):
                found = [one for matrix in found for one in _blocks(matrix, dimension, 1)]
        elif kind in _CUTS:
            found = [one for matrix in found for one in _CUTS[kind](matrix, *arguments)]
    if not is_matrix:
        raise ValueError(
            "Muon needs two-dimensional parameters. Put it in a group with algorithm='adamw', or "
            "declare its matrices: matrices=(('stack',),) for one in each index of the first "
            "dimensions, (('flatten',),) for a convolution"
        )
    return tuple(found)


def unit_of(shape: Sequence[int], declaration: Declaration) -> int | None:
    """Return the number of rows of the first dimension that a matrix needs together.

    None if a matrix needs all rows, or if matrices need unequal ranges of rows.
    """
    matrices = matrices_of(shape, declaration)
    counts = {matrix.sizes[0] for matrix in matrices}
    if len(matrices) < 2 or len(counts) > 1 or any(matrix.steps[0] > 1 for matrix in matrices):
        return None
    (count,) = counts
    fits = count and shape[0] % count == 0 and count < shape[0]
    return count if fits and all(m.starts[0] % count == 0 for m in matrices) else None


def _split(matrix: Matrix, dimension: int, sizes: Sequence[int]) -> Iterator[Matrix]:
    extent = _extent(matrix, "split", dimension)
    if sum(sizes) != extent or min(sizes, default=0) < 1:
        raise ValueError(
            f"a split into {list(sizes)} does not fit the {extent} indices of dimension {dimension}"
        )
    first = 0
    for size in sizes:
        yield _with(matrix, dimension, first, 1, size)
        first += size


def _blocks(matrix: Matrix, dimension: int, size: int) -> Iterator[Matrix]:
    extent = _extent(matrix, "blocks", dimension)
    if size < 1 or extent % size:
        raise ValueError(
            f"blocks of {size} do not fit the {extent} indices of dimension {dimension}"
        )
    for first in range(0, extent, size):
        yield _with(matrix, dimension, first, 1, size)


def _interleaved(matrix: Matrix, dimension: int, count: int) -> Iterator[Matrix]:
    extent = _extent(matrix, "interleaved", dimension)
    if count < 1 or extent % count:
        raise ValueError(
            f"{count} interleaved matrices do not fit the {extent} indices of dimension {dimension}"
        )
    for first in range(count):
        yield _with(matrix, dimension, first, count, extent // count)


def _grid(matrix: Matrix, rows: int, columns: int) -> Iterator[Matrix]:
    first = matrix.row_dimensions
    found = [matrix]
    for dimensions, count in ((range(first), rows), (range(first, len(matrix.sizes)), columns)):
        # Blocks are boxes: the outermost dimension is cut; experts have one index in others.
        dimension = next((d for d in dimensions if matrix.sizes[d] > 1), dimensions[-1])
        extent = matrix.sizes[dimension]
        if count < 1 or extent % count:
            raise ValueError(
                f"a grid of {rows} x {columns} blocks does not fit a matrix of "
                f"{' x '.join(map(str, matrix.shape))}: {count} do not divide {extent}"
            )
        if count > 1 and extent:
            size = extent // count
            found = [one for each in found for one in _blocks(each, dimension, size)]
    yield from found


def _extent(matrix: Matrix, kind: str, dimension: int) -> int:
    if not 0 <= dimension < len(matrix.sizes):
        raise ValueError(
            f"{kind!r} is of dimension {dimension}, but the parameter has {len(matrix.sizes)}"
        )
    return matrix.sizes[dimension]


def _with(matrix: Matrix, dimension: int, first: int, step: int, size: int) -> Matrix:
    """Return the matrix with a subset of its indices in a dimension."""

    def changed(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dimension], value, *values[dimension + 1 :])

    start = matrix.starts[dimension] + first * matrix.steps[dimension]
    return replace(
        matrix,
        starts=changed(matrix.starts, start),
        steps=changed(matrix.steps, step * matrix.steps[dimension]),
        sizes=changed(matrix.sizes, size),
    )


_CUTS: dict[str, Callable[..., Iterator[Matrix]]] = {
    "split": _split,
    "blocks": _blocks,
    "interleaved": _interleaved,
    "grid": _grid,
}
