"""Writing of files of torch.save, whose tensors come in pieces."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from typing_extensions import override

from tierstore.threads import Threads
from tierstore.tools.convert.entries import Entry
from tierstore.tools.convert.pipeline import Piece, bytes_of
from tierstore.tools.convert.written_file import open_written

_ALIGNMENT_BYTES = 64
_ZIP64_BYTES = 20  # Of an extra field that zipfile writes before ours.
_HEADER_BYTES = 30


@contextmanager
def torch_file(
    path: Path,
    entries: Sequence[Entry],
    value_of: Callable[[Mapping[tuple[str, str], Any]], Any],
) -> Iterator[Callable[[Piece], None]]:
    """Write a file as torch.save does; the block gives all pieces of entries in order.

    Args:
        path: of the file, which does not exist.
        entries: tensors that come in pieces.
        value_of: returns the value to write, given stand-ins for the tensors of entries by
            parameter and state. Other tensors in the value are written as they are.
    """
    with open_written(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        stream = io.BytesIO()
        pickler = _Pickler(stream, first_number=len(entries))
        pickler.dump(
            value_of({entry.key: _Tensor(str(i), entry) for i, entry in enumerate(entries)})
        )
        archive.writestr("archive/data.pkl", stream.getvalue())
        archive.writestr("archive/byteorder", sys.byteorder)
        archive.writestr("archive/version", "3\n")
        with _Members(file, archive, entries) as members:
            yield members.put
            members.finish(pickler.small)


class _Tensor(NamedTuple):
    """Stands for a tensor whose elements are the member "data/<key>"."""

    key: str
    entry: Entry


class _Storage(NamedTuple):
    """Stands for the storage of a tensor."""

    key: str
    dtype: torch.dtype
    nbytes: int


class _Pickler(pickle.Pickler):
    """Pickles tensors as torch.save does.

    Args:
        stream: receives the pickle.
        first_number: the number of the member of the first tensor that is in memory.
    """

    def __init__(self, stream: io.BytesIO, first_number: int) -> None:
        super().__init__(stream, protocol=2)
        self._first_number = first_number
        self.small: list[torch.Tensor] = []
        """The tensors in memory, which follow in members of the archive."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.small.append(obj.detach().contiguous())
            key = str(self._first_number + len(self.small) - 1)
            return _rebuilt(_Storage(key, obj.dtype, obj.nbytes), tuple(obj.shape))
        if isinstance(obj, _Tensor):
            entry = obj.entry
            return _rebuilt(_Storage(obj.key, entry.dtype, entry.nbytes), entry.shape)
        return NotImplemented

    @override
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = _storage_class(obj.dtype)
        itemsize = 1 if kind is torch.UntypedStorage else obj.dtype.itemsize
        return ("storage", kind, obj.key, "cpu", obj.nbytes // itemsize)


def _storage_class(dtype: torch.dtype) -> Any:
    """Return the class that torch.save pickles for a dtype; newer dtypes have none."""
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return torch.UntypedStorage if name is None else getattr(torch, name)


def _rebuilt(storage: _Storage, shape: tuple[int, ...]) -> Any:
    """Return the function that torch.save pickles for a tensor, and its arguments."""
    strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    hooks: OrderedDict[str, Any] = OrderedDict()
    arguments: tuple[Any, ...] = (storage, 0, shape, tuple(strides), False, hooks)
    if _storage_class(storage.dtype) is torch.UntypedStorage:
        return torch._utils._rebuild_tensor_v3, (*arguments, storage.dtype)
    return torch._utils._rebuild_tensor_v2, arguments


class _Members:
    """Members of the archive, one for each tensor, aligned as torch.save aligns them.

    ``zipfile`` would compute the checksum of a piece before it writes the piece. Here a thread
    computes the checksum during the write.

    Args:
        file: the file of the archive.
        archive: the archive, to which members are added once they are whole.
        entries: tensors that come in pieces.
    """

    def __init__(self, file: BinaryIO, archive: zipfile.ZipFile, entries: Sequence[Entry]) -> None:
        self._file = file
        self._archive = archive
        self._entries = entries
        self._number = -1
        self._member: zipfile.ZipInfo | None = None
        self._checksums = Threads(1, "tierstore-convert-checksum")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._checksums.close()

    def put(self, piece: Piece) -> None:
        """Append the next piece."""
        while self._number < 0 or self._entries[self._number] is not piece.entry:
            self._begin_next()
        self._write(piece.tensor)

    def finish(self, small: Sequence[torch.Tensor]) -> None:
        """Write tensors without elements that are left, and the tensors in memory."""
        for _ in self._entries[self._number + 1 :]:
            self._begin_next()
        for tensor in small:
            self._begin_next()
            if tensor.nbytes:
                self._write(tensor)
        self._end()

    def _write(self, tensor: torch.Tensor) -> None:
        """Append elements to the member."""
        assert self._member is not None
        data = bytes_of(tensor)
        crc = self._checksums.submit(zlib.crc32, data, self._member.CRC)
        try:
            self._file.write(data)
        finally:  # The caller may overwrite the elements.
            self._member.CRC = crc.result()
        self._member.file_size += len(data)

    def _begin_next(self) -> None:
        """End the member, and begin the next one."""
        self._end()
        self._number += 1
        member = zipfile.ZipInfo(f"archive/data/{self._number}")
        member.header_offset = self._archive.start_dir
        member.CRC = 0
        data = member.header_offset + _HEADER_BYTES + len(member.filename) + _ZIP64_BYTES + 4
        member.extra = struct.pack("<2sH", b"FB", -data % _ALIGNMENT_BYTES) + bytes(
            -data % _ALIGNMENT_BYTES
        )
        self._file.seek(member.header_offset)
        self._file.write(member.FileHeader(zip64=True))
        self._member = member

    def _end(self) -> None:
        """Write the header of the member anew, with its size and checksum."""
        member = self._member
        if member is None:
            return
        member.compress_size = member.file_size
        self._archive.start_dir = self._file.tell()
        self._file.seek(member.header_offset)
        self._file.write(member.FileHeader(zip64=True))
        self._archive.filelist.append(member)
        self._archive.NameToInfo[member.filename] = member
        self._member = None
