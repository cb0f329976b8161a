"""Tagged JSON: Python values as readable JSON that loads back unchanged.

Values that JSON can express stay plain; any other value is an object with one key that begins with
"$" and names the kind, for example ``{"$tuple": [0.9, 0.95]}``. Loading builds values of these
kinds and runs no code.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from tierstore.run.sealed import is_count, require
from tierstore.units import format_bytes

DEPTH_MAX = 100
"""Most levels of nesting, fewer than Python's JSON supports. The limit also refuses a list that
contains itself."""

LIMIT_BYTES = 64 * 2**20
"""Most bytes in tensors, arrays, bytes and text together. Every commit writes them again, and a
restart reads the whole manifest."""

_ALLOWED = (
    "None, bool, int below 2**512, float, str, bytes, list, tuple, dict, OrderedDict, Counter, "
    "torch.dtype, plain dense torch tensors, numpy arrays and scalars of numbers"
)
_INT_BITS_MAX = 512  # Python's JSON refuses ints of several thousand digits.
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d+")


def encode(value: object, name: str = "extra", limit_bytes: int = LIMIT_BYTES) -> Any:
    """Return ``value`` in a form that ``json.dumps(..., allow_nan=False)`` accepts.

    Only values are kept. Tensors come back on the CPU, contiguous and without history. An
    OrderedDict loses attributes that were set on it. An object in two places comes back as two
    objects. NaN loses the sign and payload of its bits.

    Args:
        value: None, bool, int below 2**512, float, str, bytes, torch.dtype, plain dense tensors
            of any dtype that is not quantized, numpy arrays and scalars of numbers, and
            list, tuple, dict, OrderedDict, Counter of these. A dict key may be any of these that
            has a hash, except a tensor. Subclasses are refused.
        name: names ``value`` in errors.
        limit_bytes: most bytes that tensors, arrays, bytes and text may hold together.

    Raises:
        TypeError: a value has another type; the message gives its path.
        ValueError: the values have more bytes than the limit or more than DEPTH_MAX levels, or a
            str is not valid Unicode.
    """
    encoder = _Encoder(limit_bytes)
    encoded = encoder.encode(value, name, 0)
    if encoder.nbytes > limit_bytes:
        nbytes, path = encoder.largest
        raise ValueError(
            f"{name} holds {format_bytes(encoder.nbytes)} in tensors, bytes and text, but a commit "
            f"holds at most {format_bytes(limit_bytes)}; the largest is {_text(path)} with "
            f"{format_bytes(nbytes)}: keep large values in other files"
        )
    return encoded


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two encoded values are the same. 1 and True, and orders of a dict, differ."""
    return json.dumps(first) == json.dumps(second)


def decode(obj: Any) -> Any:
    """Return the value that encode() has encoded as ``obj``, before or after conversion to JSON.

    Raises:
        ValueError: a tag is unknown, a payload does not fit its tag, or values have more than
            DEPTH_MAX levels.
    """
    return _decode(obj, 0)


_Path = str | tuple[str, Any, "_Path"]
"""The path of a value: a text; or a format, a key or index, and the outer path.

It is formatted only for an error, because formatting takes longer than encoding.
"""
_ITEM, _KEY = "{path}[{key!r}]", "the key {key!r} of {path}"


def _text(path: _Path) -> str:
    if isinstance(path, str):
        return path
    form, key, around = path
    return form.format(key=key, path=_text(around))


