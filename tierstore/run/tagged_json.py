"""Tagged values: Python values as JSON that a person can read and that loads back unchanged.

What JSON can say for itself stays plain. Anything else is an object with one key that
begins with "$" and names the kind, for example ``{"$tuple": [0.9, 0.95]}``. A dict becomes a
JSON object where its keys are strings that cannot be taken for a kind, and otherwise
``{"$dict": [[key, value], ...]}``. Loading builds values of these kinds and runs nothing.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tierstore.units import format_bytes

DEPTH_MAX = 100
"""How deeply values may lie inside each other: fewer levels than Python's JSON can take,
and an end to a list that contains itself."""

LIMIT_BYTES = 64 * 2**20
"""How much tensors, arrays and bytes may hold together: a commit writes them each time."""

_ALLOWED = (
    "None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.dtype, "
    "torch.Size, plain dense torch tensors, numpy arrays and scalars (no objects, no fields)"
)
_PLAIN_INT_BITS = 512  # Python's JSON refuses ints of several thousand digits.
_NUMPY_DTYPE = re.compile(r"[<>|][biufcSUmM]\d+(\[\w+\])?")
_QUANTIZED = re.compile(r"qu?int\d")
_TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def encode(value: object, name: str = "extra", limit_bytes: int = LIMIT_BYTES) -> Any:
    """Return ``value`` as what ``json.dumps(..., allow_nan=False)`` takes.

    The values alone are kept: tensors come back on the CPU, contiguous and without history,
    an OrderedDict without attributes set on it, one object in two places as two.

    Args:
        value: None, bool, int, float, str, bytes, torch.dtype, torch.Size, plain dense tensors
            of any dtype that is not quantized, numpy arrays and scalars without objects or
            fields, and list, tuple, dict, OrderedDict, Counter of these. A key of a dict may
            be any of these that has a hash, except a tensor. Subclasses are refused.
        name: what errors call ``value``.
        limit_bytes: most bytes that tensors, arrays and bytes may hold together.

    Raises:
        TypeError: a value of any other type; the message says where it is.
        ValueError: more bytes than the limit, a str that is not valid Unicode, or values
            more than DEPTH_MAX levels inside each other.
    """
    encoder = _Encoder(limit_bytes)
    encoded = encoder.encode(value, name, 0)
    if encoder.nbytes > limit_bytes:
        raise ValueError(
            f"{name} holds {format_bytes(encoder.nbytes)} in tensors and bytes, of which a commit "
            f"carries at most {format_bytes(limit_bytes)}; the largest is {encoder.largest_path} "
            f"with {format_bytes(encoder.largest_nbytes)}: keep large values in files of their own"
        )
    return encoded


def decode(obj: object) -> Any:
    """Return the value of which encode() made ``obj``, or what ``json.loads`` made of that.

    Raises:
        ValueError: an unknown tag, or a payload that is not of its tag's form.
    """
    return _decode(obj, 0)


class _Encoder:
    """One call of encode(): the way down the value, and the bytes met on it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.nbytes = 0
        self.largest_path = ""
        self.largest_nbytes = -1

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise ValueError(f"{path} lies more than {DEPTH_MAX} levels deep, or contains itself")
        kind = type(value)  # Exactly: a subclass would come back as its base.
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if value.bit_length() <= _PLAIN_INT_BITS else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _float_text(value)}
        if kind is str:
            return _checked_text(value, path)
        if kind is bytes:
            return {"$bytes": self._base64(path, len(value), lambda: value)}
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind is dict and _is_plain(value):
            return {
                _checked_text(key, f"the key {key!r} of {path}"): self.encode(
                    item, f"{path}[{key!r}]", depth + 1
                )
                for key, item in value.items()
            }
        if kind in _MAPPING_KINDS:
            return {_MAPPING_KINDS[kind]: self._pairs(value, path, depth)}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.Size:
            return {"$size": list(value)}
        if kind is torch.Tensor:
            return {"$tensor": self._tensor(value, path)}
        if kind is np.ndarray:
            return {"$array": self._array(value, path)}
        if isinstance(value, np.generic) and kind is value.dtype.type:
            return {"$scalar": self._scalar(value, path)}
        raise _refusal(path, f"a {_type_name(kind)}")

    def _items(self, values: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(values)]

    def _pairs(self, values: dict[Any, Any], path: str, depth: int) -> list[list[Any]]:
        pairs = []
        for key, item in values.items():
            if isinstance(key, torch.Tensor):  # Equal to itself alone, so no use once loaded.
                raise _refusal(f"a key of {path}", "a tensor")
            encoded = self.encode(key, f"the key {key!r} of {path}", depth + 1)
            pairs.append([encoded, self.encode(item, f"{path}[{key!r}]", depth + 1)])
        return pairs

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise _refusal(path, "a tensor that is sparse, nested or quantized")
        if tensor.is_meta:
            raise _refusal(path, "a tensor on the meta device, without data")

        def data() -> bytes:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            # With one element any stride counts as contiguous, but not for the view.
            flat = plain.as_strided((plain.numel(),), (1,))
            return flat.view(torch.uint8).numpy().tobytes()

        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": self._base64(path, tensor.numel() * tensor.dtype.itemsize, data),
        }

    def _array(self, array: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        return {
            "dtype": _numpy_dtype_text(array.dtype, path),
            "shape": list(array.shape),
            "data": self._base64(path, array.nbytes, array.tobytes),
        }

    def _scalar(self, scalar: np.generic, path: str) -> dict[str, Any]:
        dtype = _numpy_dtype_text(scalar.dtype, path)
        if isinstance(scalar, np.str_):
            _checked_text(str(scalar), path)
        nbytes = scalar.dtype.itemsize  # An empty np.str_ gives out four bytes all the same.
        return {
            "dtype": dtype,
            "data": self._base64(path, nbytes, lambda: scalar.tobytes()[:nbytes]),
        }

    def _base64(self, path: str, nbytes: int, data: Callable[[], bytes]) -> str:
        """Count the bytes, and encode them unless the limit has been passed already."""
        self.nbytes += nbytes
        if nbytes > self.largest_nbytes:
            self.largest_path, self.largest_nbytes = path, nbytes
        return base64.b64encode(data()).decode() if self.nbytes <= self._limit_bytes else ""


_MAPPING_KINDS: Mapping[type, str] = {
    dict: "$dict",
    OrderedDict: "$ordered_dict",
    Counter: "$counter",
}


def _is_plain(value: dict[Any, Any]) -> bool:
    """Return whether a dict can be a JSON object that nobody takes for a tag."""
    return all(type(key) is str and not key.startswith("$") for key in value)


def _refusal(path: str, what: str) -> TypeError:
    return TypeError(f"{path} is {what}, which a commit cannot carry; allowed are {_ALLOWED}")


def _type_name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} is not valid Unicode: {error}") from None
    return text


