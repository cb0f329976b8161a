"""Check of the slices of files that ``.metadata`` names, and of the contents of the slices."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tierstore.errors import CorruptionError
from tierstore.inspection.archive_members import member_start
from tierstore.inspection.coverage import tiling_faults
from tierstore.inspection.reader import File, Reader
from tierstore.layout.chunks import Chunk, is_dense, storage_order
from tierstore.layout.records import (
    RECORD_DIMENSIONS_MAX,
    RECORD_DTYPES,
    RECORD_PREFIX_BYTES,
    record_length,
    record_prefix,
    record_trailer,
)
from tierstore.storage.checks import WHOLE_FILE_BYTES_MAX
from tierstore.units import format_bytes

_READ_BYTES = 2**20
_UNKNOWN_CLASS = re.compile("Unsupported|WeightsUnpickler error: Trying")


class _Expected(NamedTuple):
    """The expected content of a slice: a tensor, or any object if ``dtype`` is None."""

    sizes: tuple[int, ...]
    dtype: torch.dtype | None


class Elements(NamedTuple):
    """Place of the elements of a tensor in a file."""

    start: int
    """The first byte."""
    order: tuple[int, ...]
    """The dimensions in the order in which they are row-major in the file."""


class _Slice(NamedTuple):
    """A range of a file."""

    name: str
    offset: int
    nbytes: int


class Slices:
    """The slices of files that a checkpoint's metadata names.

    Args:
        reader: of the checkpoint's directory; records every fault.
        metadata: the content of ``.metadata``.
    """

    def __init__(self, reader: Reader, metadata: Metadata) -> None:
        self.reader = reader
        self.metadata = metadata
        self._expected: dict[_Slice, dict[_Expected, str]] = defaultdict(dict)
        """Slice -> its expected contents -> the first key that needs the content."""
        self._elements_of: dict[tuple[_Slice, _Expected], Elements | None] = {}
        self._unread = 0
        self._transformed = 0
        for key, item in metadata.state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                self._add_tensor(key, item)
            else:
                self._add(key, MetadataIndex(key), _Expected((), None))
        self._taken = sorted(piece for piece in self._expected if reader.takes_next())
        """The slices that this reader checks."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slices that this reader checks. Bytes that keys share count once."""
        return sum(piece.nbytes for piece in self._taken)

    def check(self, *, whole: bool) -> None:
        """Check the slices of files without a known fault.

        Args:
            whole: whether to read all data and compare it with the checksums of torch.save.
        """
        known = {fault.place for fault in self.reader.faults}
        for name, pieces in itertools.groupby(self._taken, key=lambda piece: piece.name):
            if name in known:
                continue
            with self.reader.record_faults(name), self.reader.open(name) as file:
                if whole:
                    file.drop_cached()
                for piece in pieces:
                    with self.reader.advancing(piece.nbytes if whole else 0):
                        self._check_slice(file, piece, whole)
        if self._unread:
            self.reader.notes.append(
                f"{self._unread} values are of classes that only a full unpickling could make: "
                "their checksums are right, and they were not unpickled"
            )
        if self._transformed:
            self.reader.notes.append(
                f"{self._transformed} slices are compressed or otherwise transformed: only their "
                "extent was checked"
            )

    def elements(
        self, file: File, info: _StorageInfo, sizes: Sequence[int], dtype: torch.dtype
    ) -> Elements | None:
        """Return the place of the elements of a stored tensor in a file.

        A slice that check() did not read is checked now, once, except its data.

        Returns:
            None if the elements are not in the file as they are in memory.

        Raises:
            CorruptionError: the slice is not whole.
        """
        if info.transform_descriptors:
            return None
        piece = _Slice(file.name, info.offset, info.length)
        expected = _Expected(tuple(sizes), dtype)
        if (piece, expected) not in self._elements_of:
            found = _elements(file, piece, expected, whole=False)
            self._elements_of[piece, expected] = found
        return self._elements_of[piece, expected]

    def _add_tensor(self, key: str, item: TensorStorageMetadata) -> None:
        chunks = [Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in item.chunks]
        for fault in tiling_faults(item.size, chunks):
            self.reader.fault(key, fault)
        for chunk in chunks:
            if chunk.numel > 0:
                index = MetadataIndex(key, chunk.offsets)
                self._add(key, index, _Expected(chunk.sizes, item.properties.dtype))

    def _add(self, key: str, index: MetadataIndex, expected: _Expected) -> None:
        info: _StorageInfo | None = self.metadata.storage_data.get(index)
        if info is None:
            chunk = "" if index.offset is None else f" of its chunk at {list(index.offset)}"
            self.reader.fault(key, f".metadata does not say in which file the data{chunk} is")
            return
        contents = self._expected[_Slice(info.relative_path, info.offset, info.length)]
        if info.transform_descriptors:
            self._transformed += 1
        else:
            contents.setdefault(expected, key)

    def _check_slice(self, file: File, piece: _Slice, whole: bool) -> None:
        contents = self._expected[piece]
        if not 0 <= piece.offset <= piece.offset + piece.nbytes <= file.nbytes:
            self.reader.fault(
                next(iter(contents.values()), file.name),
                f"should be the {piece.nbytes} bytes at offset {piece.offset} of {file.name}, "
                f"which has {file.nbytes}",
            )
            return
        for expected, key in contents.items():
            try:
                found = _elements(file, piece, expected, whole)
                self._elements_of[piece, expected] = found
            except CorruptionError as error:
                if isinstance(error, _UnknownClassError) and expected.dtype is None:
                    self._unread += 1
                else:
                    extent = f"{format_bytes(piece.nbytes)} at offset {piece.offset}"
                    self.reader.fault(key, f"the {extent} of {file.name}: {error}")
            whole = False  # The data was read.


