"""Restricted reader of the ``.metadata`` of a checkpoint, which runs nothing from the file.

``.metadata`` is a pickle, and a pickle is a program: stock readers call every function that it
names. Here Python's own unpickler runs it, restricted to the instructions of plain values and to
the names that ``torch.distributed.checkpoint`` writes; then one pass checks the fields of every
object.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import PurePosixPath, PureWindowsPath
from types import FunctionType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from tierstore.errors import CorruptionError

_DIMENSIONS_MAX = 64
_HASHABLE = (str, int, float, bool, bytes, NoneType)

# Class -> its fields and their exact types (a bool is not an int), as torch declares them, or
# narrower. A field that may be None may also be absent.
_FIELDS: dict[type, dict[str, Any]] = {
    kind: get_type_hints(kind)
    for kind in (
        *(dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, _StorageInfo),
        *(dcp.TensorStorageMetadata, dcp.TensorProperties, dcp.ChunkStorageMetadata),
        dcp.BytesStorageMetadata,
    )
}
_FIELDS[dcp.Metadata]["storage_data"] = dict[dcp.MetadataIndex, _StorageInfo]
_FIELDS[dcp.StorageMeta]["checkpoint_id"] = str | PurePosixPath | PureWindowsPath | None
_FIELDS[dcp.StorageMeta]["modules"] = list[str] | None  # Older versions of torch have none.
# Of Megatron: shapes of tensors that it saves flattened. Only some versions of torch keep it.
_FIELDS[dcp.Metadata]["mcore_data"] = dict[str, Any] | None
_FIELDS[_StorageInfo]["transform_descriptors"] = list[str] | tuple[str, ...] | None


def read_metadata(data: bytes, where: str) -> dcp.Metadata:
    """Return the ``Metadata`` in the ``.metadata`` of a checkpoint.

    Every tensor has a dtype, a size and chunks of as many dimensions, every storage entry a path
    and a range of bytes. It is not checked that these fit the files.

    Args:
        data: the content of the file.
        where: the name of the file in errors.

    Raises:
        CorruptionError: it is damaged, or has content that is not in a stock checkpoint.
    """
    try:
        unpickler = _Unpickler(io.BytesIO(data), encoding="utf-8")
        value: dcp.Metadata = unpickler.load()
        _expect(type(value) is dcp.Metadata, "does not hold the metadata of a checkpoint")
        for made in unpickler.made:
            _check_object(made)
        return value
    except _RefusedError as error:
        raise CorruptionError(f"{where} {error}; nothing of it was used") from None
    except Exception as error:  # pickle does not document which errors damage leads to.
        raise CorruptionError(f"{where} is damaged: it is not a whole pickle") from error


class _RefusedError(Exception):
    """The bytes ask for something that no stock checkpoint does; the message follows a name."""


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _RefusedError(otherwise)


def _check_object(made: Any) -> None:
    """Check the fields of an object whose class is in _FIELDS."""
    name, fields, found = type(made).__name__, _FIELDS[type(made)], vars(made)
    _expect(bool(found) or not fields, f"leaves a {name} without its fields")
    for field in fields.keys() | found.keys():
        fits = field in fields and _fits(found.get(field), fields[field])
        _expect(fits, f"holds a {name} with a strange field {field!r:.80}")
    if type(made) is dcp.TensorStorageMetadata:
        fits = all(len(c.offsets) == len(c.sizes) == len(made.size) for c in made.chunks)
        _expect(fits, "holds a tensor with chunks of other dimensions")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value and all items in it have exactly a type of _FIELDS."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(kind))
    if kind is Any or type(value) is not (get_origin(kind) or kind):
        return kind is Any
    columns = (value, value.values()) if type(value) is dict else (value,)
    kinds = zip(get_args(kind), columns, strict=False)
    return all(_fits(item, item_kind) for item_kind, items in kinds for item in items)


def _check_keys(keys: list[Any]) -> None:
    """Refuse keys whose hash may recurse without end, such as tuples in tuples."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if type(key) is dcp.MetadataIndex:
            parts = tuple(part for part in vars(key).values() if type(part) is not Size)
        _expect(all(type(part) in _HASHABLE for part in parts), "has a key of a strange kind")