def _float_text(value: float) -> str:
    """Return the name of a float that JSON has no number for; its bits if it is an odd NaN."""
    bits = struct.pack(">d", value)
    return str(value) if bits == struct.pack(">d", float(str(value))) else bits.hex()


def _numpy_dtype_text(dtype: np.dtype[Any], path: str) -> str:
    if _NUMPY_DTYPE.fullmatch(dtype.str) is None:
        raise _refusal(path, f"a numpy value of dtype {dtype}")
    return dtype.str


def _decode(obj: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError(f"values lie more than {DEPTH_MAX} levels inside each other")
    if obj is None or isinstance(obj, bool | int):
        return obj
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise ValueError(f"{obj} is not a JSON number")
        return obj
    if isinstance(obj, str):
        return _checked_text(obj, "a string")
    if isinstance(obj, list):
        return _decode_items(obj, depth)
    if not isinstance(obj, dict):
        raise ValueError(f"JSON has no {_type_name(type(obj))}")
    if all(isinstance(key, str) and not key.startswith("$") for key in obj):
        return {_checked_text(key, "a key"): _decode(item, depth + 1) for key, item in obj.items()}
    if len(obj) != 1:
        raise ValueError(f"a tag must be the only key, got {list(obj)}")
    ((tag, payload),) = obj.items()
    if tag in _NESTED:
        return _NESTED[tag](payload, depth)
    if tag in _LEAVES:
        return _LEAVES[tag](payload)
    raise ValueError(f"unknown tag {tag!r}; a later version may have written it")


def _decode_items(payload: Any, depth: int) -> list[Any]:
    if not isinstance(payload, list):
        raise ValueError(f"a sequence must be a list, got {payload!r:.80}")
    return [_decode(item, depth + 1) for item in payload]


def _decode_tuple(payload: Any, depth: int) -> tuple[Any, ...]:
    return tuple(_decode_items(payload, depth))


def _decode_dict(payload: Any, depth: int) -> dict[Any, Any]:
    if not isinstance(payload, list):
        raise ValueError(f"the pairs of a dict must be a list, got {payload!r:.80}")
    values = {}
    for pair in payload:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"an entry of a dict must be a [key, value] pair, got {pair!r:.80}")
        key, value = (_decode(item, depth + 1) for item in pair)
        if isinstance(key, torch.Tensor):
            raise ValueError("a tensor is no key of a dict")
        try:
            values[key] = value
        except TypeError as error:
            raise ValueError(f"a key of a dict cannot be one: {error}") from None
    if len(values) != len(payload):
        raise ValueError("a dict has a key twice")
    return values