def _is_page_record(file: File, piece: _Slice, expected: _Expected) -> bool:
    """Return whether a slice is a record of a page. A record has a fixed framing."""
    sizes, dtype = expected
    return (
        dtype in RECORD_DTYPES
        and len(sizes) <= RECORD_DIMENSIONS_MAX
        and math.prod(sizes) * dtype.itemsize < piece.nbytes
        and record_length(sizes, dtype) == piece.nbytes
        and _is_record(file, piece.offset, sizes, dtype)
    )


def _elements(file: File, piece: _Slice, expected: _Expected, whole: bool) -> Elements | None:
    """Return the place of the elements of a tensor in the file, as elements() does.

    Returns:
        As elements(); also None for an object.

    Raises:
        CorruptionError: the slice does not hold the expected content.
    """
    if _is_page_record(file, piece, expected):
        order = tuple(range(len(expected.sizes)))
        return Elements(piece.offset + RECORD_PREFIX_BYTES, order)
    tensor, data_nbytes, start = _load(file, piece, whole)
    if expected.dtype is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        raise CorruptionError("does not hold a tensor")
    if (tuple(tensor.shape), tensor.dtype) != expected:
        raise CorruptionError(
            f"holds a tensor of {tensor.dtype} {list(tensor.shape)}, but .metadata says "
            f"{expected.dtype} {list(expected.sizes)}"
        )
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() != data_nbytes:
        raise CorruptionError(f"has {data_nbytes} bytes of data, which do not fit the tensor")
    if start is None or tensor.storage_offset() or not is_dense(tensor.shape, tensor.stride()):
        return None
    return Elements(start, tuple(storage_order(tensor.shape, tensor.stride())))


class _UnknownClassError(CorruptionError):
    """The object is of a class that torch.load(weights_only=True) does not make."""


