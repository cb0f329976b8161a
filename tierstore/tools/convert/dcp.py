"""Format "dcp": directories of torch.distributed.checkpoint.

Keys are as in ``torch.distributed.checkpoint.state_dict`` ("model.*", "optimizer.*"), or as in
torchtitan, where names of the model have no prefix.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tierstore.checkpoint.dcp_reader import EntryPath, StoredEntries
from tierstore.checkpoint.dcp_writer import (
    NUMBERS,
    Catalog,
    add_hyperparameters,
    model_path,
    state_paths,
)
from tierstore.checkpoint.saved_values import (
    EXTRA_KEY,
    STEP_KEY,
    as_number,
    converted_states,
    converted_step,
    parameter_of,
)
from tierstore.checkpoint.stored_paths import MODELS, TRAINER, Paths, at_top, path_text
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.kinds import kind_of
from tierstore.inspection.reader import Reader
from tierstore.inspection.slices import Slices
from tierstore.inspection.verify_checkpoint import verify_checkpoint
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import dtype_name
from tierstore.layout.records import (
    RECORD_DATA_BYTES_MAX,
    RECORD_DIMENSIONS_MAX,
    RECORD_DTYPES,
    record_length,
    record_nbytes,
    record_prefix,
    record_trailer,
)
from tierstore.layout.state_parts import empty_kind, is_key, nested, parts_of
from tierstore.run import tagged_json
from tierstore.run.file_names import CONVERSION_NAME, METADATA_NAME
from tierstore.run.sealed import body_errors, seal, unseal
from tierstore.tools.convert.contents import Contents, Group
from tierstore.tools.convert.conventions import RENAMED, standard_groups
from tierstore.tools.convert.entries import BUFFER, Entry, pieces
from tierstore.tools.convert.options import Options, Reading
from tierstore.tools.convert.pipeline import Piece, bytes_of
from tierstore.tools.convert.written_file import open_written

_DATA_NAME = "__0_0.distcp"  # The name that DCP gives to the file of a single rank.


def recognizes(path: Path) -> bool:
    """Return whether a path is a directory that DCP wrote."""
    return (path / METADATA_NAME).is_file() and kind_of(path) == "plain checkpoint"


# ------------------------------------------------------------------------------- reading


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read each directory by itself: a model and its optimizer may be in two.

    Raises:
        CorruptionError: one is damaged.
        CheckpointError: one is not a DCP directory.
    """
    return [_read(path, reading) for path in paths]


def _read(path: Path, reading: Reading) -> Contents:
    entries, metadata = checked_entries(path, reading)
    tensors = [key for key in entries.keys if entries.tensor(key) is not None]
    paths = at_top({key: entries.path_of(key) for key in entries.keys}, tensors, path)
    model, others = _model_paths(paths, ())
    contents = _of_model(entries, metadata, model, ())
    inner = next((key for key in tensors if key in model and model[key][1:]), None)
    if inner is not None and not contents.entries:
        raise CheckpointError(
            f"{path} has tensors at inner paths, such as {inner!r}, and none of these is a known "
            f"model: save the state dict under one of {', '.join(MODELS)}"
        )
    states, scalars, lost = _optimizer_states(entries, others)
    flags = {
        name: bool(numbers.pop("use_muon"))
        for name, numbers in scalars.items()
        if "use_muon" in numbers
    }
    names = [entry.parameter for entry in (*contents.entries, *states)]
    groups = _groups(entries, others, names, states, flags)
    return Contents(
        source="dcp",
        wrapped=reading.wrapped,
        entries=[*contents.entries, *states],
        groups=groups,
        scalars={name: numbers for name, numbers in scalars.items() if numbers},
        values=contents.values,
        aliases=contents.aliases,
        dtypes=_dtypes(path),
        step=converted_step(entries),
        extra=tagged_json.decode(converted_states(entries)),
        lost=[*contents.lost, *lost, *_others(others)],
    )