class _Encoder:
    """One call of encode(). It counts bytes as it descends into the value."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.nbytes = 0
        self.largest: tuple[int, _Path] = (-1, "")  # Bytes and path of the largest value.

    def encode(self, value: Any, path: _Path, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError(
                f"{_text(path)} is nested more than {DEPTH_MAX} levels deep, or contains itself"
            )
        cls = type(value)  # The exact class: a subclass would come back as its base.
        if (
            value is None
            or cls is bool
            or (cls is int and value.bit_length() <= _INT_BITS_MAX)
            or (cls is float and math.isfinite(value))
        ):
            return value
        if cls is str:
            return self.text(value, path)
        if cls is list:
            return self.items(value, path, depth)
        if cls is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {
                self.text(key, (_KEY, key, path)): self.encode(item, (_ITEM, key, path), depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, np.generic) and cls is value.dtype.type:
            cls = np.generic
        if cls not in _KIND_OF_TYPE:
            module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
            raise _refusal(path, f"a {module}{cls.__qualname__}")
        kind = _KIND_OF_TYPE[cls]
        return {kind.tag: kind.encode(self, value, path, depth)}

    def items(self, values: list[Any] | tuple[Any, ...], path: _Path, depth: int) -> list[Any]:
        return [self.encode(item, (_ITEM, i, path), depth + 1) for i, item in enumerate(values)]

    def pairs(self, values: dict[Any, Any], path: _Path, depth: int) -> list[list[Any]]:
        pairs = []
        for key, item in values.items():
            if isinstance(key, torch.Tensor):  # Equal only to itself: a loaded key would not match.
                raise _refusal(f"a key of {_text(path)}", "a tensor")
            encoded = self.encode(key, (_KEY, key, path), depth + 1)
            pairs.append([encoded, self.encode(item, (_ITEM, key, path), depth + 1)])
        return pairs

    def tensor(self, tensor: torch.Tensor, path: _Path, _depth: int) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise _refusal(path, "a tensor that is sparse, nested or quantized")
        if tensor.is_meta:
            raise _refusal(path, "a tensor on the meta device, without data")

        def data() -> bytes:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            # With one element any stride counts as contiguous, but the view needs stride 1.
            flat = plain.as_strided((plain.numel(),), (1,))
            return flat.view(torch.uint8).numpy().tobytes()

        return {
            "dtype": _dtype_text(tensor.dtype),
            "shape": list(tensor.shape),
            "data": self.base64(path, tensor.numel() * tensor.dtype.itemsize, data),
        }

    def array(self, array: np.ndarray[Any, Any], path: _Path, _depth: int) -> dict[str, Any]:
        return {
            "dtype": _numpy_dtype_text(array.dtype, path),
            "shape": list(array.shape),
            "data": self.base64(path, array.nbytes, array.tobytes),
        }

    def scalar(self, scalar: np.generic, path: _Path, _depth: int) -> dict[str, Any]:
        return {
            "dtype": _numpy_dtype_text(scalar.dtype, path),
            "data": self.base64(path, scalar.dtype.itemsize, scalar.tobytes),
        }

    def text(self, text: str, path: _Path) -> str:
        """Count the bytes of a text after checking that it is valid Unicode."""
        self._count(path, _checked_nbytes(text, path))
        return text

    def base64(self, path: _Path, nbytes: int, data: Callable[[], bytes]) -> str:
        """Count the bytes. Encode them unless the count exceeds the limit."""
        self._count(path, nbytes)
        return base64.b64encode(data()).decode() if self.nbytes <= self._limit_bytes else ""

    def _count(self, path: _Path, nbytes: int) -> None:
        self.nbytes += nbytes
        if nbytes > self.largest[0]:
            self.largest = (nbytes, path)


def _refusal(path: _Path, what: str) -> TypeError:
    return TypeError(f"{_text(path)} is {what}, which a commit cannot hold; allowed are {_ALLOWED}")


def _checked_nbytes(text: str, path: _Path) -> int:
    """Return the number of bytes of a text, or raise ValueError if it is not valid Unicode."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{_text(path)} is not valid Unicode: {error}") from None


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numpy_dtype_text(dtype: np.dtype[Any], path: _Path) -> str:
    if _NUMPY_DTYPE.fullmatch(dtype.str) is None:
        raise _refusal(path, f"a numpy value of dtype {dtype}")
    return dtype.str


