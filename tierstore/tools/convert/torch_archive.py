"""Reading of files that torch.save wrote, without running anything of them.

A file is a zip archive with a pickle and the raw elements of storages. The pickle is run by a
restricted unpickler: tensors become places in the file, and objects of unknown classes become
inert stand-ins.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from typing_extensions import override

from tierstore.errors import CorruptionError
from tierstore.inspection.archive_members import member_start
from tierstore.inspection.reader import File, Reader
from tierstore.storage.checks import WHOLE_FILE_BYTES_MAX
from tierstore.units import format_bytes

_READ_BYTES = 2**20
_HASHABLE = (str, int, float, bool, bytes, type(None))
_NAME_CHARS_MAX = 1000
_KEY_PARTS_MAX = 64
_IDENTITY_MAX = 16
_COPIED_MIN = 10**5
_SHARED_MIN = 10**5
_OPCODES_MIN = 4 * 10**6
_OPCODES_PER_STORAGE = 500
"""A tensor takes about 30, a DTensor 130; each may make an object of about 100 bytes."""
_DTYPES = {key: value for key, value in vars(torch).items() if type(value) is torch.dtype}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: a strided view of the elements of one storage."""

    offset: int
    """The byte of the file at which its first element is."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Python attributes that were saved with it."""


@dataclass(slots=True, eq=False)
class Unread:
    """Stands for an object of a class that is not read."""

    name: str
    """The module and name of the class."""
    arguments: Any = field(default=(), repr=False)
    """The arguments of what would make it."""
    state: Any = field(default=None, repr=False)
    """Its attributes."""

    def get(self, key: str) -> Any:
        """Return an attribute; None if the file has none of this name."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of the archive."""

    start: int
    nbytes: int
    dtype: torch.dtype | None


def read_torch_file(reader: Reader, name: str) -> Any:
    """Return what a file holds: plain values, StoredTensor and Unread.

    The checksums of tensors are left to Reader.compare_checksums().

    Args:
        reader: of the directory.
        name: the file.

    Raises:
        CorruptionError: it is damaged, or not a file of torch.save.
        CheckpointError, OSError: as in Reader.open().
    """
    try:
        with reader.open(name) as file:
            return _read_whole(file, compare=False)
    except CorruptionError as error:
        raise CorruptionError(f"{reader.root / name}: {error}") from error


class _Memory(File):
    """A file that was read as a whole."""

    def __init__(self, data: bytes) -> None:
        self.reader = Reader(Path())
        self.name = ""
        self.nbytes = len(data)
        self._data = data

    @override
    def stream(self) -> BinaryIO:
        return io.BytesIO(self._data)

    @override
    def read_into(self, buffer: memoryview, offset: int) -> None:
        found = self._data[offset : offset + len(buffer)]
        if len(found) < len(buffer):
            raise CorruptionError(f"ends at byte {len(self._data)}")
        buffer[:] = found


def read_torch_bytes(data: bytes, where: str) -> Any:
    """Return what the content of a small file of torch.save holds; see read_torch_file().

    Args:
        data: the content.
        where: names it in errors.

    Raises:
        CorruptionError: it is damaged, or not what torch.save writes.
    """
    try:
        return _read_whole(_Memory(data), compare=True)
    except CorruptionError as error:
        raise CorruptionError(f"{where}: {error}") from error


