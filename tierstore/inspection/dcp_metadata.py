"""Reads the ``.metadata`` of a checkpoint without running anything that is in it.

``.metadata`` is a pickle, and a pickle is a program: stock readers call whatever it names.
Here Python's own unpickler runs it, with only the instructions that plain values are made of
and only the names that ``torch.distributed.checkpoint`` itself puts there; an object gets its
fields once, after a look at their types. It is the unpickler that is written in Python: its
memory is in proportion to the bytes, where the one in C believes any index that they hold.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import PurePosixPath, PureWindowsPath
from types import FunctionType, NoneType
from typing import Any, get_args

import torch
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from tierstore.errors import CorruptionError

_DIMENSIONS_MAX = 64
_PLAIN = (str, int, float, bool, bytes, NoneType)

# Class -> its fields and their types, exactly: a bool is no int. Any is for anything; what may
# be None may be left out, too.
_FIELDS: dict[type, dict[str, Any]] = {
    dcp.Metadata: {
        "state_dict_metadata": dict,
        "planner_data": Any,
        "storage_data": dict,
        "storage_meta": dcp.StorageMeta | None,
        "version": str | None,
    },
    dcp.MetadataIndex: {"fqn": str, "offset": Size | None, "index": int | None},
    dcp.TensorStorageMetadata: {"properties": dcp.TensorProperties, "size": Size, "chunks": list},
    dcp.TensorProperties: {},  # Come as a tuple: see load_build().
    dcp.ChunkStorageMetadata: {"offsets": Size, "sizes": Size},
    dcp.BytesStorageMetadata: {},
    dcp.StorageMeta: {
        "checkpoint_id": str | PurePosixPath | PureWindowsPath | None,
        "save_id": str | None,
        "load_id": str | None,
        "modules": list | None,
    },
    _StorageInfo: {
        "relative_path": str,
        "offset": int,
        "length": int,
        "transform_descriptors": list | tuple | None,
    },
}
_PROPERTIES = (torch.dtype, torch.layout, bool, dcp._MEM_FORMAT_ENCODING, bool)


def read_metadata(data: bytes, where: str) -> dcp.Metadata:
    """Return the ``Metadata`` that a checkpoint's ``.metadata`` holds.

    Each tensor has a dtype, a size and chunks of as many dimensions, each storage entry a
    path and a range of bytes. Whether these fit each other and the files is not looked at.

    Args:
        data: the content of the file.
        where: what errors call the file.

    Raises:
        CorruptionError: it is damaged, or holds what no stock checkpoint does.
    """
    try:
        return _check(_Unpickler(io.BytesIO(data), encoding="utf-8").load())
    except _RefusedError as error:
        raise CorruptionError(f"{where} {error}; nothing of it was used") from None
    except Exception as error:  # Which ones damage leads to, pickle does not say.
        raise CorruptionError(f"{where} is damaged: it is no whole pickle") from error


class _RefusedError(Exception):
    """What the bytes ask for is not in a stock checkpoint; the message goes on from a name."""


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _RefusedError(otherwise)


def _check(value: Any) -> dcp.Metadata:
    """Look at what the lists and dicts of a checkpoint's metadata hold."""
    if type(value) is not dcp.Metadata:
        raise _RefusedError("does not hold the metadata of a checkpoint")
    for key, item in value.state_dict_metadata.items():
        _expect(type(key) is str, "has a key that is not text")
        if type(item) is not dcp.BytesStorageMetadata and (
            type(item) is not dcp.TensorStorageMetadata
            or not all(type(chunk) is dcp.ChunkStorageMetadata for chunk in item.chunks)
            or not all(len(c.offsets) == len(c.sizes) == len(item.size) for c in item.chunks)
        ):
            raise _RefusedError(f"says of {key!r} neither what tensor nor what object it is")
    for index, info in value.storage_data.items():
        fits = type(index) is dcp.MetadataIndex and type(info) is _StorageInfo
        fits = fits and all(type(name) is str for name in info.transform_descriptors or ())
        _expect(fits, "has an entry that does not say where something is stored")
    return value


def _check_keys(keys: list[Any]) -> None:
    """Refuse what cannot be hashed at once: tuples in tuples could go on without end."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        plain = all(type(part) in _PLAIN for part in parts)
        made = type(key) is dcp.MetadataIndex and bool(vars(key))
        _expect(plain or made, "has a key of a strange kind")


def _taking(kind: type, function: Any) -> Any:
    """Return the function for arguments of exactly this type: a path of paths could double."""

    def checked(*arguments: Any) -> Any:
        _expect(all(type(argument) is kind for argument in arguments), "calls with a strange value")
        return function(*arguments)

    return checked


def _size(numbers: Any) -> Size:
    fits = type(numbers) is tuple and len(numbers) <= _DIMENSIONS_MAX
    fits = fits and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    _expect(fits, f"holds a size that is no tuple of up to {_DIMENSIONS_MAX} sizes")
    return Size(numbers)


_memory_format = _taking(int, lambda value: dcp._MEM_FORMAT_ENCODING(value))


def _named_memory_format(kind: Any, name: Any) -> Any:
    _expect(kind is _memory_format and type(name) is str, "asks for an attribute of something")
    return dcp._MEM_FORMAT_ENCODING[name]


# What a pickle may name: values, classes, which are never called, and functions, which are.
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

# Those of pickle's instructions that plain values and these objects are made of.
_INSTRUCTIONS = """
    PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
    GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD
"""
_Stock: Any = pickle._Unpickler


class _Unpickler(_Stock):  # type: ignore[misc]
    """Python's unpickler, with a look at what an instruction is to work on."""

    # As Python 2's text, which is decoded strictly: today's may hold halves of characters,
    # which could be neither printed nor part of a path.
    load_short_binunicode = _Stock.load_short_binstring
    load_binunicode = _Stock.load_binstring

    def load(self) -> Any:
        self.made: list[Any] = []
        value = super().load()
        whole = all(vars(it) or type(it) is dcp.BytesStorageMetadata for it in self.made)
        _expect(whole, "leaves an object without its fields")
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
        fields = _FIELDS.get(type(target))
        if fields is None or vars(target):
            raise _RefusedError("changes something that was made already")
        if type(target) is dcp.TensorProperties:
            fits = type(state) is tuple and tuple(map(type, state)) == _PROPERTIES
        elif fits := type(state) is dict and state.keys() <= fields.keys():
            for name, kind in fields.items():
                kinds = get_args(kind) or (kind,)
                fits = fits and (kind is Any or type(state.get(name)) in kinds)
        _expect(fits, f"holds a {type(target).__name__} with a strange field")
        super().load_build()

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.load_mark()
        self.stack += key, value
        self.load_setitems()

    def load_setitems(self) -> None:
        target = self.metastack[-1][-1]
        _expect(type(target) in (dict, OrderedDict), "gives items to something that is no dict")
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
