"""Conversion of checkpoints: read, filter, write under a temporary name, verify, name."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import xxhash

from tierstore.errors import BudgetError, CheckpointError, CorruptionError, NotCarriedError
from tierstore.layout.encodings import MASTER
from tierstore.storage.paths import storage_errors
from tierstore.tools.convert.contents import (
    Contents,
    merge,
    require_numbers,
    with_counts,
    without_first_states,
)
from tierstore.tools.convert.conventions import as_average, require_own_rules, with_whole_values
from tierstore.tools.convert.destination import (
    make_durable,
    refuse_destination,
    require_room,
    take_name,
    temporary_directory,
)
from tierstore.tools.convert.entries import BUFFER, Entry
from tierstore.tools.convert.formats import FORMATS, Format, Writer, recognized
from tierstore.tools.convert.options import Options, Reading
from tierstore.tools.convert.parts_by_name import require_all_parts
from tierstore.tools.convert.pipeline import MEMORY_MIN, bytes_of, stream
from tierstore.units import format_bytes, parse_bytes

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The result of a conversion, or of a dry run."""

    source: str
    """The formats of the sources."""
    to: str
    path: str
    """The destination."""
    step: int | None
    entries: Sequence[Entry]
    """All tensors as they are written."""
    nbytes: int
    """Bytes of all tensors."""
    needed_bytes: int
    """About how many bytes the destination takes."""
    digests: Mapping[tuple[str, str], str]
    """Parameter and state -> xxh3_128 of the elements in row-major order, in the source stream and
    in the destination; empty after a dry run."""
    notes: Sequence[str]
    """Facts that a user should know."""
    lost: Sequence[str]
    """Values that are not carried, each as ``name: reason``."""


