"""Reader of pickles that runs no code from them, for ``.metadata`` and files of torch.save.

A pickle is a program: stock readers call every function that it names. Here Python's own unpickler
is restricted to the instructions of plain values and to the names in the tables below. Memory and
time are proportional to the size of the pickle.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath, PureWindowsPath
from types import NoneType, UnionType
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints

import torch
from torch import Size
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from tierstore.errors import CorruptionError

_DIMENSIONS_MAX = 64
_HASHABLE = (str, int, float, bool, bytes, NoneType)
_KEY_PARTS_MAX = 64
_KEY_BITS_MAX = 64
_NAME_CHARS_MAX = 1000
_IDENTITY_MAX = 16
_COPIED_MIN = 10**5


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: a strided view of the elements of one storage."""

    offset: int
    """Byte offset of the first element in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides, in elements."""
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Python attributes that were saved with the tensor."""


@dataclass(slots=True, eq=False)
class Unread:
    """Stand-in for an object whose class is not read."""

    name: str
    """The module and name of the class."""
    arguments: Any = field(default=(), repr=False)
    """The arguments of the call that would make the object."""
    state: Any = field(default=None, repr=False)
    """The attributes of the object."""

    def get(self, key: str) -> Any:
        """Return an attribute; None if the file has no attribute of this name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


Storages = Mapping[str, tuple[int, int]]
"""Name of a storage of tensors -> its first byte in the file, and its bytes."""


def load_pickle(
    stream: BinaryIO,
    nbytes: int,
    *,
    stand_ins: bool,
    storages: Storages | None = None,
    opcodes_max: int | None = None,
) -> Any:
    """Return the value of a pickle. Its tensors become StoredTensor.

    Args:
        stream: the pickle.
        nbytes: its size.
        stand_ins: whether all objects become Unread. Otherwise objects of the classes of
            ``torch.distributed.checkpoint`` (DCP) are made without a call, their fields are
            checked, and other objects are refused.
        storages: the storages of the file.
        opcodes_max: most instructions of the pickle. Each may make an object of about 100 bytes.
            None: one instruction in each byte.

    Raises:
        CorruptionError: the pickle is damaged, or names something that is refused; the message
            follows the name of the file.
    """
    try:
        return _Unpickler(stream, nbytes, stand_ins, storages or {}, opcodes_max or nbytes).load()
    except CorruptionError:
        raise
    except Exception as error:  # pickle does not document the errors that damage causes.
        fault = f"is damaged: it is not a whole pickle ({type(error).__name__})"
        raise CorruptionError(fault) from error


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CorruptionError(otherwise)


# ------------------------------------------------------------------- the names that are allowed

# DCP class -> its fields and their exact types (a bool is not an int). The types are as torch
# declares them, or narrower. A field that may be None may also be absent.
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
_FIELDS[dcp.StorageMeta]["modules"] = list[str] | None  # Absent in older versions of torch.
# From Megatron: shapes of tensors that it saves flattened. Only some versions of torch keep it.
_FIELDS[dcp.Metadata]["mcore_data"] = dict[str, Any] | None
_FIELDS[_StorageInfo]["transform_descriptors"] = list[str] | tuple[str, ...] | None

_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # Before torch 2.3.

_CLASSES = {f"{kind.__module__}.{kind.__name__}": kind for kind in _FIELDS}
_CLASSES[f"{_OLD}.TensorProperties"] = dcp.TensorProperties
_DTYPES = {f"torch.{name}": it for name, it in vars(torch).items() if type(it) is torch.dtype}

_STORAGES = {
    f"torch.{prefix}Storage": dtype
    for prefix, dtype in {
        **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16},
        **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32},
        **{"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
        **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
    }.items()
}