def small_tensor(tensor: StoredTensor, data: bytes) -> torch.Tensor:
    """Return a tensor that read_torch_bytes() found in ``data``, as a tensor of its own."""
    elements = torch.frombuffer(bytearray(data[tensor.offset :]), dtype=torch.uint8)
    size = tensor.dtype.itemsize
    elements = elements[: len(elements) // size * size].view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.strides).clone()


def read_pickle(data: bytes, where: str) -> Any:
    """Return what a pickle of plain values holds; objects of any class become Unread.

    Args:
        data: the pickle.
        where: the name of the file in errors.

    Raises:
        CorruptionError: it is damaged.
    """
    try:
        return _loaded(io.BytesIO(data), len(data), {}, len(data))
    except Exception as error:  # Damage can make a pickle raise anything.
        reason = error if isinstance(error, CorruptionError) else type(error).__name__
        raise CorruptionError(f"{where}: cannot be read: {reason}") from error


def _read_whole(file: File, *, compare: bool) -> Any:
    try:
        return _read(file, compare=compare)
    except CorruptionError:
        raise
    except zipfile.BadZipFile as error:
        raise CorruptionError(
            f"is not what torch.save wrote since version 1.6 ({error}): load it with torch.load "
            "and save it again, if you trust it"
        ) from error
    except Exception as error:  # Damage can make a pickle or an archive raise anything.
        raise CorruptionError(f"cannot be read: {type(error).__name__}") from error


def _read(file: File, *, compare: bool) -> Any:
    """Return what a file holds.

    Args:
        file: the file.
        compare: whether to compare the checksums of tensors, too.
    """
    with file.stream() as stream, zipfile.ZipFile(stream) as archive:
        members = {entry.filename: entry for entry in archive.infolist()}
        if len(members) != len(archive.infolist()):
            raise CorruptionError("has two members of one name")
        pickles = [key for key in members if key.endswith("/data.pkl") or key == "data.pkl"]
        if len(pickles) != 1:
            raise CorruptionError(
                f"is a zip archive with {len(pickles)} members data.pkl, and not one as torch.save "
                "writes: name a file of torch.save"
            )
        (pickled,) = pickles
        prefix = pickled.removesuffix("data.pkl")
        places: dict[str, tuple[int, int]] = {}
        for key, entry in members.items():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise CorruptionError("is compressed, which torch.save never does")
            if key.startswith(f"{prefix}data/"):
                start = member_start(file, entry, 0, file.nbytes)
                places[key.removeprefix(f"{prefix}data/")] = start, entry.file_size
        order, known = members.get(f"{prefix}byteorder"), sys.byteorder.encode()
        if order is not None and (order.file_size != len(known) or archive.read(order) != known):
            raise CorruptionError("has another byte order than this machine")
        has_checksums = any(entry.CRC for entry in members.values())
        for key, entry in members.items() if has_checksums else ():
            if key.startswith(f"{prefix}data/") and not compare:
                start, nbytes = places[key.removeprefix(f"{prefix}data/")]
                file.reader.expect_data(file.name, start, nbytes, entry.CRC)
                continue
            with archive.open(entry) as member:  # Raises BadZipFile if a checksum differs.
                while member.read(_READ_BYTES):
                    pass
        if members[pickled].file_size > WHOLE_FILE_BYTES_MAX:
            raise CorruptionError(f"has a pickle of {format_bytes(members[pickled].file_size)}")
        with archive.open(members[pickled]) as member:
            opcodes_max = _OPCODES_MIN + _OPCODES_PER_STORAGE * len(places)
            return _loaded(member, members[pickled].file_size, places, opcodes_max)


class _Class:
    """A class or function that a pickle names and that is not known."""

    def __init__(self, name: str) -> None:
        self.name = name


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, dtype: torch.dtype | None
) -> StoredTensor:
    """Return a view of a storage, after checking that it lies within."""
    dtype = dtype or storage.dtype
    numbers = (offset, *shape, *strides)
    if (
        type(storage) is not _Storage
        or type(dtype) is not torch.dtype
        or len(shape) != len(strides)
        or len(shape) > 64
        or not all(type(number) is int and 0 <= number < 2**62 for number in numbers)
    ):
        raise CorruptionError("has a tensor that is not one")
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if all(shape) and (last + 1) * dtype.itemsize > storage.nbytes:
        raise CorruptionError("has a tensor that does not lie within its storage")
    start = storage.start + offset * dtype.itemsize
    return StoredTensor(start, dtype, tuple(shape), tuple(strides))