def convert(
    sources: PathLike | Sequence[PathLike],
    destination: PathLike,
    *,
    to: str,
    from_: str | None = None,
    memory: int | str = "2GiB",
    only: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    shard_size: int | str | None = None,
    bare_keys: bool = False,
    momentum_convention: str | None = None,
    assume_model_order: bool = False,
    strict: bool = False,
    force: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Conversion:
    """Convert a checkpoint, or several that are parts of one, to another format.

    Tensors are equal bit for bit, unless their dtype or convention changes. The destination is
    written, flushed, read again and compared with the source, and then gets its name. An error or
    an interrupt leaves nothing of the destination.

    Args:
        sources: directories or files. No element of a tensor may be in two of them.
        destination: a directory, or for "torch" a file, that does not exist.
        to: the format to write.
        from_: the format of all sources; None: each is recognized.
        memory: most bytes of tensors in memory: an int, or a string such as "2GiB".
        only: "model" leaves out the optimizer and the step.
        include: patterns as in the shell; parameters that match none of them are left out.
            Patterns match names of the destination, and any name of a tied parameter.
        exclude: likewise; parameters that match one are left out.
        dtype: of the weights that param groups have; without param groups, of all tensors of
            floats. In a run and for "universal", the dtype of the parameters: masters stay float32.
        shard_size: about how many bytes a file of weights holds, for "safetensors".
        bare_keys: leave out "model." in the keys of the model, as torchtitan does; for "dcp".
        momentum_convention: "average" or "heavy-ball", of Muon's momentum in the sources, if
            their files do not tell.
        assume_model_order: the param groups of optimizers that were saved without names of
            parameters were filled in the order of the model. Files cannot prove this. If it is
            false, moments go to the wrong parameters.
        strict: refuse a conversion that leaves out a value of the sources.
        force: replace a checkpoint at the destination, if its format can be written and it has no
            other files.
        dry_run: write nothing and read no data, but raise the same errors about structure.
        on_progress: called with "check", "convert" or "verify", the number of bytes done,
            and of all bytes.

    Raises:
        CheckpointError: an argument or a source cannot be used; the message says what to do.
        NotCarriedError: ``strict``, and something cannot be carried.
        CorruptionError: a source is damaged, or the destination differs from the source.
        StorageError: the disk is too full, or fails.
        BudgetError: ``memory`` is too small.
    """
    paths = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    source_paths, target = [Path(path) for path in paths], Path(destination).absolute()
    budget = parse_bytes(memory)
    if budget < MEMORY_MIN:
        raise BudgetError(
            f"a conversion needs at least {format_bytes(MEMORY_MIN)} of memory, got "
            f"{format_bytes(budget)}"
        )
    format_ = _writable(to)
    _check_choice("only", only, ("model",))
    _check_choice("momentum_convention", momentum_convention, ("average", "heavy-ball"))
    if shard_size is not None and (to != "safetensors" or parse_bytes(shard_size) < 1):
        raise CheckpointError(f"shard_size must be at least 1, for safetensors: got {shard_size}")
    if bare_keys and to != "dcp":
        raise CheckpointError(f"bare_keys is for dcp, got {to!r}")
    if not source_paths:
        raise CheckpointError("name at least one source")
    old = refuse_destination(target, source_paths, force=force)
    reading = Reading(
        check=not dry_run,
        on_progress=lambda done, total: on_progress("check", done, total),
        optimizer=only != "model",
    )
    contents = _read(source_paths, from_, reading, assume_model_order=assume_model_order)
    told = contents.groups or any(entry.state == BUFFER for entry in contents.entries)
    if dtype is not None and not told:
        note = f"no param group tells parameters from buffers: all floats become {dtype}"
        contents = replace(contents, notes=[*contents.notes, note])
    if only == "model":
        contents = _only_model(contents)
    contents = _filtered(contents, include, exclude)
    if not contents.entries:
        raise CheckpointError(
            "the sources have no tensor to convert: name other sources, or change the patterns"
        )
    contents = with_whole_values(contents)
    require_numbers(contents)
    contents = as_average(with_counts(contents, of_group=to == "torch"), momentum_convention)
    if to == "tierstore":
        contents = replace(contents, notes=[*contents.notes, *require_own_rules(contents)])
    else:
        contents = without_first_states(contents)
    options = Options(
        dtype=dtype,
        shard_bytes=None if shard_size is None else parse_bytes(shard_size),
        bare_keys=bare_keys,
    )
    assert format_.write is not None
    writer = format_.write(contents, options)
    conversion = Conversion(
        source=contents.source,
        to=to,
        path=str(destination),
        step=contents.step,
        entries=writer.entries,
        nbytes=sum(entry.nbytes for entry in writer.entries),
        needed_bytes=writer.nbytes,
        digests={},
        notes=contents.notes,
        lost=[*contents.lost, *writer.lost],
    )
    if strict and conversion.lost:
        first, *others = conversion.lost
        further = f" (and {len(others)} more)" if others else ""
        raise NotCarriedError(f"not carried: {first}{further}")
    require_room(target, writer.nbytes)
    if dry_run:
        return conversion
    with temporary_directory(target, exchanged=old is not None) as directory:
        digests = _write(writer, directory, budget, conversion.nbytes, on_progress)
        reading.compare_checksums()
        make_durable(directory)
        made = directory / format_.file
        _verify(made, to, writer, digests, budget, conversion.nbytes, on_progress)
        take_name(made, target, old)
    return replace(conversion, digests={e.key: digests[e.place] for e in writer.entries})


def _check_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    if value is not None and value not in choices:
        raise CheckpointError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _writable(to: str) -> Format:
    format_ = FORMATS.get(to)
    if format_ is None or format_.write is None:
        known = ", ".join(name for name, known in FORMATS.items() if known.write)
        raise CheckpointError(f"the format to write must be one of {known}, got {to!r}")
    return format_


# ------------------------------------------------------------------------------- reading


def read_sources(paths: Sequence[Path], *, optimizer: bool = True) -> Contents:
    """Return the contents of one checkpoint; of its data, nothing is read or checked.

    Raises:
        CheckpointError: it is not recognized, or makes no sense; the message says what to do.
    """
    return _read(paths, None, Reading(check=False, optimizer=optimizer), assume_model_order=False)


def _read(
    paths: Sequence[Path], from_: str | None, reading: Reading, *, assume_model_order: bool
) -> Contents:
    """Return the contents of all sources together."""
    by_format: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if from_ is not None and not path.exists():
            raise CheckpointError(f"{path} does not exist: name a checkpoint")
        by_format[from_ or recognized(path)].append(path)
    require_all_parts(path for path in paths if path.is_file())
    found: list[Contents] = []
    for name, members in by_format.items():
        known = FORMATS.get(name)
        if known is None or known.read is None:
            readable = ", ".join(name for name, known in FORMATS.items() if known.read)
            raise CheckpointError(f"the format to read must be one of {readable}, got {name!r}")
        if known.file and any(path.is_dir() for path in members):
            raise CheckpointError(f"a checkpoint of {name} is a file: name it, not its directory")
        try:
            found += known.read(members, reading)
        except NotADirectoryError as error:
            raise CheckpointError(
                f"{error.filename or members[0]} is not a directory, as a checkpoint of {name} is: "
                "name the directory, or leave out --from"
            ) from error
    return merge(found, optimizer=reading.optimizer, assume_model_order=assume_model_order)


def _only_model(contents: Contents) -> Contents:
    """Leave out the optimizer, and all values that are not of the model."""
    entries = [entry for entry in contents.entries if entry.state in (MASTER, BUFFER)]
    return replace(contents, entries=entries, groups=(), scalars={}, step=None, extra=None)


def _filtered(contents: Contents, include: Sequence[str], exclude: Sequence[str]) -> Contents:
    """Leave out the entries that the patterns exclude.

    Raises:
        CheckpointError: a pattern matches nothing.
    """
    if not include and not exclude:
        return contents
    names = {entry.parameter for entry in contents.entries} | {*contents.values, *contents.aliases}
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise CheckpointError(
                f"no tensor of the source has a name that matches {pattern!r}: use the names of "
                "the destination, which --dry-run prints"
            )

    all_names: dict[str, list[str]] = {}
    for alias, name in contents.aliases.items():
        all_names.setdefault(name, [name]).append(alias)

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(n, p) for n in all_names.get(name, [name]) for p in patterns)

    def taken(name: str) -> bool:
        return (not include or matches(name, include)) and not matches(name, exclude)

    groups = [
        replace(group, parameters=list(filter(taken, group.parameters)))
        for group in contents.groups
    ]
    return replace(
        contents,
        entries=[entry for entry in contents.entries if taken(entry.parameter)],
        groups=[group for group in groups if group.parameters],
        scalars={name: values for name, values in contents.scalars.items() if taken(name)},
        values={name: value for name, value in contents.values.items() if taken(name)},
        aliases={alias: name for alias, name in contents.aliases.items() if taken(name)},
        dtypes={name: dtype for name, dtype in contents.dtypes.items() if taken(name)},
    )