def _decode(obj: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"values are nested more than {DEPTH_MAX} levels")
    if isinstance(obj, list):
        return [_decode(item, depth + 1) for item in obj]
    if not isinstance(obj, dict):
        return obj
    if not any(key.startswith("$") for key in obj):
        return {key: _decode(item, depth + 1) for key, item in obj.items()}
    ((tag, payload),) = obj.items()  # A ValueError if the tag is not the only key.
    if tag not in _KIND_OF_TAG:
        raise ValueError(f"unknown tag {tag!r}; a later version may have written it")
    try:
        return _KIND_OF_TAG[tag].decode(payload, depth)
    except (TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{payload!r:.80} is not a payload of {tag!r}: {error}") from error


def _decode_pairs(payload: Any, depth: int) -> dict[Any, Any]:
    values = {}
    for pair in _list(payload):
        key, value = (_decode(item, depth + 1) for item in _list(pair))
        require(not isinstance(key, torch.Tensor), key not in values)
        values[key] = value
    return values


def _decode_tensor(*, dtype: str, shape: Any, data: str) -> torch.Tensor:
    tensor_dtype, shape = _TORCH_DTYPES[dtype], _shape(shape)
    content = _content(data, math.prod(shape) * tensor_dtype.itemsize)
    tensor = torch.empty(shape, dtype=tensor_dtype, device="cpu")
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(content, np.uint8)
    return tensor


def _decode_array(*, dtype: str, shape: Any, data: str) -> np.ndarray[Any, Any]:
    array_dtype, shape = _numpy_dtype(dtype), _shape(shape)
    content = _content(data, math.prod(shape) * array_dtype.itemsize)
    return np.ndarray(shape, array_dtype, bytearray(content))


def _decode_scalar(*, dtype: str, data: str) -> np.generic:
    scalar_dtype = _numpy_dtype(dtype)
    content = _content(data, scalar_dtype.itemsize)
    scalar: np.generic = np.frombuffer(content, scalar_dtype)[0]
    return scalar


def _list(payload: Any) -> list[Any]:
    require(isinstance(payload, list))
    return cast(list[Any], payload)


def _shape(payload: Any) -> tuple[int, ...]:
    require(*map(is_count, _list(payload)))
    return tuple(payload)


def _content(data: str, nbytes: int) -> bytes:
    content = base64.b64decode(data, validate=True)
    require(len(content) == nbytes)
    return content


def _numpy_dtype(text: str) -> np.dtype[Any]:
    if _NUMPY_DTYPE.fullmatch(text) is None:  # Bytes of an array of objects would be addresses.
        raise ValueError(f"a numpy dtype of numbers is expected, got {text!r:.80}")
    return np.dtype(text)


class _Kind(NamedTuple):
    """A tag, the type of its values, and the functions that write and read them."""

    tag: str
    type: type
    encode: Callable[[_Encoder, Any, _Path, int], Any]
    """(encoder, value, path, depth) -> payload."""
    decode: Callable[[Any, int], Any]
    """(payload, depth) -> value. _decode() converts the errors of a bad payload to ValueError."""


_TORCH_DTYPES = {
    _dtype_text(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_KINDS = (
    _Kind("$float", float, lambda _, v, *__: str(v), lambda p, _: float(p)),
    _Kind(
        "$bytes",
        bytes,
        lambda encoder, v, path, _: encoder.base64(path, len(v), lambda: v),
        lambda p, _: base64.b64decode(p, validate=True),
    ),
    _Kind("$tuple", tuple, _Encoder.items, lambda p, depth: tuple(_decode(_list(p), depth))),
    _Kind("$dict", dict, _Encoder.pairs, _decode_pairs),
    _Kind("$ordered_dict", OrderedDict, _Encoder.pairs, lambda *p: OrderedDict(_decode_pairs(*p))),
    _Kind("$counter", Counter, _Encoder.pairs, lambda *p: Counter(_decode_pairs(*p))),
    _Kind("$dtype", torch.dtype, lambda _, v, *__: _dtype_text(v), lambda p, _: _TORCH_DTYPES[p]),
    _Kind("$tensor", torch.Tensor, _Encoder.tensor, lambda p, _: _decode_tensor(**p)),
    _Kind("$array", np.ndarray, _Encoder.array, lambda p, _: _decode_array(**p)),
    _Kind("$scalar", np.generic, _Encoder.scalar, lambda p, _: _decode_scalar(**p)),
)
_KIND_OF_TYPE = {kind.type: kind for kind in _KINDS}
_KIND_OF_TAG = {kind.tag: kind for kind in _KINDS}
