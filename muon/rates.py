"""Newton-Schulz rates of a machine, as ``tierstore probe`` measures them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from muon.newton_schulz import fastest_dtype, orthogonalize_

# (matrices, rows, columns): below 512 rows, square, wide, and a batch.
_SHAPES = (
    (1, 128, 512),
    (1, 256, 256),
    (1, 512, 512),
    (1, 512, 2048),
    (1, 768, 768),
    (8, 128, 128),
)
_GPU_SHAPES = ((1, 256, 1024), (1, 1024, 1024), (1, 1024, 4096), (1, 4096, 4096), (32, 256, 256))
_ROUNDS = 5
_SECONDS_MAX = 0.5  # For each shape.


def rates(device: torch.device) -> Iterator[tuple[tuple[int, int, int], str, list[float]]]:
    """Orthogonalize matrices of several shapes in the dtype of ``ns_dtype="auto"``.

    Yields:
        The shape (matrices, rows, columns), the dtype, and the seconds of each round for all
        matrices together.
    """
    for shape in _SHAPES if device.type == "cpu" else _GPU_SHAPES:
        dtype = fastest_dtype(shape[1:], device)
        size = shape if shape[0] > 1 else shape[1:]
        given = torch.randn(size, device=device, dtype=dtype)
        _seconds(given)  # Loads kernels.
        seconds: list[float] = []
        while len(seconds) < _ROUNDS and sum(seconds) < _SECONDS_MAX:
            seconds.append(_seconds(given))
        yield shape, str(dtype).removeprefix("torch."), seconds


def _seconds(given: torch.Tensor) -> float:
    """Return the seconds of one update of a copy of the matrices."""
    matrix = given.clone()
    _wait(matrix)
    began = time.perf_counter()
    orthogonalize_(matrix)
    _wait(matrix)
    return time.perf_counter() - began


def _wait(matrix: torch.Tensor) -> None:
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