def _decode_int(payload: Any) -> int:
    value = int(_text(payload, r"-?0x[0-9a-f]+"), 16)
    if hex(value) != payload or value.bit_length() <= _PLAIN_INT_BITS:
        raise ValueError(f"{payload:.80} is not how an int is written")
    return value


def _decode_float(payload: Any) -> float:
    text = _text(payload, r"-?inf|nan|[0-9a-f]{16}")
    value: float = struct.unpack(">d", bytes.fromhex(text))[0] if len(text) == 16 else float(text)
    if math.isfinite(value) or _float_text(value) != text:
        raise ValueError(f"{text} is not how a float is written")
    return value


def _decode_dtype(payload: Any) -> torch.dtype:
    if not isinstance(payload, str) or payload not in _TORCH_DTYPES:
        raise ValueError(f"unknown torch dtype {payload!r:.80}")
    return _TORCH_DTYPES[payload]


def _decode_size(payload: Any) -> torch.Size:
    return torch.Size(_shape(payload))


def _decode_tensor(payload: Any) -> torch.Tensor:
    fields = _fields(payload, "dtype", "shape", "data")
    dtype, shape = _decode_dtype(fields["dtype"]), _shape(fields["shape"])
    data = _data(fields["data"], math.prod(shape) * dtype.itemsize)
    if _QUANTIZED.match(fields["dtype"]):
        raise ValueError(f"a tensor of quantized dtype {dtype} is more than its data")
    try:
        tensor = torch.empty(shape, dtype=dtype)
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    except RuntimeError as error:  # Strides that overflow.
        raise ValueError(f"no tensor of {dtype} {list(shape)} can be made: {error}") from None
    return tensor


def _decode_array(payload: Any) -> np.ndarray[Any, Any]:
    fields = _fields(payload, "dtype", "shape", "data")
    dtype, shape = _numpy_dtype(fields["dtype"]), _shape(fields["shape"])
    data = _data(fields["data"], math.prod(shape) * dtype.itemsize)
    return np.ndarray(shape, dtype, bytearray(data))


def _decode_scalar(payload: Any) -> np.generic:
    fields = _fields(payload, "dtype", "data")
    dtype = _numpy_dtype(fields["dtype"])
    data = _data(fields["data"], dtype.itemsize)
    if dtype.kind == "U":  # An array would drop zeros at the end.
        return np.str_(data.decode("utf-32-le"))
    if dtype.kind == "S":
        return np.bytes_(data)
    scalar: np.generic = np.frombuffer(data, dtype)[0]
    return scalar


def _decode_bytes(payload: Any) -> bytes:
    if not isinstance(payload, str):
        raise ValueError(f"base64 is expected, got {payload!r:.80}")
    return base64.b64decode(payload, validate=True)


def _text(payload: Any, pattern: str) -> str:
    if not isinstance(payload, str) or re.fullmatch(pattern, payload) is None:
        raise ValueError(f"text of the form {pattern} is expected, got {payload!r:.80}")
    return payload


def _fields(payload: Any, *names: str) -> dict[str, Any]:
    if not isinstance(payload, dict) or set(payload) != set(names):
        raise ValueError(f"the fields {', '.join(names)} are expected, got {payload!r:.80}")
    return payload


def _shape(payload: Any) -> tuple[int, ...]:
    if not isinstance(payload, list) or not all(
        type(size) is int and 0 <= size < 2**63 for size in payload
    ):
        raise ValueError(f"a shape must be a list of sizes, got {payload!r:.80}")
    return tuple(payload)


def _data(payload: Any, nbytes: int) -> bytes:
    data = _decode_bytes(payload)
    if len(data) != nbytes:
        raise ValueError(f"{nbytes} bytes of data are expected, got {len(data)}")
    return data


def _numpy_dtype(payload: Any) -> np.dtype[Any]:
    text = _text(payload, _NUMPY_DTYPE.pattern)
    try:
        dtype: np.dtype[Any] = np.dtype(text)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"unknown numpy dtype {text!r:.80}") from None
    if dtype.str != text:
        raise ValueError(f"{text!r:.80} is not how a numpy dtype is written")
    return dtype


_NESTED: Mapping[str, Callable[[Any, int], Any]] = {
    "$tuple": _decode_tuple,
    "$dict": _decode_dict,
    "$ordered_dict": lambda payload, depth: OrderedDict(_decode_dict(payload, depth)),
    "$counter": lambda payload, depth: Counter(_decode_dict(payload, depth)),
}
_LEAVES: Mapping[str, Callable[[Any], Any]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$bytes": _decode_bytes,
    "$dtype": _decode_dtype,
    "$size": _decode_size,
    "$tensor": _decode_tensor,
    "$array": _decode_array,
    "$scalar": _decode_scalar,
}