class _Named:
    """Stand-in for a class or a function that a pickle names. It can only be called."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of the archive."""

    start: int
    nbytes: int
    dtype: torch.dtype | None


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: torch.dtype | None
) -> StoredTensor:
    """Return a view of a storage, after checking that the view lies within the storage."""
    dtype = dtype or storage.dtype
    numbers = (offset, *shape, *strides)
    fits = type(storage) is _Storage and type(dtype) is torch.dtype
    fits = fits and len(shape) == len(strides) <= _DIMENSIONS_MAX
    fits = fits and all(type(number) is int and 0 <= number < 2**62 for number in numbers)
    _expect(fits, "has a tensor that is not one")
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    fits = not all(shape) or (last + 1) * dtype.itemsize <= storage.nbytes
    _expect(fits, "has a tensor that does not lie within its storage")
    start = storage.start + offset * dtype.itemsize
    return StoredTensor(start, dtype, tuple(shape), tuple(strides))


def _rebuilt(
    dtype: torch.dtype | None, storage: Any, offset: Any, shape: Any, strides: Any, rest: Any
) -> StoredTensor:
    """Return a tensor. ``rest`` has the arguments of the call after requires_grad and hooks."""
    for bits in rest:
        if not isinstance(bits, dict) or any(bits.get(bit) for bit in ("conj", "neg")):
            raise CorruptionError(
                "has a tensor whose elements are to be conjugated or negated as they are read: "
                "save tensor.resolve_conj().resolve_neg()"
            )
    return _tensor(storage, offset, shape, strides, dtype)


def _device(kind: Any, index: Any = None) -> str:
    fits = type(kind) is str and len(kind) <= _NAME_CHARS_MAX and type(index) in (int, NoneType)
    _expect(fits, "has a device that is not one")
    return kind if index is None else f"{kind}:{index}"


def _set(items: Any = ()) -> set[Any]:
    _expect(all(map(_is_hashable, items)), "has a set of a strange kind")
    return set(items)


def _size(numbers: Any = ()) -> Size:
    fits = type(numbers) is tuple and len(numbers) <= _DIMENSIONS_MAX
    fits = fits and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    _expect(fits, f"holds a size that is not a tuple of up to {_DIMENSIONS_MAX} sizes")
    return Size(numbers)


def _taking(kind: type, function: Any) -> Any:
    """Restrict a function to arguments of exactly this type. A path of paths could double."""

    def checked(*arguments: Any) -> Any:
        _expect(all(type(argument) is kind for argument in arguments), "calls with a strange value")
        return function(*arguments)

    return checked


_memory_format = _taking(int, lambda value: dcp._MEM_FORMAT_ENCODING(value))


def _attribute(kind: Any, name: Any) -> Any:
    """Return a member of an enum: early releases of Python 3.11 pickle getattr(class, name)."""
    is_format = type(kind) is _Named and _MAKERS.get(kind.name) is _memory_format
    if not is_format or type(name) is not str:
        return Unread("builtins.getattr", (kind, name))
    return dcp._MEM_FORMAT_ENCODING[name]


# Functions that a pickle may call: name -> the function that is called instead.
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": (
        lambda s, o, n, t, g=False, h=None, *rest: _rebuilt(None, s, o, n, t, rest)
    ),
    "torch._utils._rebuild_tensor_v3": (
        lambda s, o, n, t, g, h, d, *rest: _rebuilt(d, s, o, n, t, rest)
    ),
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _taking(str, _get_layout),
    f"{dcp.__name__}._MEM_FORMAT_ENCODING": _memory_format,
    f"{_OLD}.MEM_FORMAT_ENCODING": _memory_format,
    "collections.OrderedDict": lambda: OrderedDict(),  # Its items follow one by one.
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),
    # Pickle protocol 2 says __builtin__.
    **{f"{module}.set": _set for module in ("builtins", "__builtin__")},
    **{f"{module}.getattr": _attribute for module in ("builtins", "__builtin__")},
    # Python 3.13 says pathlib._local.
    **{f"{m}.PosixPath": _taking(str, PurePosixPath) for m in ("pathlib", "pathlib._local")},
    **{f"{m}.WindowsPath": _taking(str, PureWindowsPath) for m in ("pathlib", "pathlib._local")},
}

_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"

# Pickle instructions that make plain values and these objects, except for 4 GiB and more.
_INSTRUCTIONS = """
    PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET
    NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES
    EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS
    EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET
    GLOBAL STACK_GLOBAL NEWOBJ NEWOBJ_EX REDUCE BUILD BINPERSID
"""

# ----------------------------------------------------------------------- values that are checked


