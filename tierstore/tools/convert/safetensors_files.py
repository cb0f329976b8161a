"""Format "safetensors": weights in one file, or in several with the index of Hugging Face.

A file is the length of a header in 8 bytes, the header as JSON with dtype, shape and byte range of
each tensor, and the raw elements without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader, wrong_name
from tierstore.inspection.safe_pickle import StoredTensor
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import dtype_name
from tierstore.run.sealed import body_errors, is_count, parse_json, require
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.entries import BUFFER, Entry, StoredChunk, StoredFile, read_stored
from tierstore.tools.convert.options import Options, Reading
from tierstore.tools.convert.parts_by_name import require_all_parts
from tierstore.tools.convert.pipeline import Piece, bytes_of
from tierstore.tools.convert.written_file import open_written

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_UNREAD = {"F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_SUFFIX = ".safetensors"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES_MAX = 100_000_000  # As the library has it.
_METADATA = "__metadata__"
_SHARDS = "DCP_SHARDING_INFO"  # A key of it, of files that DCP's HuggingFaceStorageWriter wrote.
_DIMENSIONS_MAX = 64

TRAINER = (
    *("optimizer", "scheduler", "scaler", "rng_state", "random_states", "custom_checkpoint"),
    *("sampler", "dl_state_dict", "training_args"),
)
"""Prefixes of the files that a trainer writes beside the weights."""


def recognizes(path: Path) -> bool:
    """Return whether a path is a file of weights, or a directory with some."""
    if path.is_dir():
        return any(child.name.endswith(_SUFFIX) for child in path.iterdir())
    return path.name.endswith(_SUFFIX)


# ------------------------------------------------------------------------------- reading


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read files, and directories with an index or with files.

    Raises:
        CorruptionError: a file is damaged, or not the one that the index names. Data has no
            checksums.
        CheckpointError: a directory has several files, and no index or several.
    """
    return [_read(path, reading) for path in paths]


def _read(path: Path, reading: Reading) -> Contents:
    if not path.is_dir():
        path = path.resolve()
        return read_files(Reader(path.parent), {path.name: None}, reading)
    reader = Reader(path)
    lost = [f"{name!r} beside the weights" for name in reader.list() if name.startswith(TRAINER)]
    files = _files_in(reader)
    lost += [
        f"{name!r}: the index does not name it"
        for name in reader.list()
        if name.endswith(_SUFFIX) and name not in files
    ]
    return replace(read_files(reader, files, reading), lost=lost)


def read_files(
    reader: Reader, files: Mapping[str, Collection[str] | None], reading: Reading
) -> Contents:
    """Return the weights in files of one directory.

    Args:
        reader: of the directory.
        files: name -> the tensors that the index lists for it; None without an index.
        reading: ``wrapped`` counts.

    Raises:
        CorruptionError: a file is damaged, or not the one that the index names.
    """
    entries: list[Entry] = []
    for name, expected in files.items():
        found = list(_entries(reader, name))
        if expected is not None and {e.parameter for e in found} != set(expected):
            raise CorruptionError(
                f"{reader.root / name}: does not have the tensors that the index lists"
            )
        entries += found
    return Contents(source="safetensors", wrapped=reading.wrapped, entries=entries)


def _files_in(reader: Reader) -> Mapping[str, Collection[str] | None]:
    """Return the files of a directory, and the tensors that its index gives each."""
    present = [name for name in reader.list() if name.endswith(_SUFFIX)]
    indices = [name for name in reader.list() if name.endswith(f"{_SUFFIX}.index.json")]
    if len(present) == 1 and not indices:
        require_all_parts([reader.root / present[0]])
        return {present[0]: None}
    if len(indices) != 1:
        raise CheckpointError(
            f"{reader.root} has {len(present)} files of weights and {len(indices)} indices: name "
            "the files that belong together"
        )
    return read_index(reader, indices[0])


def read_index(reader: Reader, index: str) -> dict[str, set[str]]:
    """Return the files that an index names, sorted, and the tensors that it gives each.

    Raises:
        CorruptionError: it is damaged, or names a file that is not beside it.
    """
    where = f"{reader.root / index}"
    suffix = index.removesuffix(".index.json").rpartition(".")[2]
    files: dict[str, set[str]] = {}
    with body_errors(where):
        for tensor, name in parse_json(reader.get(index))["weight_map"].items():
            require(type(name) is str, name.endswith(f".{suffix}"))
            files.setdefault(name, set()).add(tensor)
    wrong = next((name for name in files if wrong_name(name) or "/" in name), None)
    if wrong is not None:
        raise CorruptionError(f"{where}: names the file {wrong!r}, which is not beside it")
    return dict(sorted(files.items()))


def _entries(reader: Reader, name: str) -> Iterator[Entry]:
    file = StoredFile(reader, name)
    for key, tensor in stored_tensors(reader, name).items():
        whole = Chunk((0,) * len(tensor.shape), tensor.shape)
        read = read_stored(tensor.dtype, [StoredChunk(whole, file, tensor.offset)])
        yield Entry(parameter=key, state=MASTER, dtype=tensor.dtype, shape=tensor.shape, read=read)