def _dtypes(path: Path) -> dict[str, torch.dtype]:
    """Return parameter -> its dtype in the model, if a conversion has written it.

    Raises:
        CorruptionError: the file that has it is damaged.
    """
    reader = Reader(path)
    if CONVERSION_NAME not in reader.list():
        return {}
    where = f"{path / CONVERSION_NAME}"
    body = unseal("conversion", reader.get(CONVERSION_NAME), where)
    dtypes = {dtype_name(dtype): dtype for dtype in RECORD_DTYPES}
    with body_errors(where):
        return {name: dtypes[text] for name, text in body.get("dtypes", {}).items()}


def checked_entries(path: Path, reading: Reading) -> tuple[StoredEntries, Metadata]:
    """Return the entries of a directory without faults.

    The checksums of whole files, which a conversion writes, are compared now.

    Raises:
        CorruptionError: it is damaged.
    """
    slices: Slices | None = None
    reader = reading.reader(path)
    if reading.check and CONVERSION_NAME in reader.list():
        slices = verify_checkpoint(reader, published=kind_of(path) == "checkpoint").slices
    else:
        with reader.record_faults(METADATA_NAME):
            slices = Slices(reader, read_metadata(reader.get(METADATA_NAME), METADATA_NAME))
            slices.check(whole=False)
    if reader.faults or slices is None:
        fault = reader.faults[0]
        raise CorruptionError(f"{path}: {fault.place}: {fault.what}; nothing was converted")
    return StoredEntries(path, slices), slices.metadata


def model_part(entries: StoredEntries, metadata: Metadata, masters: Collection[str]) -> Contents:
    """Return the contents of the model in a published checkpoint, without the masters.

    Args:
        entries: the entries that are not in pages.
        metadata: of the whole checkpoint.
        masters: the names of the paged parameters in the model.
    """
    paths = {key: entries.path_of(key) for key in metadata.state_dict_metadata}
    model, _ = _model_paths(paths, masters)
    contents = _of_model(entries, metadata, model, masters)
    return replace(contents, entries=[replace(e, state=BUFFER) for e in contents.entries])


def _model_paths(paths: Paths, masters: Collection[str]) -> tuple[Paths, Paths]:
    """Return the values of the model, with paths from the name on, and all other values."""
    bare = any(path[0] in masters for path in paths.values() if len(path) == 1)
    prefixed = not bare and any(path[0] == "model" and path[1:] for path in paths.values())
    if masters and not bare and not prefixed:  # Published with another prefix.
        heads = [path[0] for path in paths.values() if path[-1] in masters and len(path) == 2]
        model_heads = set(heads[:1])
    else:
        model_heads = {"model"}
    model: dict[str, EntryPath] = {}
    others: dict[str, EntryPath] = {}
    for key, path in paths.items():
        if path_text(path).startswith("optimizer.") or key in (STEP_KEY, EXTRA_KEY):
            others[key] = path
        elif prefixed or (masters and not bare):
            (model if path[0] in model_heads and path[1:] else others)[key] = path
        elif str(path[0]).split(".")[0] in TRAINER:
            others[key] = path
        else:
            model[key] = ("", *path)
    return {key: path[1:] for key, path in model.items()}, others


def _of_model(
    entries: StoredEntries, metadata: Metadata, model: Paths, masters: Collection[str]
) -> Contents:
    """Return the tensors and other values of the model, tied ones once."""
    places: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for index, info in metadata.storage_data.items():
        places[index.fqn].add((info.relative_path, info.offset))
    found: list[Entry] = []
    first_at: dict[frozenset[tuple[str, int]], str] = {}
    aliases: dict[str, str] = {}
    leaves: dict[str, list[tuple[EntryPath, Any]]] = defaultdict(list)
    lost = []
    for key, (head, *inner) in model.items():
        name = str(head)
        tensor = metadata.state_dict_metadata[key]
        if inner or not isinstance(tensor, TensorStorageMetadata):
            try:
                leaves[name].append((tuple(inner), entries.value(key)))
            except CheckpointError as error:
                lost.append(f"{key!r}: {error}")
            continue
        place = frozenset(places[key])
        first = first_at.setdefault(place, name) if tensor.size.numel() else name
        if first != name:
            aliases[name] = first
        elif name not in masters:
            found.append(stored_entry(entries, key, name, MASTER))
    try:
        values = {name: nested(items) for name, items in leaves.items()}
    except (ValueError, TypeError) as error:
        raise CorruptionError(f"{entries.path}: paths of .metadata do not fit together") from error
    return Contents(source="dcp", entries=found, values=values, aliases=aliases, lost=lost)