# ------------------------------------------------------------------------------- writing


def _write(
    writer: Writer,
    directory: Path,
    memory: int,
    nbytes: int,
    on_progress: Callable[[str, int, int], None],
) -> dict[tuple[str, str], str]:
    """Write all entries; return their digests."""
    with storage_errors("write", directory), writer.writing(directory) as put:
        return _digests(writer.entries, memory, put, lambda n: on_progress("convert", n, nbytes))


def _digests(
    entries: Iterable[Entry],
    memory: int,
    put: Callable[..., None],
    on_progress: Callable[[int], None],
) -> dict[tuple[str, str], str]:
    """Give all pieces of entries to ``put``, in a thread; return the digest of each entry."""
    entries = list(entries)
    digests = {entry.place: xxhash.xxh3_128() for entry in entries}
    done = 0
    with contextlib.closing(stream(entries, memory, put)) as pieces:
        for piece in pieces:
            digests[piece.entry.place].update(bytes_of(piece.tensor))
            done += piece.tensor.nbytes
            on_progress(done)
    return {key: digest.hexdigest() for key, digest in digests.items()}


def _verify(
    made: Path,
    to: str,
    writer: Writer,
    digests: Mapping[tuple[str, str], str],
    memory: int,
    nbytes: int,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Read the destination again, and compare it with the source.

    Raises:
        CorruptionError: a tensor is missing, or differs.
    """
    read = FORMATS[to].read
    assert read is not None
    contents = merge(read([made], Reading(check=False, wrapped=False)))
    found = {entry.place: entry for entry in contents.entries}
    expected = {entry.place: entry for entry in writer.entries}
    for key in expected.keys() | found.keys():
        one, other = expected.get(key), found.get(key)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            raise CorruptionError(
                f"{made}: {key[1]} of {key[0]!r} was not written as in the source: this is a "
                "fault of the converter; nothing was converted"
            )
    ordered = [found[key] for key in expected]
    again = _digests(
        ordered, memory, lambda piece: None, lambda n: on_progress("verify", n, nbytes)
    )
    for key, digest in again.items():
        if digest != digests[key]:
            raise CorruptionError(
                f"{made}: {key[1]} of {key[0]!r} differs from the source: the disk or its memory "
                "is faulty; nothing was converted"
            )
