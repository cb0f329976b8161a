"""Values of a commit in the types that ``torch.load(weights_only=True)`` makes again.

A commit keeps each value as it was; the copies for readers without tierstore are of Python's
and torch's own types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Of longer ones a pickle holds another form, which torch does not read.
_INT_BITS_MAX = 2000


def portable(value: Any) -> Any:
    """Return a value that tagged.decode() made, with other types where torch reads none.

    Numpy's scalars become Python's, its arrays of numbers tensors and others lists, times
    text, and ints of more than 2000 bits hexadecimal text.
    """
    if isinstance(value, dict):  # An OrderedDict or a Counter stays one.
        return type(value)({portable(key): portable(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map(portable, value))
    if isinstance(value, np.generic):
        return _python_scalar(value)
    if isinstance(value, np.ndarray):
        return _tensor_or_list(value)
    if type(value) is int and value.bit_length() > _INT_BITS_MAX:
        return hex(value)
    return value


def _python_scalar(scalar: np.generic) -> Any:
    convert = {"f": float, "c": complex, "m": str, "M": str}.get(scalar.dtype.kind)
    return scalar.item() if convert is None else convert(scalar)


def _tensor_or_list(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind in "mM":
        array = array.astype(str)
    if array.dtype.kind in "SU":
        return array.tolist()
    # Torch has neither another byte order nor longer floats than these.
    wider = {"f": np.float64, "c": np.complex128}.get(array.dtype.kind)
    if wider is not None and array.dtype.itemsize > np.dtype(wider).itemsize:
        array = array.astype(wider)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