def _rebuilt(
    dtype: torch.dtype | None, storage: Any, offset: Any, shape: Any, strides: Any, rest: Any
) -> StoredTensor:
    """Return a tensor, given what follows requires_grad and hooks in a call, too."""
    for bits in rest:
        if not isinstance(bits, dict) or any(bits.get(bit) for bit in ("conj", "neg")):
            raise CorruptionError(
                "has a tensor whose elements are to be conjugated or negated as they are read: "
                "save tensor.resolve_conj().resolve_neg()"
            )
    return _tensor(storage, offset, shape, strides, dtype)


def _parameter(data: Any, *rest: Any) -> Any:
    return data


def _device(kind: Any, index: Any = None) -> str:
    if type(kind) is not str or len(kind) > _NAME_CHARS_MAX or type(index) not in (int, type(None)):
        raise CorruptionError("has a device that is not one")
    return kind if index is None else f"{kind}:{index}"


def _is_hashable(item: Any) -> bool:
    """Return whether a hash is taken in constant time, also the second time."""
    return type(item) in _HASHABLE and (type(item) is not int or item.bit_length() <= 64)


def _set(items: Any = ()) -> set[Any]:
    if not all(map(_is_hashable, items)):
        raise CorruptionError("has a set of a strange kind")
    return set(items)


# What a pickle may call: function -> what is called instead.
_FUNCTIONS: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": (
        lambda s, o, n, t, g=False, h=None, *rest: _rebuilt(None, s, o, n, t, rest)
    ),
    "torch._utils._rebuild_tensor_v3": (
        lambda s, o, n, t, g, h, d, *rest: _rebuilt(d, s, o, n, t, rest)
    ),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "collections.OrderedDict": lambda: OrderedDict(),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": _device,
    "builtins.set": _set,
    "__builtin__.set": _set,
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),
}

_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"

_STORAGES = {
    f"torch.{prefix}Storage": dtype
    for prefix, dtype in {
        **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16},
        **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32},
        **{"Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool},
        **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
    }.items()
}

# The unpickler in C allocates memory up to any index in the file; this one, in Python, does not.
_Stock: Any = pickle._Unpickler


