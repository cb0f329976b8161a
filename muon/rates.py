"""Rates of a machine for the computations of Muon, measured by ``tierstore probe``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from muon.newton_schulz import fastest_dtype, flops, orthogonalize_
from muon.optimizer import Muon

Work = tuple[str, tuple[int, int, int], str]
"""A computation: its name, shape (count, rows, columns) and dtype."""

NEWTON_SCHULZ, MUON, ADAMW = "newton_schulz", "muon_elements", "adamw_elements"
MASTERS, STATES = "_of_encoded_masters", "_of_encoded_states"
"""Suffixes of the names of elementwise works: encoded masters only, or also 8-bit states."""
_ENCODINGS: dict[str, dict[str, Any]] = {
    "": {},
    MASTERS: {"master": "24bit"},
    STATES: {"master": "24bit", "momentum_dtype": torch.int8, "moments_dtype": torch.int8},
}

# (matrices, rows, columns): below 512 rows, square, wide, and a batch.
_SHAPES = (
    (1, 128, 512),
    (1, 256, 256),
    (1, 256, 1024),
    (1, 512, 512),
    (1, 512, 2048),
    (1, 768, 768),
    (1, 768, 3072),
    (8, 128, 128),
)
_GPU_SHAPES = (
    (1, 256, 1024),
    (1, 1024, 1024),
    (1, 1024, 4096),
    (1, 4096, 4096),
    (1, 4096, 16384),
    (32, 256, 256),
)
# The small one shows the cost of a call. The large one exceeds the caches.
_ELEMENTS = ((256, 256), (16384, 1024))
_GPU_ELEMENTS = ((256, 256), (16384, 4096))
_ROUNDS = 5
# For each work: other load on the machine varies during this time.
_SECONDS = 0.25
_SECONDS_MAX = 0.5  # With fewer rounds.


def rates(device: torch.device) -> Iterator[tuple[Work, list[float]]]:
    """Measure Newton-Schulz of several shapes, and the elementwise parts of steps.

    Newton-Schulz runs in the dtype of ``ns_dtype="auto"``. The elementwise parts are the same as in
    a step in memory, including comparison and rounding of parameters: for parameters in float32,
    in bfloat16, and in bfloat16 with states in fewer bytes.

    Yields:
        The work, and the seconds of each round.
    """
    is_cpu = device.type == "cpu"
    for shape in _SHAPES if is_cpu else _GPU_SHAPES:
        dtype = fastest_dtype(shape[1:], device)
        size = shape if shape[0] > 1 else shape[1:]
        given = torch.randn(size, device=device, dtype=dtype)

        def orthogonalize(given: torch.Tensor = given) -> float:
            matrix = given.clone()
            return _seconds(lambda: orthogonalize_(matrix), device)

        yield (NEWTON_SCHULZ, shape, _name(dtype)), _rounds(orthogonalize)
    for dtype in (torch.float32, torch.bfloat16):
        for size in _ELEMENTS if is_cpu else _GPU_ELEMENTS:
            for end in _ENCODINGS if dtype == torch.bfloat16 else ("",):
                yield from _element_rates(size, dtype, device, end)


def operations(work: Work) -> tuple[float, float]:
    """Return the floating-point operations of a work, and the bytes of memory that it moves.

    Newton-Schulz of r rows and c columns, r <= c, in five steps has 20 r^2 c + 10 r^3. The
    elementwise parts read and write gradient, parameter, master and states.
    """
    name, shape, dtype = work
    count, rows, columns = shape[0], *sorted(shape[1:])
    numel, itemsize = math.prod(shape), getattr(torch, dtype).itemsize
    if name == NEWTON_SCHULZ:
        moved = 5.0 * itemsize * count * (4 * rows * columns + 4 * rows**2)
        return float(count * flops((rows, columns))), moved
    master = 2.0 if name.endswith((MASTERS, STATES)) else 8.0
    if name.startswith(ADAMW):
        states = 4.0 if name.endswith(STATES) else 16.0
    else:
        states = (2.0 if name.endswith(STATES) else 2.0 * itemsize) + 4.0
    return 0.0, numel * (master + states + 3.0 * itemsize)


def _element_rates(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, end: str
) -> Iterator[tuple[Work, list[float]]]:
    """Measure a step of AdamW, and one of Muon without iterations of Newton-Schulz."""
    for name, algorithm in ((ADAMW, "adamw"), (MUON, "muon")):
        parameter = nn.Parameter(torch.randn(shape, device=device, dtype=dtype))
        parameter.grad = torch.randn_like(parameter)
        group = {"params": [("parameter", parameter)], "algorithm": algorithm}
        optimizer = Muon([group], ns_steps=0, **_ENCODINGS[end])
        yield (
            (name + end, (1, *shape), _name(dtype)),
            _rounds(partial(_seconds, optimizer.step, device)),
        )


def _rounds(one_round: Callable[[], float]) -> list[float]:
    """Return the seconds of several rounds, after one that loads kernels."""
    one_round()
    seconds: list[float] = []
    while sum(seconds) < (_SECONDS_MAX if len(seconds) < _ROUNDS else _SECONDS):
        seconds.append(one_round())
    return seconds


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