def stored_entry(entries: StoredEntries, key: str, name: str, state: str) -> Entry:
    """Return the entry of a tensor of a DCP directory."""
    stored = entries.tensor(key)
    assert stored is not None

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        entries.read(entries.parts(key, chunk, target))

    return Entry(
        parameter=name,
        state=state,
        dtype=stored.properties.dtype,
        shape=tuple(stored.size),
        read=read,
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a state."""

    key: str


def _optimizer_states(
    entries: StoredEntries, paths: Paths
) -> tuple[list[Entry], dict[str, dict[str, Any]], list[str]]:
    """Return tensors and other parts of the optimizer state, and values that are not carried."""
    leaves: dict[str, list[tuple[EntryPath, Any]]] = defaultdict(list)
    lost = []
    for key, path in paths.items():
        if not path_text(path).startswith("optimizer.state."):
            continue
        name = parameter_of(path_text(path), path)
        inner = path[3:] if path[:2] == ("optimizer", "state") else ()
        inner = inner or (path_text(path).rpartition(".")[2],)
        if not is_key(inner[0]):
            lost.append(f"{inner[0]!r} of {name!r}: not the name of a state")
            continue
        is_value = entries.tensor(key) is None or path_text(inner) in NUMBERS
        leaves[name].append((inner, entries.value(key) if is_value else _Stored(key)))
    states: list[Entry] = []
    scalars: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, found in leaves.items():
        try:
            parts = parts_of(nested(found))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{entries.path}: the paths of the state of {name!r} do not make nested dicts and "
                "lists"
            ) from error
        for state, part in parts.items():
            if state in NUMBERS and (number := as_number(part)) is not None:
                scalars[name][state] = number
            elif isinstance(part, _Stored):
                states.append(stored_entry(entries, part.key, name, RENAMED.get(state, state)))
            elif isinstance(part, torch.Tensor) and part.numel() == 1:
                scalars[name][state] = part.item()
            elif isinstance(part, int | float) or (empty_kind(part) and state not in NUMBERS):
                scalars[name][state] = part
            else:
                lost.append(f"{state} of {name!r}: a {type(part).__name__} is not a state")
    return states, scalars, lost


def _groups(
    entries: StoredEntries,
    paths: Paths,
    order: Sequence[str],
    states: Sequence[Entry],
    flags: Mapping[str, bool],
) -> list[Group]:
    """Return the param groups, from their numbers, else from the keys by parameter.

    Args:
        entries: of the directory.
        paths: key -> path of all values that are not of the model.
        order: names of parameters in the order of the model; others follow in the order of keys.
        states: of the optimizer.
        flags: parameter -> whether it is Muon's, if its state says so.
    """
    numbered: dict[int, list[tuple[EntryPath, Any]]] = defaultdict(list)
    by_name: dict[str, list[tuple[EntryPath, Any]]] = defaultdict(list)
    for key, path in paths.items():
        if path[:2] == ("optimizer", "param_groups") and len(path) > 3:
            numbered[int(path[2])].append((path[3:], entries.value(key)))
    for key, path in paths.items() if not numbered else ():
        if path_text(path).startswith("optimizer.param_groups."):
            head = str(path[1]).removeprefix("param_groups.")
            name, _, last = head.rpartition(".")
            by_name[name].append(((last, *path[2:]), entries.value(key)))
    names_of_states: dict[str, set[str]] = defaultdict(set)
    for entry in states:
        names_of_states[entry.parameter].add(entry.state)
    groups: list[tuple[dict[str, Any], list[str]]] = []
    try:
        for _, leaves in sorted(numbered.items()):
            values = nested(leaves)
            groups.append((values, list(values.pop("params"))))
        texts: dict[str, int] = {}
        position = {name: number for number, name in enumerate(dict.fromkeys(order))}
        for name in sorted(by_name, key=lambda name: position.get(name, len(position))):
            values = nested(by_name[name])
            text = json.dumps(tagged_json.encode(values))
            if text not in texts:
                texts[text] = len(groups)
                groups.append((values, []))
            groups[texts[text]][1].append(name)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{entries.path}: the param groups have another form") from error
    for values, _ in groups:
        values.pop("param_names", None)
    return [
        group
        for values, names in groups
        for group in standard_groups(values, names, names_of_states, flags)
    ]


def _others(paths: Paths) -> Iterator[str]:
    """Yield the values that are neither of the model nor of its optimizer."""
    known = ("optimizer.state.", "optimizer.param_groups.")
    heads = Counter(
        str(path[0]).split(".")[0]
        for key, path in paths.items()
        if not path_text(path).startswith(known) and key not in (STEP_KEY, EXTRA_KEY)
    )
    for head, count in heads.items():
        yield f"{head!r}: {count} values of neither the model nor its optimizer"


# ------------------------------------------------------------------------------- writing


class Writer:
    """Writes a directory of one data file; records are as in published checkpoints.

    Args:
        contents: what is written.
        options: ``dtype`` and ``bare_keys`` count.

    Raises:
        CheckpointError: DCP has no record for a tensor.
    """

    def __init__(self, contents: Contents, options: Options) -> None:
        self.entries: Sequence[Entry] = contents.cast_weights(options.dtype)
        self.lost: Sequence[str] = [
            f"{part} of {name!r}: DCP has no empty dicts"
            for name, parts in contents.scalars.items()
            for part, value in parts.items()
            if empty_kind(value) == "dict"
        ]
        self._contents = contents
        self._dtypes = (
            {}
            if options.dtype is not None
            else {name: dtype_name(dtype) for name, dtype in contents.dtypes.items()}
        )
        self._prefix = "" if options.bare_keys else "model."
        taken = (*TRAINER, "optimizer", "tierstore")
        for entry in self.entries:
            if options.bare_keys and entry.parameter.split(".")[0] in taken:
                raise CheckpointError(
                    f"without a prefix, {entry.parameter!r} would be read as a value of the "
                    "trainer: convert without --bare-keys"
                )
            if entry.dtype not in RECORD_DTYPES or len(entry.shape) > RECORD_DIMENSIONS_MAX:
                raise CheckpointError(
                    f"{entry.state} of {entry.parameter!r} is {dtype_name(entry.dtype)} "
                    f"{list(entry.shape)}, for which no record is written: leave it out with "
                    "--exclude"
                )
        self.nbytes = sum(
            record_nbytes(chunk.sizes, entry.dtype)
            for entry in self.entries
            for chunk in _record_chunks(entry)
        ) + 4096 * (len(self.entries) + len(contents.scalars) + 256)

    @contextmanager
    def writing(self, directory: Path) -> Iterator[Callable[[Piece], None]]:
        """Write the data file as pieces come, then the file with all keys."""
        with open_written(directory / _DATA_NAME) as file:
            records = _Records(file, self.entries, self._add_record)
            self._catalog = Catalog(records.append, _DATA_NAME)
            yield records.put
            self._add_values()
        metadata = pickle.dumps(self._catalog.metadata)
        (directory / METADATA_NAME).write_bytes(metadata)
        files = {_DATA_NAME: (records.nbytes, records.digest)}
        files[METADATA_NAME] = (len(metadata), xxhash.xxh3_128(metadata))
        body = {
            name: {"nbytes": nbytes, "xxh3_128": digest.hexdigest()}
            for name, (nbytes, digest) in files.items()
        }
        about = {
            "source": self._contents.source,
            "notes": list(self._contents.notes),
            "dtypes": self._dtypes,
        }
        (directory / CONVERSION_NAME).write_bytes(seal("conversion", {"files": body, **about}))

    def _add_record(self, entry: Entry, chunk: Chunk, offset: int) -> None:
        """Add a record to the catalog, under all names of a tied tensor."""
        info = _StorageInfo(_DATA_NAME, offset, record_length(chunk.sizes, entry.dtype))
        for path in self._paths(entry):
            self._catalog.add_chunk(path, entry.dtype, entry.shape, chunk, info)

    def _paths(self, entry: Entry) -> Sequence[tuple[str | int, ...]]:
        if entry.state not in (MASTER, BUFFER):
            return state_paths([entry.parameter], entry.state, self._prefix)
        further = (
            alias for alias, name in self._contents.aliases.items() if name == entry.parameter
        )
        return state_paths([entry.parameter, *further], MASTER, self._prefix)

    def _add_values(self) -> None:
        """Add everything but tensors with elements."""
        contents, catalog = self._contents, self._catalog
        for entry in self.entries:
            if not entry.nbytes:
                empty = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                catalog.add_value(self._paths(entry), empty, ("empty", entry.key))
        tensors: dict[str, list[str]] = defaultdict(list)
        for entry in self.entries:
            if entry.state not in (MASTER, BUFFER):
                tensors[entry.parameter].append(entry.state)
        for name, parts in contents.scalars.items():
            catalog.add_rest(name, parts, tensors[name])
        add_hyperparameters(
            catalog, [(group.parameters, group.hyperparameters) for group in contents.groups]
        )
        for name, value in contents.values.items():
            catalog.add_value([model_path(self._prefix, name)], value, ("value", name))
        if contents.step is not None:
            catalog.add_value([("tierstore", "step")], contents.step, STEP_KEY)
        if contents.extra is not None:
            text = json.dumps(tagged_json.encode(contents.extra))
            catalog.add_value([("tierstore", "extra")], text, EXTRA_KEY)


def _record_chunks(entry: Entry) -> Iterator[Chunk]:
    """Yield the chunks of an entry that have a record each, in row-major order."""
    return pieces(entry.shape, entry.dtype.itemsize, RECORD_DATA_BYTES_MAX)


class _Records:
    """A file of records that are appended one after the other.

    Args:
        file: the file.
        entries: the entries in the order in which their pieces come.
        begin: called with each record and its offset.
    """

    def __init__(
        self,
        file: BinaryIO,
        entries: Sequence[Entry],
        begin: Callable[[Entry, Chunk, int], None],
    ) -> None:
        self._file = file
        self._todo = ((entry, chunk) for entry in entries for chunk in _record_chunks(entry))
        self._begin = begin
        self._bytes_left = 0  # Of the data of the record that is being written.
        self._end = b""  # What follows the data.
        self.nbytes = 0
        self.digest = xxhash.xxh3_128()

    def append(self, data: bytes | memoryview) -> int:
        """Append bytes; return their offset."""
        offset = self.nbytes
        self._file.write(data)
        self.digest.update(data)
        self.nbytes += len(data)
        return offset

    def put(self, piece: Piece) -> None:
        """Append the next piece, with the framing of records that begin or end in it."""
        data = bytes_of(piece.tensor)
        while data:
            if not self._bytes_left:
                entry, chunk = next(self._todo)
                self._begin(entry, chunk, self.append(record_prefix(chunk.sizes, entry.dtype)))
                self._bytes_left = chunk.numel * entry.dtype.itemsize
                trailer = record_trailer(chunk.sizes, entry.dtype)
                padding = record_nbytes(chunk.sizes, entry.dtype) - record_length(
                    chunk.sizes, entry.dtype
                )
                self._end = trailer + bytes(padding)
            taken = data[: self._bytes_left]
            self.append(taken)
            data = data[len(taken) :]
            self._bytes_left -= len(taken)
            if not self._bytes_left:
                self.append(self._end)