def _taking(kind: type, function: Any) -> Any:
    """Restrict a function to arguments of exactly this type: a path of paths could double."""

    def checked(*arguments: Any) -> Any:
        _expect(all(type(argument) is kind for argument in arguments), "calls with a strange value")
        return function(*arguments)

    return checked


def _size(numbers: Any) -> Size:
    fits = type(numbers) is tuple and len(numbers) <= _DIMENSIONS_MAX
    fits = fits and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    _expect(fits, f"holds a size that is not a tuple of up to {_DIMENSIONS_MAX} sizes")
    return Size(numbers)


_memory_format = _taking(int, lambda value: dcp._MEM_FORMAT_ENCODING(value))


def _named_memory_format(kind: Any, name: Any) -> Any:
    _expect(kind is _memory_format and type(name) is str, "asks for an attribute of something")
    return dcp._MEM_FORMAT_ENCODING[name]


# The names that are allowed in a pickle: values, classes, which are never called, and functions.
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # Before torch 2.3.
_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): it for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
    **{(kind.__module__, kind.__name__): kind for kind in _FIELDS},
    (_OLD, "TensorProperties"): dcp.TensorProperties,
    (dcp.__name__, "_MEM_FORMAT_ENCODING"): _memory_format,
    (_OLD, "MEM_FORMAT_ENCODING"): _memory_format,
    # Early releases of Python 3.11 pickle a member of an enum as getattr(class, name).
    ("builtins", "getattr"): _named_memory_format,
    ("__builtin__", "getattr"): _named_memory_format,  # Pickle protocol 2.
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _taking(str, _get_layout),
    ("collections", "OrderedDict"): lambda: OrderedDict(),  # Its items follow one by one.
    ("pathlib", "PosixPath"): _taking(str, PurePosixPath),
    ("pathlib", "WindowsPath"): _taking(str, PureWindowsPath),
    ("pathlib._local", "PosixPath"): _taking(str, PurePosixPath),  # As Python 3.13 calls them.
    ("pathlib._local", "WindowsPath"): _taking(str, PureWindowsPath),
}

# The instructions of pickle that make plain values and these objects.
_INSTRUCTIONS = """
    PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
    GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD
"""
# The unpickler in C allocates memory up to any index in the file; this one, in Python, does not.
_Stock: Any = pickle._Unpickler


class _Unpickler(_Stock):  # type: ignore[misc]
    """Python's unpickler, with checks of the values that an instruction is about to use."""

    # Decoded strictly, like the text of Python 2: the text of Python 3 may contain halves of
    # characters, which cannot be printed or be part of a path.
    load_short_binunicode = _Stock.load_short_binstring
    load_binunicode = _Stock.load_binstring

    def load(self) -> Any:
        self.made: list[Any] = []
        value = super().load()
        _expect(not self.stack and not self.metastack, "makes more than one value")
        return value

    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _NAMES
        _expect(known, f"names {module}.{name}, which is not in a stock checkpoint")
        return _NAMES[module, name]

    def load_newobj(self) -> None:
        kind, arguments = self.stack[-2:]
        _expect(type(kind) is type and arguments == (), "makes an object of something strange")
        super().load_newobj()
        self.made.append(self.stack[-1])

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        fits = type(function) is FunctionType and type(arguments) is tuple
        _expect(fits, "calls something that no stock checkpoint does")
        super().load_reduce()

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        fresh = type(target) in _FIELDS and not vars(target)
        _expect(fresh, "changes something that was made already")
        # Not a pair of dicts: the items of the second would be set with setattr().
        fits = type(state) is (tuple if type(target) is dcp.TensorProperties else dict)
        _expect(fits, f"makes a {type(target).__name__} of something strange")
        super().load_build()

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.load_mark()
        self.stack += key, value
        self.load_setitems()

    def load_setitems(self) -> None:
        target = self.metastack[-1][-1]
        _expect(type(target) in (dict, OrderedDict), "gives items to a value that is not a dict")
        _check_keys(self.stack[::2])
        count = len(target) + len(self.stack) // 2
        super().load_setitems()
        _expect(len(target) == count, "has a key twice")

    def load_additems(self) -> None:
        _check_keys(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        _check_keys(self.stack)
        super().load_frozenset()


_CODES = [getattr(pickle, name)[0] for name in _INSTRUCTIONS.split()]
_Unpickler.dispatch = {code: getattr(_Unpickler, _Stock.dispatch[code].__name__) for code in _CODES}
