"""Format "tierstore", read: runs and published checkpoints, whole or in parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from tierstore.checkpoint.dcp_reader import StoredEntries
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.coverage import coverage_faults
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.kinds import kind_of, refuse_in_use
from tierstore.inspection.page_file import check_page
from tierstore.inspection.reader import Fault, Reader
from tierstore.inspection.run_reader import (
    RANKS_MAX,
    Rank,
    committed_in,
    missing_ranks,
    newest_commit,
    parse_marker,
    read_published,
    read_ranks,
)
from tierstore.inspection.slices import Slices
from tierstore.inspection.verify_checkpoint import verify_checkpoint
from tierstore.layout.chunks import Chunk
from tierstore.layout.encodings import whole_blocks
from tierstore.layout.other_rules import RULE
from tierstore.layout.page_layout import Record
from tierstore.layout.parameters import ParameterSpec
from tierstore.layout.state_parts import EMPTY
from tierstore.run import tagged_json
from tierstore.run.commit import Commit
from tierstore.run.file_names import (
    MARKER_NAME,
    METADATA_NAME,
    UNPAGED_NAME,
    folder_rank,
    published_manifest,
    published_page,
)
from tierstore.run.registered import committed_step
from tierstore.tools.convert.contents import Contents, Group
from tierstore.tools.convert.dcp import model_part
from tierstore.tools.convert.entries import Entry, Read, StoredChunk, StoredFile, read_stored
from tierstore.tools.convert.options import Reading
from tierstore.tools.inspect.verify_run import check_dirty


def recognizes(path: Path) -> bool:
    """Return whether a path is a run or a published checkpoint, or a part of one."""
    if not path.is_dir():
        return False
    return any(
        folder_rank(child.name) is not None or child.name in (MARKER_NAME, published_manifest(0))
        for child in path.iterdir()
    )


class _Found(NamedTuple):
    """The commit of a rank, and where its pages are."""

    reader: Reader
    commit: Commit
    paths: Mapping[int, str | None]
    """Number of a page -> path of its file for the reader."""


def read(paths: Sequence[Path], reading: Reading) -> list[Contents]:
    """Read the parts of a run or a checkpoint, or of one run or checkpoint per pipeline stage.

    Raises:
        CorruptionError: one is damaged.
        CheckpointError: one lacks ranks, or a rank is in two parts, or nothing was committed.
        RunLockedError: a process uses a run.
    """
    kinds = {kind_of(path) for path in paths}
    if len(kinds) > 1:
        raise CheckpointError(f"{paths[0]} and the other sources are not parts of one checkpoint")
    of_run = kinds == {"run"}
    by_run: dict[str | None, list[Path]] = defaultdict(list)
    for path in paths:
        by_run[_run_id(path, of_run=of_run) if len(paths) > 1 else None].append(path)
    return [_read_parts(parts, reading, of_run=of_run) for parts in by_run.values()]


def _run_id(path: Path, *, of_run: bool) -> str | None:
    """Return the id of the run that a part belongs to; None if its files are damaged."""
    reader = Reader(path)
    if of_run:
        ids = [rank.identity.run_id for rank in read_ranks(reader) if rank.identity is not None]
    else:
        ids = [commit.manifest.run_id for commit in read_published(reader, reader.list())[1]]
    return next(iter(ids), None)


def _read_parts(paths: Sequence[Path], reading: Reading, *, of_run: bool) -> Contents:
    """Read the parts of one run or published checkpoint."""
    found = _read_runs(paths, reading) if of_run else _read_published(paths, reading)
    _require_complete([commit for _, commit, _ in found], paths)
    if of_run:
        groups = found[0].commit.groups
        names = {spec.name: spec.name for group in groups for spec in group}
        return replace(_contents(found, names), wrapped=reading.wrapped)
    names, model = _unpaged(found, paths)
    paged = _contents(found, names)
    return replace(
        paged,
        entries=[*paged.entries, *model.entries],
        values=model.values,
        aliases=model.aliases,
        lost=model.lost,
    )


# --------------------------------------------------------------------------------- runs


def _read_runs(paths: Sequence[Path], reading: Reading) -> list[_Found]:
    """Return the newest commit of all ranks in some run directories."""
    readers = [Reader(path, reading.on_progress) for path in paths]
    ranks: list[tuple[Reader, Rank]] = []
    for reader in readers:
        refuse_in_use(reader)
        ranks += [(reader, rank) for rank in read_ranks(reader)]
        _raise_fault(reader, reader.faults)
    _refuse_rank_twice([rank.rank for _, rank in ranks])
    missing = missing_ranks([rank for _, rank in ranks])
    if missing is not None:
        raise CheckpointError(f"{paths[0]}: {missing.place} {missing.what}, or name all of them")
    newest = newest_commit([rank for _, rank in ranks])
    if newest is None:
        raise CheckpointError(f"{paths[0]}: no step was committed by all ranks")
    found = []
    for reader, rank in ranks:
        check_dirty(reader, rank, newest)
        for commit in committed_in(reader, [rank], newest):
            paths_of_pages = {page.number: rank.path(page) for page in commit.pages()}
            found.append(_Found(reader, commit, paths_of_pages))
    if reading.check:
        _check_pages(found)
    for reader in readers:
        refuse_in_use(reader)
        _raise_fault(reader, reader.faults)
    return found


def _check_pages(found: Sequence[_Found]) -> None:
    """Compare all pages with their checksums."""
    pages = [
        (reader, paths[page.number], page)
        for reader, commit, paths in found
        for page in commit.pages()
    ]
    for reader, _, page in pages:
        reader.expect(page.layout.nbytes)
    for reader, path, page in pages:
        if path is not None:
            check_page(reader, path, page)


# --------------------------------------------------------------------------- checkpoints


def _read_published(paths: Sequence[Path], reading: Reading) -> list[_Found]:
    """Return the commits of all ranks in the parts of a published checkpoint."""
    present = {path: set(Reader(path).list()) for path in paths}
    _refuse_absent_ranks(paths, set().union(*present.values()))
    found = []
    for path in paths:
        reader = Reader(path, reading.on_progress)
        elsewhere = set().union(*present.values()) - present[path]
        contents = verify_checkpoint(reader, published=True)
        _raise_fault(reader, [fault for fault in reader.faults if fault.place not in elsewhere])
        for commit in contents.commits:
            rank = commit.manifest.rank
            numbers = commit.manifest.entries
            pages = {number: published_page(rank, number) for number in numbers}
            found.append(_Found(reader, commit, pages))
    _refuse_rank_twice([commit.manifest.rank for _, commit, _ in found])
    return found


def _refuse_absent_ranks(paths: Sequence[Path], names: Collection[str]) -> None:
    """Refuse parts of a checkpoint that lack all files of a rank; other files are verified."""
    marker = None
    reader = Reader(paths[0])
    with reader.record_faults(MARKER_NAME):
        marker = reader.parse(MARKER_NAME, parse_marker)
    present = {folder_rank(name.partition(".")[0]) for name in names}
    world_size = min(marker["world_size"], RANKS_MAX) if marker else 0
    absent = sorted(set(range(world_size)) - present)
    if absent:
        raise CheckpointError(
            f"{paths[0]} has no file of ranks {absent[:8]} of {world_size}: name all parts of the "
            "checkpoint"
        )


def _unpaged(found: Sequence[_Found], paths: Sequence[Path]) -> tuple[dict[str, str], Contents]:
    """Return the names of the parameters in the model, and the other contents of the model."""
    part = next((path for path in paths if (path / UNPAGED_NAME).exists()), None)
    if part is None:
        raise CheckpointError(
            f"{paths[0]} lacks the file {UNPAGED_NAME}, which is in the part of rank 0: name all "
            "parts of the checkpoint"
        )
    reader = Reader(part)
    metadata = read_metadata(reader.get(METADATA_NAME), METADATA_NAME)
    slices = Slices(reader, _only_unpaged(metadata))
    slices.check(whole=False)
    _raise_fault(reader, reader.faults)
    entries = StoredEntries(part, slices)
    names: dict[str, str] = {}
    for number, group in enumerate(found[0].commit.groups):
        members = entries.value(f"optimizer.param_groups.{number}.params")
        if not isinstance(members, list) or len(members) != len(group):
            raise CorruptionError(f"{part}: .metadata is of another commit than the manifests")
        names |= {spec.name: str(name) for spec, name in zip(group, members, strict=True)}
    return names, model_part(entries, metadata, set(names.values()))


def _only_unpaged(metadata: Metadata) -> Metadata:
    """Return the metadata of the values that are in the file UNPAGED_NAME."""
    places: dict[str, set[str]] = defaultdict(set)
    for index, info in metadata.storage_data.items():
        places[index.fqn].add(info.relative_path)
    kept = {key for key, files in places.items() if files == {UNPAGED_NAME}}
    return replace(
        metadata,
        state_dict_metadata={k: v for k, v in metadata.state_dict_metadata.items() if k in kept},
        storage_data={i: info for i, info in metadata.storage_data.items() if i.fqn in kept},
    )


# ------------------------------------------------------------------------------- of both


def _refuse_rank_twice(ranks: Sequence[int]) -> None:
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        raise CheckpointError(f"rank {twice} is in two of the sources: name each part once")


def _require_complete(commits: Sequence[Commit], paths: Sequence[Path]) -> None:
    """Refuse ranks of different commits, and commits that leave elements out."""
    first = commits[0].manifest
    for commit in commits:
        other = commit.manifest
        if (other.run_id, other.attempt, other.revision) != (
            *(first.run_id, first.attempt, first.revision),
        ):
            raise CheckpointError(
                f"rank {other.rank} is of step {other.step} of run {other.run_id}, rank "
                f"{first.rank} of step {first.step} of run {first.run_id}: name parts of one "
                "checkpoint"
            )
    for fault in coverage_faults(sorted(commits, key=lambda commit: commit.manifest.rank)):
        raise CorruptionError(f"{paths[0]}: {fault.place} {fault.what}")


def _raise_fault(reader: Reader, faults: Sequence[Fault]) -> None:
    if faults:
        more = f" ({len(faults) - 1} further faults)" if faults[1:] else ""
        raise CorruptionError(
            f"{reader.root}: {faults[0].place}: {faults[0].what}{more}; nothing was converted"
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """A record, and the file that it is in."""

    file: StoredFile
    record: Record


def _contents(found: Sequence[_Found], names: Mapping[str, str]) -> Contents:
    """Return what the pages and manifests hold."""
    first = next(commit for _, commit, _ in found if commit.manifest.rank == 0)
    places: dict[tuple[str, str], list[_Place]] = defaultdict(list)
    for reader, commit, paths in found:
        for page in commit.pages():
            file = StoredFile(reader, paths[page.number] or "")
            for record in (r for section in page.layout.sections for r in section.records):
                if not record.is_copy:
                    places[record.parameter.name, record.state].append(_Place(file, record))
    specs = [spec for group in first.groups for spec in group]
    entries = [
        Entry(
            parameter=names[spec.name],
            state=state,
            dtype=dtype,
            shape=spec.state_shape(state),
            read=_read(spec, state, {of.name: places[spec.name, of.name] for of in spec.stored}),
        )
        for spec in specs
        for state, dtype in spec.all_states
    ]
    hyperparameters = [
        {key: value for key, value in tagged_json.decode(saved).items() if key != RULE}
        for saved in first.manifest.hyperparameters
    ]
    parts = {
        spec.name: {
            **first.scalars.get(spec.name, {}),
            **{state: copy(EMPTY[kind]) for state, kind in spec.empty},
        }
        for spec in specs
    }
    committed = committed_step([commit.manifest for _, commit, _ in found], rank=0, world_size=1)
    return Contents(
        source="tierstore",
        entries=entries,
        groups=[
            Group(hyperparameters=values, parameters=[names[spec.name] for spec in group])
            for values, group in zip(hyperparameters, first.groups, strict=True)
        ],
        scalars={names[name]: values for name, values in parts.items() if values},
        dtypes={names[spec.name]: spec.dtype for spec in specs if not spec.owns_master},
        cuts={
            names[spec.name]: {"elementwise": spec.elementwise, "unit": spec.unit} for spec in specs
        },
        step=first.manifest.step,
        extra=committed.states or None,
        lost=[
            f"the state {name!r}: the ranks have committed different values"
            for name in committed.unequal
        ],
    )


def _read(spec: ParameterSpec, state: str, places: Mapping[str, Sequence[_Place]]) -> Read:
    """Return the function that reads the values of a state.

    Args:
        spec: of the parameter.
        state: the state.
        places: name of a stored tensor -> its records.
    """

    def stored(name: str, dtype: torch.dtype) -> Read:
        return read_stored(
            dtype,
            [StoredChunk(p.record.chunk, p.file, p.record.data_offset) for p in places[name]],
        )

    encoding = spec.encoding(state)
    if encoding is None:
        return stored(state, dict(spec.all_states)[state])
    reads = {tensor: stored(tensor.name, tensor.dtype) for tensor in encoding.stored(state)}

    def read(chunk: Chunk, target: torch.Tensor) -> None:
        around, tensors = whole_blocks(spec.shape, chunk), {}
        for tensor, read_one in reads.items():
            place = tensor.chunk(around)
            tensors[tensor.name] = torch.empty(place.sizes, dtype=tensor.dtype, device="cpu")
            read_one(place, tensors[tensor.name])
        target.copy_(chunk.within(around).select(encoding.over(state, tensors).read()))

    return read
