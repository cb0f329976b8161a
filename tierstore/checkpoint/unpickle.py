"""Reads the ``.metadata`` of a checkpoint without running anything that is in it.

``.metadata`` is a pickle, and a pickle is a program: stock readers call whatever it names.
This one knows the instructions that plain values are made of, and the few classes that
``torch.distributed.checkpoint`` itself puts there. It builds those field by field, after a
look at each type, and refuses everything else. It calls no other code, whatever the bytes
are, and takes time and memory in proportion to their number.

The format: Python's pickle protocols 2 to 5, as Lib/pickletools.py describes them.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstore.errors import CorruptionError

_DIMENSIONS_MAX = 64
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_PLAIN = (str, int, float, bool, bytes, type(None))


def read_metadata(data: bytes, where: str) -> Metadata:
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
        return _check(_Machine(data).run())
    except _RefusedError as error:
        raise CorruptionError(f"{where} {error}; nothing of it was used") from None
    except (
        *(IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError),
        *(struct.error, MemoryError, RuntimeError),
    ) as error:
        raise CorruptionError(f"{where} is damaged: it is no whole pickle") from error


class _RefusedError(Exception):
    """What the bytes ask for is not in a stock checkpoint; the message goes on from a name."""


def _size(numbers: Any) -> torch.Size:
    if type(numbers) is not tuple or len(numbers) > _DIMENSIONS_MAX:
        raise _RefusedError(f"holds a size that is no tuple of up to {_DIMENSIONS_MAX} numbers")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise _RefusedError("holds a size with something else than sizes in it")
    return torch.Size(numbers)


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        raise _RefusedError("holds an unknown memory layout")
    return _LAYOUTS[name]


def _memory_format(value: Any) -> _MEM_FORMAT_ENCODING:
    return _MEM_FORMAT_ENCODING(value)


def _named_memory_format(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    if kind is not _MEMORY_FORMAT or type(name) is not str:
        raise _RefusedError("asks for an attribute of something")
    return _MEM_FORMAT_ENCODING[name]


def _posix_path(*parts: Any) -> PurePosixPath:
    return PurePosixPath(*map(_text, parts))


def _windows_path(*parts: Any) -> PureWindowsPath:
    return PureWindowsPath(*map(_text, parts))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _RefusedError("holds a path that is not made of text")
    return value


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()  # Its items follow one by one; a copy of another could grow.


class _Function(NamedTuple):
    """Stands on the stack for a function of a pickle; called with what the pickle gives."""

    call: Callable[..., Any]


class _Class(NamedTuple):
    """Stands on the stack for a class whose objects are made empty, then given fields."""

    kind: type
    fields: dict[str, tuple[type, ...]]
    """Name -> types; one that may be None may be left out, too."""

    @property
    def required(self) -> set[str]:
        """The fields without which an object is not whole."""
        return {name for name, kinds in self.fields.items() if _NONE not in kinds}


_NONE = type(None)
_MEMORY_FORMAT = _Function(_memory_format)
_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # Before torch 2.3.
_PROPERTIES = _Class(TensorProperties, {})  # Its fields come as a tuple, see _build().
_ANYTHING = (object, _NONE)

_GLOBALS: dict[tuple[str, str], _Function | _Class] = {
    ("torch", "Size"): _Function(_size),
    ("torch.serialization", "_get_layout"): _Function(_layout),
    ("collections", "OrderedDict"): _Function(_ordered_dict),
    ("pathlib", "PosixPath"): _Function(_posix_path),
    ("pathlib", "WindowsPath"): _Function(_windows_path),
    ("pathlib._local", "PosixPath"): _Function(_posix_path),  # As Python 3.13 calls them.
    ("pathlib._local", "WindowsPath"): _Function(_windows_path),
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    # Early releases of Python 3.11 pickle a member of an enum as getattr(class, name).
    ("builtins", "getattr"): _Function(_named_memory_format),
    (_METADATA, "TensorProperties"): _PROPERTIES,
    (_OLD_METADATA, "TensorProperties"): _PROPERTIES,
    (_METADATA, "Metadata"): _Class(
        Metadata,
        {
            "state_dict_metadata": (dict,),
            "planner_data": _ANYTHING,
            "storage_data": (dict,),
            "storage_meta": (StorageMeta, _NONE),
            "version": (str, _NONE),
        },
    ),
    (_METADATA, "MetadataIndex"): _Class(
        MetadataIndex,
        {"fqn": (str,), "offset": (torch.Size, _NONE), "index": (int, _NONE)},
    ),
    (_METADATA, "TensorStorageMetadata"): _Class(
        TensorStorageMetadata,
        {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    ),
    (_METADATA, "ChunkStorageMetadata"): _Class(
        ChunkStorageMetadata, {"offsets": (torch.Size,), "sizes": (torch.Size,)}
    ),
    (_METADATA, "BytesStorageMetadata"): _Class(BytesStorageMetadata, {}),
    (_METADATA, "StorageMeta"): _Class(
        StorageMeta,
        {
            "checkpoint_id": (str, PurePosixPath, PureWindowsPath, _NONE),
            "save_id": (str, _NONE),
            "load_id": (str, _NONE),
            "modules": (list, _NONE),
        },
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Class(
        _StorageInfo,
        {
            "relative_path": (str,),
            "offset": (int,),
            "length": (int,),
            "transform_descriptors": (list, tuple, _NONE),
        },
    ),
}


_CLASSES = {entry.kind: entry for entry in _GLOBALS.values() if isinstance(entry, _Class)}


def _global(module: str, name: str) -> Any:
    if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return vars(torch)[name]
    if (module, name) not in _GLOBALS:
        raise _RefusedError(f"names {module}.{name}, which is not in a stock checkpoint")
    return _GLOBALS[module, name]


def _build(target: Any, state: Any) -> None:
    """Give an empty object its fields, of the types that its class has."""
    described = _CLASSES.get(type(target))
    if described is None or vars(target):
        raise _RefusedError("changes something that was made already")
    if described is _PROPERTIES:
        expected = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
        if type(state) is not tuple or tuple(map(type, state)) != expected:
            raise _RefusedError("holds properties of a tensor that are of other types")
        target.__setstate__(state)
        return
    if type(state) is not dict or not described.required <= state.keys():
        raise _RefusedError(f"holds a {type(target).__name__} that is not whole")
    for name, value in state.items():
        # Types exactly: a bool would pass for an int.
        kinds = described.fields.get(name, ())
        if kinds is not _ANYTHING and type(value) not in kinds:
            raise _RefusedError(f"holds a {type(target).__name__} with a strange field")
    vars(target).update(state)


def _check(value: Any) -> Metadata:
    """Look at what the lists and dicts of a checkpoint's metadata hold."""
    if type(value) is not Metadata:
        raise _RefusedError("does not hold the metadata of a checkpoint")
    for key, item in value.state_dict_metadata.items():
        if type(key) is not str:
            raise _RefusedError("has a key that is not text")
        if type(item) is BytesStorageMetadata:
            continue
        if type(item) is not TensorStorageMetadata or not all(
            type(chunk) is ChunkStorageMetadata
            and len(chunk.offsets) == len(chunk.sizes) == len(item.size)
            for chunk in item.chunks
        ):
            raise _RefusedError(f"says of {key!r} neither what tensor nor what object it is")
    for index, info in value.storage_data.items():
        if (
            type(index) is not MetadataIndex
            or type(info) is not _StorageInfo
            or not all(type(name) is str for name in info.transform_descriptors or ())
        ):
            raise _RefusedError("has an entry that does not say where something is stored")
    return value


