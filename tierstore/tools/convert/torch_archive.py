"""Reading of files that torch.save wrote, without running anything of them.

A file is a zip archive with a pickle and the raw elements of storages. Tensors become places in
the file, and objects of unknown classes become inert stand-ins.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from typing_extensions import override

from tierstore.errors import CorruptionError
from tierstore.inspection.archive_members import member_start
from tierstore.inspection.reader import File, Reader
from tierstore.inspection.safe_pickle import Storages, StoredTensor, load_pickle
from tierstore.storage.checks import WHOLE_FILE_BYTES_MAX
from tierstore.units import format_bytes

_READ_BYTES = 2**20
_SHARED_MIN = 10**5
_OPCODES_MIN = 4 * 10**6
_OPCODES_PER_STORAGE = 500
"""A tensor takes about 30, a DTensor 130; each may make an object of about 100 bytes."""


def read_torch_file(reader: Reader, name: str) -> Any:
    """Return the value in a file: plain values, StoredTensor, and stand-ins for other objects.

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
    """Return the value in a small file of torch.save, given its bytes; see read_torch_file().

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
    """Return the value of a pickle of plain values; objects of any class become Unread.

    Args:
        data: the pickle.
        where: the name of the file in errors.

    Raises:
        CorruptionError: it is damaged.
    """
    try:
        return _loaded(io.BytesIO(data), len(data), {}, len(data))
    except Exception as error:  # A pickle may be deeper than Python can follow.
        reason = error if isinstance(error, CorruptionError) else type(error).__name__
        raise CorruptionError(f"{where}: cannot be read: {reason}") from error


def _read_whole(file: File, *, compare: bool) -> Any:
    try:
        return _read(file, compare=compare)
    except CorruptionError:
        raise
    except zipfile.BadZipFile as error:
        raise CorruptionError(
            f"is cut off, or is not what torch.save writes since version 1.6 ({error}): copy it "
            "again, or load it with torch.load and save it again, if you trust it"
        ) from error
    except Exception as error:  # Damage can make an archive raise anything.
        raise CorruptionError(f"cannot be read: {type(error).__name__}") from error


def _read(file: File, *, compare: bool) -> Any:
    """Return the value in a file.

    Args:
        file: the file.
        compare: whether to compare also the checksums of tensors.
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


def _loaded(stream: Any, nbytes: int, storages: Storages, opcodes_max: int) -> Any:
    """Load a pickle. Refuse cycles, and values that are shared too often.

    Code that walks a value visits an item once for each path to it. If a list holds a list twice,
    which holds a list twice, and so on, the walk would never end.

    Raises:
        CorruptionError: the pickle has a cycle, or values that are shared too often.
    """
    value = load_pickle(stream, nbytes, stand_ins=True, storages=storages, opcodes_max=opcodes_max)
    sizes: dict[int, int] = {}
    items = 0

    def size(one: Any) -> int:
        """Return the number of items that a walk visits."""
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
        raise CorruptionError("contains a reference cycle, or values that are shared too often")
    return value
