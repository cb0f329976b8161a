"""Record framing: the bytes around raw tensor data that make it a file for ``torch.load``.

::

    record = prefix | data | trailer | padding

Prefix and trailer turn the data into the stored (uncompressed) zip archive that
``torch.save`` would write: ``data.pkl`` describes a contiguous tensor of these sizes and this
dtype, ``data/0`` holds its raw little-endian elements. Prefix and trailer depend only on sizes and
dtype, so they stay valid when the data is rewritten in place. The
CRC-32 of ``data/0`` changes with the data. It is stored as 0: ``torch.load`` does not check it.
Python's ``zipfile`` lists all entries and reads the others. Reading ``data/0`` to its end raises
``BadZipFile`` (unless the CRC-32 of the data happens to be 0).

Formats: the zip file format specification (APPNOTE.TXT 6.3), sections 4.3.7, 4.3.12 and
4.3.16, and Python's pickle protocol 2.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tierstore.units import align_up

RECORD_PREFIX_BYTES = 512
"""Length of every prefix: the offset of the data in its record."""

DATA_ALIGNMENT_BYTES = 64
"""Records are padded to a multiple of this, which aligns all data."""

RECORD_DATA_BYTES_MAX = 2**31 - 8192
"""Most bytes of data in one record. Linux moves at most 2**31 - 4096 bytes in one call. A record
with its framing stays below this limit, and every number in it fits 31 bits."""

RECORD_DIMENSIONS_MAX = 16
"""The most dimensions for which the pickled sizes and strides fit into the prefix."""

# The storage class that torch.save pickles for each dtype. 8-bit floats have no class: their
# storage is untyped, with its length in bytes, and the dtype follows the storage.
_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.float16: "HalfStorage",
    torch.float8_e4m3fn: "UntypedStorage",
    torch.float8_e5m2: "UntypedStorage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}

RECORD_DTYPES = frozenset(_STORAGES)
"""Dtypes that a record can hold."""

# torch.load takes the text before the first slash as the name of the archive.
_PICKLE_NAME = b"a/data.pkl"
_DATA_NAME = b"a/data/0"
_CONSTANT_ENTRIES = ((b"a/byteorder", b"little"), (b"a/version", b"3\n"))

# The header before each entry, its header in the central directory, and the end record.
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DIRECTORY_HEADER = struct.Struct("<4s6H3I5H2I")
_END_RECORD = struct.Struct("<4s4H2IH")
_ZIP_VERSION = 20
_ZIP_TIME, _ZIP_DATE = 0, 0x21  # Midnight of 1980-01-01, the first day that zip knows.

# torch.save also pads its entries with an extra field of this id.
_PADDING_FIELD = struct.Struct("<2sH")
_PADDING_ID = b"FB"

_ENTRY_NAMES = (_PICKLE_NAME, *(name for name, _ in _CONSTANT_ENTRIES), _DATA_NAME)
_TRAILER_BYTES = sum(_DIRECTORY_HEADER.size + len(name) for name in _ENTRY_NAMES) + _END_RECORD.size


class _Entry(NamedTuple):
    """One file of the archive, and the offset of its local header."""

    name: bytes
    crc: int
    nbytes: int
    offset: int


def record_prefix(sizes: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return the RECORD_PREFIX_BYTES bytes before the data of a record.

    Args:
        sizes: shape of the tensor that ``torch.load`` returns; () is 0-d.
        dtype: its dtype: float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2,
            int64, int32, int16, int8, uint8 or bool.

    Raises:
        ValueError: another dtype; a negative size; more than RECORD_DIMENSIONS_MAX dimensions;
            more than RECORD_DATA_BYTES_MAX bytes of data (a size of 0 counts as 1).
    """
    return _frame(tuple(sizes), dtype)[0]