def stored_tensors(reader: Reader, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file, as its header says.

    Raises:
        CorruptionError: the header is damaged.
    """
    where = f"{reader.root / name}"
    try:
        with reader.open(name) as file:
            length = struct.unpack("<Q", file.read(0, 8))[0]
            if length > min(_HEADER_BYTES_MAX, file.nbytes - 8):
                raise CorruptionError(f"has {file.nbytes} bytes, and a header of {length}")
            header, nbytes = file.read(8, length), file.nbytes - 8 - length
    except CorruptionError as error:
        raise CorruptionError(f"{where}: {error}") from error
    with body_errors(where):
        tensors = parse_json(header)
        metadata = tensors.pop(_METADATA, None) or {}
        codes = {tensor["dtype"] for tensor in tensors.values()} & _UNREAD
    if _SHARDS in metadata:
        raise CheckpointError(
            f"{where}: has shards of tensors ({_SHARDS}), and does not say of how many: save "
            "with HuggingFaceStorageWriter(enable_consolidation=True) of DCP"
        )
    if codes:
        raise CheckpointError(f"{where}: has tensors of dtype {min(codes)}, which are not read")
    with body_errors(where):
        places = sorted((*tensor["data_offsets"], key) for key, tensor in tensors.items())
        end = 0
        for start, stop, key in places:
            tensor = tensors[key]
            dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
            require(len(shape) <= _DIMENSIONS_MAX, *map(is_count, (start, stop, *shape)))
            require(start == end, stop - start == math.prod(shape) * dtype.itemsize)
            end = stop
        require(end == nbytes)
    found = {}
    for key, tensor in tensors.items():
        dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        offset = 8 + len(header) + tensor["data_offsets"][0]
        found[key] = StoredTensor(offset, dtype, shape, strides)
    return found


# ------------------------------------------------------------------------------- writing


class Writer:
    """Writes ``model.safetensors``, or several files with an index.

    Args:
        contents: what is written: the weights.
        options: ``dtype`` and ``shard_bytes`` count.

    Raises:
        CheckpointError: the format does not have a dtype.
    """

    def __init__(self, contents: Contents, options: Options) -> None:
        entries = [e for e in contents.cast_weights(options.dtype) if e.state in (MASTER, BUFFER)]
        # By size of an element, so that all tensors are aligned.
        self._shards = [
            sorted(shard, key=lambda entry: -entry.dtype.itemsize)
            for shard in _shards(entries, options.shard_bytes)
        ]
        self.entries: Sequence[Entry] = [entry for shard in self._shards for entry in shard]
        for entry in self.entries:
            if entry.dtype not in _CODES or entry.parameter == _METADATA:
                raise CheckpointError(
                    f"{entry.parameter!r} is {dtype_name(entry.dtype)}, which safetensors does not "
                    "have: leave it out with --exclude, or change it with --dtype"
                )
        self.nbytes = sum(entry.nbytes + 256 for entry in self.entries) + 2**20
        self.lost: Sequence[str] = list(_lost(contents))

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[Piece], None]]:
        """Write the headers, then the data as it comes."""
        count = len(self._shards)
        names = [
            _ONE if count == 1 else f"model-{number:05d}-of-{count:05d}{_SUFFIX}"
            for number in range(1, count + 1)
        ]
        paths: dict[str, Path] = {}
        for name, shard in zip(names, self._shards, strict=True):
            (directory / name).write_bytes(_header(shard))
            paths |= {entry.parameter: directory / name for entry in shard}
        with _Appending() as file:
            yield lambda piece: file.append(paths[piece.entry.parameter], piece)
        if count > 1:
            shards = zip(names, self._shards, strict=True)
            weight_map = {entry.parameter: name for name, shard in shards for entry in shard}
            total = sum(entry.nbytes for entry in self.entries)
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _Appending:
    """Appends to one file after the other; only one file is open at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, path: Path, piece: Piece) -> None:
        """Append the elements of a piece."""
        if self._file is None or self._path != path:
            self.__exit__()
            self._path, self._file = path, open_written(path, "ab")
        self._file.write(bytes_of(piece.tensor))


def _shards(entries: Sequence[Entry], limit: int | None) -> list[list[Entry]]:
    """Return the entries of each file; a file has more bytes than the limit for one tensor only."""
    shards: list[list[Entry]] = [[]]
    room = limit
    for entry in entries:
        if room is not None and limit is not None and shards[-1] and entry.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room = None if room is None else room - entry.nbytes
    return shards


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    start = 0
    for entry in entries:
        header[entry.parameter] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.nbytes],
        }
        start += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _lost(contents: Contents) -> Iterator[str]:
    states = [entry for entry in contents.entries if entry.state not in (MASTER, BUFFER)]
    if states or contents.groups:
        yield f"the optimizer, with {len(states)} tensors of state: safetensors holds weights"
    if contents.step is not None or contents.extra is not None:
        yield "the step and extra: safetensors holds weights"
    for name in contents.values:
        yield f"{name!r}: it is not a tensor"
    for alias, name in contents.aliases.items():
        yield f"the name {alias!r} of {name!r}: tied tensors are stored once"