def _is_hashable(item: Any) -> bool:
    """Return whether hashing the item always takes constant time."""
    return type(item) in _HASHABLE and (type(item) is not int or item.bit_length() <= _KEY_BITS_MAX)


def _check_keys(keys: Sequence[Any]) -> None:
    """Refuse keys whose hash may recurse or repeatedly take long, such as tuples in tuples."""
    for key in keys:
        parts = key if type(key) is tuple else (key,)
        if type(key) is dcp.MetadataIndex:
            parts = tuple(part for part in vars(key).values() if type(part) is not Size)
        fits = len(parts) <= _KEY_PARTS_MAX and all(map(_is_hashable, parts))
        _expect(fits, "has a key of a strange kind")


def _check_object(made: Any) -> None:
    """Check the fields of an object whose class is in _FIELDS."""
    name, fields, found = type(made).__name__, _FIELDS[type(made)], vars(made)
    _expect(bool(found) or not fields, f"leaves a {name} without its fields")
    for key in fields.keys() | found.keys():
        fits = key in fields and _fits(found.get(key), fields[key])
        _expect(fits, f"holds a {name} with a strange field {key!r:.80}")
    if type(made) is dcp.TensorStorageMetadata:
        fits = all(len(c.offsets) == len(c.sizes) == len(made.size) for c in made.chunks)
        _expect(fits, "holds a tensor with chunks of other dimensions")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value and all its items have exactly this type of _FIELDS."""
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, choice) for choice in get_args(kind))
    if kind is Any or type(value) is not (get_origin(kind) or kind):
        return kind is Any
    columns = (value, value.values()) if type(value) is dict else (value,)
    kinds = zip(get_args(kind), columns, strict=False)
    return all(_fits(item, item_kind) for item_kind, items in kinds for item in items)


# The unpickler in C allocates memory up to any index in the file. The one in Python does not.
_Stock: Any = pickle._Unpickler


class _Unpickler(_Stock):  # type: ignore[misc]
    """Python's unpickler, with checks of the values that each instruction uses."""

    # Decode strictly, as for text of Python 2. Text of Python 3 may contain surrogates, which
    # cannot be printed or be part of a path.
    load_short_binunicode = _Stock.load_short_binstring
    load_binunicode = _Stock.load_binstring

    def __init__(
        self, stream: BinaryIO, nbytes: int, stand_ins: bool, storages: Storages, opcodes_max: int
    ) -> None:
        super().__init__(stream, encoding="utf-8")
        self._stand_ins = stand_ins
        self._storages = storages
        self.opcodes_left = opcodes_max
        self._copied = 0
        self._copied_max = max(nbytes, _COPIED_MIN)
        self._made: list[Any] = []

    def load(self) -> Any:
        value = super().load()
        _expect(not self.stack and not self.metastack, "makes more than one value")
        for made in self._made:
            # Many objects may share one long list.
            fields = vars(made).values()
            self._count_copied(one for one in fields if type(one) in (dict, list, tuple))
            _check_object(made)
        return value

    def find_class(self, module: str, name: str) -> Any:
        _expect(len(module) + len(name) <= _NAME_CHARS_MAX, "has a class with a long name")
        full = f"{module}.{name}"
        if full in _DTYPES:
            return _DTYPES[full]
        if full in _CLASSES and not self._stand_ins:
            return _CLASSES[full]
        known = full in _MAKERS or self._stand_ins
        _expect(known, f"names {full}, which is not in a stock checkpoint")
        return _Named(full)

    def persistent_load(self, identity: Any) -> Any:
        kind, storage, key = identity[:3]
        fits = type(identity) is tuple and len(identity) <= _IDENTITY_MAX and kind == "storage"
        fits = fits and type(storage) is _Named and type(key) is str
        _expect(fits, "is damaged: it has a storage that is not one")
        return _Storage(*self._storages[key], _STORAGES.get(storage.name))

    def _make(self, function: Any, arguments: Any) -> Any:
        fits = type(function) is _Named and type(arguments) is tuple
        _expect(fits, "calls something that no stock checkpoint does")
        # A pickle may name the items of one argument repeatedly, and most functions copy them.
        self._count_copied([arguments])
        self._count_copied(arguments)
        if function.name == _WITH_ATTRIBUTES:
            return self._with_attributes(*arguments)
        if function.name not in _MAKERS:
            return Unread(function.name, arguments)
        made = _MAKERS[function.name](*arguments)
        _expect(self._stand_ins or type(made) is not Unread, "asks for an attribute of something")
        return made

    def _with_attributes(self, maker: Any, _: Any, inner: Any, state: Any) -> Any:
        """Return a tensor with its attributes. The local tensor of a DTensor is an attribute."""
        made = self._make(maker, inner)
        if type(state) is tuple and len(state) == 2:  # The state of an object with slots.
            self._count_copied(state)
            state = {**(state[0] or {}), **(state[1] or {})}
        if type(made) is Unread:
            made.state = state
            return made
        return replace(made, attributes=state) if type(state) is dict else made

    def _count_copied(self, values: Any) -> None:
        """Count the items of values that are copied or walked.

        Raises:
            CorruptionError: the items are more than the bytes of the pickle.
        """
        sized = (str, bytes, list, tuple, dict)
        self._copied += sum(len(one) for one in values if isinstance(one, sized))
        _expect(
            self._copied <= self._copied_max,
            "has arguments of functions that are larger than itself",
        )

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack[-1]
        if type(kind) is _Named and kind.name not in _MAKERS:
            self.stack[-1] = self._make(kind, arguments)
            return
        _expect(type(kind) is type and arguments == (), "makes an object of something strange")
        self.stack[-1] = kind.__new__(kind)
        self._made.append(self.stack[-1])

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        _expect(self._stand_ins or not keywords, "makes an object of something strange")
        self.load_newobj()

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        if type(target) in _FIELDS:
            _expect(not vars(target), "changes something that was made already")
            # Refuse a pair of dicts: the items of the second would be set with setattr().
            fits = type(state) is (tuple if type(target) is dcp.TensorProperties else dict)
            _expect(fits, f"makes a {type(target).__name__} of something strange")
            self._count_copied([state])
            super().load_build()
            return
        # An OrderedDict may have attributes, such as the versions of a state dict.
        kinds = (Unread, OrderedDict, StoredTensor)
        _expect(type(target) in kinds, "changes something that was made already")
        self.stack.pop()
        if type(target) is Unread:
            target.state = state

    def _takes_items(self, *kinds: type) -> bool:
        """Return whether the value on the stack is of these kinds. An Unread takes no items."""
        kind, name = type(self.stack[-1]), kinds[0].__name__
        _expect(kind in (*kinds, Unread), f"gives items to a value that is not a {name}")
        return kind is not Unread

    def load_append(self) -> None:
        value = self.stack.pop()
        if self._takes_items(list):
            self.stack[-1].append(value)

    def load_appends(self) -> None:
        items = self.pop_mark()
        if self._takes_items(list):
            self.stack[-1].extend(items)

    def load_additems(self) -> None:
        items = self.pop_mark()
        _check_keys(items)
        if self._takes_items(set):
            self.stack[-1].update(items)

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        _check_keys(items)
        self.append(frozenset(items))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        _check_keys(keys)
        if not self._takes_items(dict, OrderedDict):
            return
        for key, value in zip(keys, items[1::2], strict=True):
            _expect(key not in target, f"has the key {key!r:.80} twice")
            target[key] = value


def _refuse(unpickler: _Unpickler) -> None:
    raise CorruptionError("is damaged: it has an instruction of pickle that torch never writes")


def _counted(load: Callable[[_Unpickler], None]) -> Callable[[_Unpickler], None]:
    """Return the function of an instruction with a counter of instructions."""

    def counting(unpickler: _Unpickler) -> None:
        unpickler.opcodes_left -= 1
        if unpickler.opcodes_left < 0:
            raise CorruptionError("has many more values than tensors")
        load(unpickler)

    return counting


_CODES = [getattr(pickle, name)[0] for name in _INSTRUCTIONS.split()]
_Unpickler.dispatch = dict.fromkeys(range(256), _refuse) | {
    code: _counted(getattr(_Unpickler, _Stock.dispatch[code].__name__)) for code in _CODES
}