def _checked_key(key: Any) -> Any:
    """Return a key of a dict or member of a set, which can be hashed at once."""
    if type(key) is MetadataIndex:
        if "fqn" in vars(key):
            return key
    elif type(key) in _PLAIN or (type(key) is tuple and all(type(k) in _PLAIN for k in key)):
        return key
    raise _RefusedError("has a key of a strange kind")


class _Machine:
    """The stack machine that a pickle is a program of, with a small set of instructions."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._made: list[Any] = []

    def run(self) -> Any:
        """Return the value that the pickle makes."""
        while True:
            opcode = self._data[self._position]
            self._position += 1
            if opcode == pickle.STOP[0]:
                (value,) = self._stack
                if not all(vars(made) or type(made) is BytesStorageMetadata for made in self._made):
                    raise _RefusedError("leaves an object without its fields")
                return value
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise _RefusedError(
                    f"has the instruction {opcode:#04x} at byte {self._position - 1}"
                )
            handler(self)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        end = self._position + nbytes
        if end > len(self._data):
            raise IndexError
        piece = self._data[self._position : end]
        self._position = end
        return piece

    def number(self, code: str) -> Any:
        """Return the next number, in the form that the struct module calls ``code``."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def line(self) -> str:
        """Return the text before the next newline."""
        end = self._data.index(b"\n", self._position)
        return self.take(end + 1 - self._position)[:-1].decode()

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the last value off, which lies above the last mark."""
        if self._marks and self._marks[-1] == len(self._stack):
            raise IndexError
        return self._stack.pop()

    def mark(self) -> None:
        """Remember the height of the stack."""
        self._marks.append(len(self._stack))

    def items(self) -> list[Any]:
        """Take everything above the last mark off."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def memoize(self, index: int) -> None:
        """Remember the last value under a number."""
        self._memo[index] = self._stack[-1]

    def memoize_next(self) -> None:
        """Remember the last value under the next number."""
        self.memoize(len(self._memo))

    def recall(self, index: int) -> None:
        """Put a remembered value on the stack."""
        self._stack.append(self._memo[index])

    def tuple_of(self, count: int) -> None:
        """Make a tuple of the last values."""
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def append(self, items: list[Any]) -> None:
        """Add to the list below."""
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add to the dict below."""
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if _checked_key(key) in target:
                raise _RefusedError("has a key twice")
            target[key] = value

    def add_items(self) -> None:
        """Add to the set below."""
        items = self.items()
        target = self._stack[-1]
        if type(target) is not set:
            raise TypeError
        target.update(map(_checked_key, items))

    def find_global(self) -> None:
        """Replace the name of a module and a name in it by what stands for it."""
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError
        self.push(_global(module, name))

    def make(self) -> None:
        """Make an empty object of a class; what it is made of comes later."""
        arguments, kind = self.pop(), self.pop()
        if type(kind) is not _Class or arguments != ():
            raise _RefusedError("makes an object in a way that no stock checkpoint does")
        self._made.append(object.__new__(kind.kind))
        self.push(self._made[-1])

    def call(self) -> None:
        """Call what stands for a function."""
        arguments, function = self.pop(), self.pop()
        if type(function) is not _Function or type(arguments) is not tuple:
            raise _RefusedError("calls something that no stock checkpoint does")
        self.push(function.call(*arguments))

    def build(self) -> None:
        """Give the object below its fields."""
        state = self.pop()
        _build(self._stack[-1], state)


def _push_of(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(value)


def _push_number(code: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.number(code))


def _push_text(length: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.take(machine.number(length)).decode())


def _push_bytes(length: str) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.take(machine.number(length)))


def _set_item(machine: _Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: lambda machine: machine.take(1),
    pickle.FRAME: lambda machine: machine.take(8),
    pickle.NONE: _push_of(None),
    pickle.NEWTRUE: _push_of(True),
    pickle.NEWFALSE: _push_of(False),
    pickle.BININT: _push_number("<i"),
    pickle.BININT1: _push_number("<B"),
    pickle.BININT2: _push_number("<H"),
    pickle.LONG1: lambda machine: machine.push(
        int.from_bytes(machine.take(machine.number("<B")), "little", signed=True)
    ),
    pickle.BINFLOAT: _push_number(">d"),
    pickle.SHORT_BINUNICODE: _push_text("<B"),
    pickle.BINUNICODE: _push_text("<I"),
    pickle.BINUNICODE8: _push_text("<Q"),
    pickle.SHORT_BINBYTES: _push_bytes("<B"),
    pickle.BINBYTES: _push_bytes("<I"),
    pickle.BINBYTES8: _push_bytes("<Q"),
    pickle.MARK: _Machine.mark,
    pickle.POP: _Machine.pop,
    pickle.POP_MARK: _Machine.items,
    pickle.EMPTY_TUPLE: _push_of(()),
    pickle.TUPLE1: lambda machine: machine.tuple_of(1),
    pickle.TUPLE2: lambda machine: machine.tuple_of(2),
    pickle.TUPLE3: lambda machine: machine.tuple_of(3),
    pickle.TUPLE: lambda machine: machine.push(tuple(machine.items())),
    pickle.EMPTY_LIST: lambda machine: machine.push([]),
    pickle.APPEND: lambda machine: machine.append([machine.pop()]),
    pickle.APPENDS: lambda machine: machine.append(machine.items()),
    pickle.EMPTY_DICT: lambda machine: machine.push({}),
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: lambda machine: machine.set_items(machine.items()),
    pickle.EMPTY_SET: lambda machine: machine.push(set()),
    pickle.ADDITEMS: _Machine.add_items,
    pickle.FROZENSET: lambda machine: machine.push(frozenset(map(_checked_key, machine.items()))),
    pickle.MEMOIZE: _Machine.memoize_next,
    pickle.BINPUT: lambda machine: machine.memoize(machine.number("<B")),
    pickle.LONG_BINPUT: lambda machine: machine.memoize(machine.number("<I")),
    pickle.BINGET: lambda machine: machine.recall(machine.number("<B")),
    pickle.LONG_BINGET: lambda machine: machine.recall(machine.number("<I")),
    pickle.GLOBAL: lambda machine: machine.push(_global(machine.line(), machine.line())),
    pickle.STACK_GLOBAL: _Machine.find_global,
    pickle.NEWOBJ: _Machine.make,
    pickle.REDUCE: _Machine.call,
    pickle.BUILD: _Machine.build,
}
_HANDLERS = {opcode[0]: handler for opcode, handler in _INSTRUCTIONS.items()}