class _Unpickler(_Stock):  # type: ignore[misc]
    """Python's unpickler without any class or function but those above."""

    def __init__(
        self, stream: Any, nbytes: int, places: Mapping[str, tuple[int, int]], opcodes_max: int
    ) -> None:
        super().__init__(stream, encoding="utf-8")
        self._places = places
        self.opcodes_left = opcodes_max
        self._copied = 0
        self._copied_max = max(nbytes, _COPIED_MIN)

    def find_class(self, module: str, name: str) -> Any:
        if len(module) + len(name) > _NAME_CHARS_MAX:
            raise CorruptionError("has a class with a long name")
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        return _Class(f"{module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        if type(identity) is not tuple or not 3 <= len(identity) <= _IDENTITY_MAX:
            raise CorruptionError("has a storage that is not one")
        kind, storage, key, *_ = identity
        if kind != "storage" or type(storage) is not _Class or type(key) is not str:
            raise CorruptionError("has a storage that is not one")
        start, nbytes = self._places[key]
        return _Storage(start, nbytes, _STORAGES.get(storage.name))

    def get_extension(self, code: int) -> None:
        raise CorruptionError("names a class by number, which torch.save never does")

    def _make(self, function: Any, arguments: Any) -> Any:
        if type(function) is not _Class or type(arguments) is not tuple:
            raise CorruptionError("calls something that is not a function")
        # Items of one argument may be named again and again, and most functions copy them.
        self._count_copied([arguments])
        self._count_copied(arguments)
        known = _FUNCTIONS.get(function.name)
        if function.name == _WITH_ATTRIBUTES:
            maker, _, inner, state = arguments
            made = self._make(maker, inner)
            if type(state) is tuple and len(state) == 2:  # Of objects with slots.
                self._count_copied(state)
                state = {**(state[0] or {}), **(state[1] or {})}
            if type(made) is Unread:  # A DTensor, say, with the local tensor as an attribute.
                made.state = state
                return made
            return replace(made, attributes=state) if type(state) is dict else made
        return Unread(function.name, arguments) if known is None else known(*arguments)

    def _count_copied(self, values: Any) -> None:
        """Count the items of values that are copied.

        Raises:
            CorruptionError: there were more than the pickle has bytes.
        """
        sized = (str, bytes, list, tuple, dict)
        self._copied += sum(len(one) for one in values if isinstance(one, sized))
        if self._copied > self._copied_max:
            raise CorruptionError("has arguments of functions that are larger than itself")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._make(self.stack[-1], arguments)

    def load_newobj_ex(self) -> None:
        self.stack.pop()
        self.load_newobj()

    def load_inst(self) -> None:
        raise CorruptionError("is of a version of pickle that torch.save never writes")

    load_obj = load_inst

    def load_additems(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is set:
            self.stack[-1] |= _set(items)

    def load_frozenset(self) -> None:
        self.append(frozenset(_set(self.pop_mark())))

    def load_build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is Unread:  # Other attributes are those of a state dict, say.
            self.stack[-1].state = state

    def load_append(self) -> None:
        value = self.stack.pop()
        if type(self.stack[-1]) is list:
            self.stack[-1].append(value)

    def load_appends(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is list:
            self.stack[-1].extend(items)

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            parts = key if type(key) is tuple else (key,)
            if len(parts) > _KEY_PARTS_MAX or not all(map(_is_hashable, parts)):
                raise CorruptionError("has a key of a strange kind")
            if type(target) in (dict, OrderedDict):
                if key in target:
                    raise CorruptionError(f"has the key {key!r:.80} twice")
                target[key] = value


def _loaded(
    stream: Any, nbytes: int, places: Mapping[str, tuple[int, int]], opcodes_max: int
) -> Any:
    """Return what a pickle holds, none of which is in itself or in very many places at once.

    Code that looks at a value visits an item once for each way to it: a list that holds one list
    twice, which does likewise, and so on, would take forever.

    Args:
        stream: the pickle.
        nbytes: its size.
        places: name of a storage -> its first byte in the file, and its bytes.
        opcodes_max: most opcodes of the pickle: each may make an object.
    """
    value = _Unpickler(stream, nbytes, places, opcodes_max).load()
    sizes: dict[int, int] = {}
    items = 0

    def size(one: Any) -> int:
        """Return how many items are visited in a value."""
        nonlocal items
        if not isinstance(one, dict | list | tuple):
            return 1
        inner = one.values() if isinstance(one, dict) else one
        if id(one) not in sizes:
            sizes[id(one)] = nbytes * _SHARED_MIN  # If it is found again in itself.
            items += len(inner)
            sizes[id(one)] = 1 + sum(map(size, inner))
        return sizes[id(one)]

    if size(value) > 100 * items + _SHARED_MIN:
        raise CorruptionError("has values that are in themselves, or in very many places at once")
    return value


def _counted(load: Callable[[_Unpickler], None]) -> Callable[[_Unpickler], None]:
    """Return the function of an opcode, which counts the opcode."""

    def counting(unpickler: _Unpickler) -> None:
        unpickler.opcodes_left -= 1
        if unpickler.opcodes_left < 0:
            raise CorruptionError("has many more values than tensors")
        load(unpickler)

    return counting


# Without an instruction that allocates any number of bytes, and those of out-of-band buffers.
_REFUSED = ("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER")
_Unpickler.dispatch = {
    code: _counted(getattr(_Unpickler, load.__name__))
    for code, load in _Stock.dispatch.items()
    if code not in [getattr(pickle, name)[0] for name in _REFUSED]
}
