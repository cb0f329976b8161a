"""Native CPU kernels of encodings: one pass over memory, with the same bits as torch's operations.

Tensors must pass fit(), and have one shape and the dtypes of ``tierstore.layout.encodings``.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch

logger = logging.getLogger("tierstore")

_THREAD_NUMEL = 1 << 16
"""Elements for which one more thread is worthwhile."""


def fit(*tensors: torch.Tensor) -> bool:
    """Return whether kernels exist for these tensors.

    False for subclasses, because they may have no memory of their own, and for freed tensors.
    """
    return _kernels() is not None and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
        for tensor in tensors
    )


def decode_split(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the masters of a bfloat16 parameter and a remainder of int16 or int8."""
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    _of_bits("decode_split", remainder)(
        parameter.data_ptr(),
        remainder.data_ptr(),
        values.data_ptr(),
        values.numel(),
        _threads(values),
    )
    return values


def encode_split(values: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Split float32 masters into a parameter and a remainder."""
    _of_bits("encode_split", remainder)(
        values.data_ptr(),
        parameter.data_ptr(),
        remainder.data_ptr(),
        values.numel(),
        _threads(values),
    )
    torch.autograd.graph.increment_version(parameter)


def decode_blocks(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values of fourth powers with a scale for each block of columns.

    Args:
        numbers: int8 or uint8, shape (..., columns).
        scales: float32, shape (..., blocks).
    """
    values = torch.empty(numbers.shape, dtype=torch.float32, device="cpu")
    decode = getattr(_kernels(), f"decode_{_name_of(numbers)}")
    decode(numbers.data_ptr(), scales.data_ptr(), values.data_ptr(), *_sizes(values))
    return values


def encode_blocks(
    values: torch.Tensor,
    chances: torch.Tensor | None,
    numbers: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Encode float32 values with random chances; see decode_blocks()."""
    getattr(_kernels(), f"encode_{_name_of(numbers)}")(
        values.data_ptr(),
        0 if chances is None else chances.data_ptr(),
        numbers.data_ptr(),
        scales.data_ptr(),
        *_sizes(values),
    )


@functools.cache
def _kernels() -> Any:
    """Return the native module; None if the processor lacks AVX2 or the module is not built."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        from tierstore.layout import _encodings
    except ImportError as error:
        logger.warning("states in fewer bytes take more passes over memory: %s", error)
        return None
    return _encodings


def _of_bits(name: str, remainder: torch.Tensor) -> Any:
    return getattr(_kernels(), f"{name}_{8 * remainder.itemsize}")


def _name_of(numbers: torch.Tensor) -> str:
    return "int8" if numbers.dtype == torch.int8 else "uint8"


def _sizes(values: torch.Tensor) -> tuple[int, int, int]:
    """Return rows, columns and threads."""
    *rows, columns = values.shape
    return math.prod(rows), columns, _threads(values)


def _threads(values: torch.Tensor) -> int:
    return min(torch.get_num_threads(), 1 + values.numel() // _THREAD_NUMEL)