def _load(file: File, piece: _Slice, whole: bool) -> tuple[object, int, int | None]:
    """Read a slice that torch.save wrote.

    Returns:
        The value, with tensors on the meta device; the bytes of data of all tensors; the byte of
        the file at which the data begins. The last is None unless the data is one storage in the
        byte order of this machine.

    Raises:
        CorruptionError: the slice is not whole; _UnknownClassError: it names a class that
            torch.load(weights_only=True) does not make.
    """
    stream = _BoundedReader(_SliceStream(file, piece), _READ_BYTES)
    try:
        with zipfile.ZipFile(stream) as archive:
            data_nbytes = _check_archive(file, piece, archive, whole)
            data_start = _data_start(file, piece, archive)
        stream.seek(0)
        # On the meta device, storages are made but not read.
        value: object = torch.load(stream, map_location="meta", weights_only=True)
        return value, data_nbytes, data_start
    except CorruptionError:
        raise
    except zipfile.BadZipFile as error:
        raise CorruptionError(f"is not what torch.save wrote: {error}") from error
    except Exception as error:  # A damaged pickle or archive can make torch raise anything.
        if isinstance(error, pickle.UnpicklingError) and _UNKNOWN_CLASS.search(str(error)):
            raise _UnknownClassError(
                "cannot be read: it names a class that is not part of a tensor"
            ) from error
        raise CorruptionError(
            f"cannot be read by torch.load(weights_only=True): {type(error).__name__}"
        ) from error


def _data_start(file: File, piece: _Slice, archive: zipfile.ZipFile) -> int | None:
    data = list(filter(_is_data, archive.infolist()))
    orders = [entry for entry in archive.infolist() if entry.filename.endswith("/byteorder")]
    if len(data) != 1 or len(orders) != 1:
        return None
    order = file.read(_member_start(file, piece, orders[0]), len(sys.byteorder))
    return _member_start(file, piece, data[0]) if order == sys.byteorder.encode() else None


def _member_start(file: File, piece: _Slice, entry: zipfile.ZipInfo) -> int:
    return member_start(file, entry, piece.offset, piece.offset + piece.nbytes)


def _check_archive(file: File, piece: _Slice, archive: zipfile.ZipFile, whole: bool) -> int:
    """Compare entries with the CRC-32 in the archive; return the bytes of tensor data.

    Unless ``whole``, Reader.compare_checksums() compares the CRC-32 of data later.
    """
    entries = archive.infolist()
    data_nbytes = sum(entry.file_size for entry in entries if _is_data(entry))
    other_nbytes = sum(entry.file_size for entry in entries if not _is_data(entry))
    # After torch.serialization.set_crc32_options(False) all checksums are 0.
    has_checksums = any(entry.CRC for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CorruptionError("is compressed, which torch.save never does")
    if other_nbytes > WHOLE_FILE_BYTES_MAX:  # torch.load reads every entry at once.
        raise CorruptionError(f"has {format_bytes(other_nbytes)} besides the data of tensors")
    for entry in entries:
        if not has_checksums or (_is_data(entry) and entry.CRC == 0):
            continue
        if _is_data(entry) and not whole:
            start = _member_start(file, piece, entry)
            file.reader.expect_data(file.name, start, entry.file_size, entry.CRC)
            continue
        with archive.open(entry) as member:
            while data := member.read(_READ_BYTES):
                if _is_data(entry):
                    file.reader.advance(len(data))
    return data_nbytes


def _is_data(entry: zipfile.ZipInfo) -> bool:
    return "/data/" in entry.filename


class _BoundedReader(io.BufferedReader):
    """Refuses a read that is longer than any list of entries, even if the slice is as long."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > WHOLE_FILE_BYTES_MAX:
            raise CorruptionError("is not what torch.save wrote: its list of entries is too long")
        return super().read(size)


class _SliceStream(io.RawIOBase):
    """A slice of a file as a stream."""

    def __init__(self, file: File, piece: _Slice) -> None:
        self._file = file
        self._piece = piece
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._piece.nbytes}[
            whence
        ]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._piece.nbytes - self._position))
        if count:
            start = self._piece.offset + self._position
            self._file.read_into(memoryview(buffer)[:count], start)
        self._position += count
        return count


def _is_record(file: File, offset: int, sizes: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a record begins at ``offset``, without reading its data."""
    trailer = record_trailer(sizes, dtype)
    trailer_offset = offset + record_length(sizes, dtype) - len(trailer)
    return file.read(offset, RECORD_PREFIX_BYTES) == record_prefix(sizes, dtype) and (
        file.read(trailer_offset, len(trailer)) == trailer
    )