def record_trailer(sizes: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return the bytes after the data; arguments as in record_prefix().

    The length is the same for all sizes and dtypes.
    """
    return _frame(tuple(sizes), dtype)[1]


def record_length(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return the number of bytes of prefix, data and trailer. ``torch.load`` reads these bytes.

    Arguments and errors as in record_prefix().
    """
    return RECORD_PREFIX_BYTES + _data_nbytes(sizes, dtype) + _TRAILER_BYTES


def record_nbytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return record_length() rounded up to DATA_ALIGNMENT_BYTES: the offset of the next record.

    Arguments and errors as in record_prefix().
    """
    return _record_nbytes(tuple(sizes), dtype)


@functools.lru_cache(maxsize=1024)
def _record_nbytes(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    return align_up(record_length(sizes, dtype), DATA_ALIGNMENT_BYTES)


def _data_nbytes(sizes: Sequence[int], dtype: torch.dtype) -> int:
    """Return the number of bytes of data, after checking that a record can hold them."""
    if dtype not in _STORAGES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _STORAGES)
        raise ValueError(f"a record's dtype must be one of {names}, got {dtype}")
    if len(sizes) > RECORD_DIMENSIONS_MAX:
        raise ValueError(
            f"a record has at most {RECORD_DIMENSIONS_MAX} dimensions, got {list(sizes)}"
        )
    if min(sizes, default=0) < 0:
        raise ValueError(f"sizes must not be negative, got {list(sizes)}")
    # Strides count a size of 0 as 1, so this product is the largest number in the pickle.
    if math.prod(max(size, 1) for size in sizes) * dtype.itemsize > RECORD_DATA_BYTES_MAX:
        raise ValueError(
            f"a record holds at most {RECORD_DATA_BYTES_MAX} bytes of data, got sizes "
            f"{list(sizes)} of {dtype}: cut it into smaller chunks"
        )
    return math.prod(sizes) * dtype.itemsize


# Models have many tensors of few shapes.
@functools.lru_cache(maxsize=1024)
def _frame(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the prefix and the trailer."""
    data_nbytes = _data_nbytes(sizes, dtype)
    prefix = b""
    entries = []
    for name, content in ((_PICKLE_NAME, _tensor_pickle(sizes, dtype)), *_CONSTANT_ENTRIES):
        entries.append(_Entry(name, zlib.crc32(content), len(content), len(prefix)))
        prefix += _local_header(entries[-1], b"") + content
    entries.append(_Entry(_DATA_NAME, 0, data_nbytes, len(prefix)))
    header_nbytes = _LOCAL_HEADER.size + len(_DATA_NAME) + _PADDING_FIELD.size
    padding = bytes(RECORD_PREFIX_BYTES - len(prefix) - header_nbytes)
    extra = _PADDING_FIELD.pack(_PADDING_ID, len(padding)) + padding
    prefix += _local_header(entries[-1], extra)
    directory = b"".join(map(_directory_header, entries))
    end_record = _END_RECORD.pack(
        b"PK\5\6",
        *(0, 0),  # One disk, this one.
        *(len(entries), len(entries)),
        len(directory),
        len(prefix) + data_nbytes,
        0,
    )
    return prefix, directory + end_record


def _local_header(entry: _Entry, extra: bytes) -> bytes:
    header = _LOCAL_HEADER.pack(
        b"PK\3\4",
        *(_ZIP_VERSION, 0, 0),  # No flags; stored, not compressed.
        *(_ZIP_TIME, _ZIP_DATE),
        *(entry.crc, entry.nbytes, entry.nbytes),
        *(len(entry.name), len(extra)),
    )
    return header + entry.name + extra


def _directory_header(entry: _Entry) -> bytes:
    header = _DIRECTORY_HEADER.pack(
        b"PK\1\2",
        *(_ZIP_VERSION, _ZIP_VERSION, 0, 0),
        *(_ZIP_TIME, _ZIP_DATE),
        *(entry.crc, entry.nbytes, entry.nbytes),
        *(len(entry.name), 0, 0),  # No extra field, no comment.
        *(0, 0, 0),  # On this disk, no attributes.
        entry.offset,
    )
    return header + entry.name


def _tensor_pickle(sizes: Sequence[int], dtype: torch.dtype) -> bytes:
    """Return the pickle of a contiguous CPU tensor over the whole of storage "0".

    The pickle calls _rebuild_tensor_v2(storage, storage_offset, sizes, strides, requires_grad,
    backward_hooks), or, for an untyped storage, _rebuild_tensor_v3 with the dtype at the end.
    Each number takes five bytes, so the length depends only on the number of dimensions.
    """
    untyped = _STORAGES[dtype] == "UntypedStorage"
    strides = [
        math.prod(max(size, 1) for size in sizes[dimension + 1 :])
        for dimension in range(len(sizes))
    ]
    storage = (
        pickle.MARK
        + _pickled_text("storage")
        + _pickled_global("torch.storage" if untyped else "torch", _STORAGES[dtype])
        + _pickled_text("0")
        + _pickled_text("cpu")
        + _pickled_int(math.prod(sizes) * (dtype.itemsize if untyped else 1))
        + pickle.TUPLE
        + pickle.BINPERSID
    )
    arguments = (
        pickle.MARK
        + storage
        + _pickled_int(0)
        + _pickled_ints(sizes)
        + _pickled_ints(strides)
        + pickle.NEWFALSE
        + _pickled_global("collections", "OrderedDict")
        + pickle.EMPTY_TUPLE
        + pickle.REDUCE
        + (_pickled_global("torch", str(dtype).removeprefix("torch.")) if untyped else b"")
        + pickle.TUPLE
    )
    rebuild = _pickled_global("torch._utils", f"_rebuild_tensor_v{3 if untyped else 2}")
    return pickle.PROTO + b"\2" + rebuild + arguments + pickle.REDUCE + pickle.STOP


def _pickled_text(text: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(text)) + text.encode("ascii")


def _pickled_global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode("ascii")


def _pickled_int(number: int) -> bytes:
    return pickle.BININT + struct.pack("<i", number)


def _pickled_ints(numbers: Sequence[int]) -> bytes:
    return pickle.MARK + b"".join(map(_pickled_int, numbers)) + pickle.TUPLE
