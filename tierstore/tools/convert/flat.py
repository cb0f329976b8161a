"""Parameters in flat files: a tensor is runs of elements that lie in several files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tierstore.errors import CorruptionError
from tierstore.inspection.safe_pickle import StoredTensor
from tierstore.layout.chunks import Chunk
from tierstore.tools.convert.entries import Entry, Read, StoredFile, flat_start


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a flattened tensor, and where they lie."""

    start: int
    """Position of the first element in the flattened tensor."""
    numel: int
    file: StoredFile
    offset: int
    """Byte of the file at which the first element is."""

    @property
    def end(self) -> int:
        """Position after the last element."""
        return self.start + self.numel


def flat_entry(
    parameter: str, state: str, dtype: torch.dtype, shape: Sequence[int], runs: Iterable[Run]
) -> Entry:
    """Return the entry of a tensor whose elements are in runs.

    Raises:
        CorruptionError: the runs do not tile the tensor.
    """
    ordered = sorted((run for run in runs if run.numel), key=lambda run: run.start)
    numel = torch.Size(shape).numel()
    ends = [0, *(run.end for run in ordered)]
    starts = [*(run.start for run in ordered), numel]
    if ends != starts:
        found = sum(run.numel for run in ordered)
        raise CorruptionError(
            f"{state} of {parameter!r} has {numel} elements, and the files have {found} of them, "
            "or some twice: a part of the checkpoint is missing"
        )
    return Entry(
        parameter=parameter,
        state=state,
        dtype=dtype,
        shape=tuple(shape),
        read=_read_runs(dtype, tuple(shape), ordered),
    )


def _read_runs(dtype: torch.dtype, shape: tuple[int, ...], runs: Sequence[Run]) -> Read:
    def read(chunk: Chunk, target: torch.Tensor) -> None:
        begin = flat_start(shape, chunk)
        stored = target if target.dtype == dtype else torch.empty(chunk.sizes, dtype=dtype)
        data = stored.view(-1).view(torch.uint8).numpy().data
        size = dtype.itemsize
        for run in runs:
            first, last = max(run.start, begin), min(run.end, begin + chunk.numel)
            if first < last:
                piece = data[(first - begin) * size : (last - begin) * size]
                run.file.read_into(piece, run.offset + (first - run.start) * size)
        if stored is not target:
            target.copy_(stored)

    return read


def value_of(tensor: StoredTensor, file: StoredFile) -> float:
    """Return the only element of a tensor, such as a step count.

    Raises:
        CorruptionError: it has more elements, or cannot be read.
    """
    if math.prod(tensor.shape) != 1:
        raise CorruptionError(f"{file.path}: a tensor of {list(tensor.shape)} is not a number")
    value = torch.empty(1, dtype=tensor.dtype)
    file.read_into(value.view(torch.uint8).numpy().data, tensor.offset)
    return float(value.item())
