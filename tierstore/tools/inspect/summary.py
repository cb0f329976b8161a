"""Summary of a run or a checkpoint, from manifests and ``.metadata`` alone.

A summary can be made while the run is in use, because a manifest never changes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tierstore.checkpoint.whole_mark import is_marked_whole
from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.dcp_metadata import read_metadata
from tierstore.inspection.kinds import kind_of
from tierstore.inspection.reader import Reader
from tierstore.inspection.run_reader import (
    Rank,
    committed_in,
    holder_of,
    missing_ranks,
    newest_commit,
    read_published,
    read_ranks,
)
from tierstore.layout.encodings import MASTER
from tierstore.layout.parameters import dtype_name
from tierstore.run.commit import Commit
from tierstore.run.file_names import METADATA_NAME, Revision
from tierstore.run.tagged_json import encode
from tierstore.tools.convert.contents import Contents
from tierstore.tools.convert.convert import read_sources
from tierstore.tools.convert.entries import BUFFER, Entry
from tierstore.tools.inspect.folder import commit_times, count_files, kind_at

# A run in use may remove manifests that are being read, except the last two.
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSummary:
    """One parameter and its states."""

    group: int | None
    """Number of its param group; None if the file has none for it."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    states: Mapping[str, str]
    """Name of a state, the master included -> dtype."""
    nbytes: int
    """Bytes of all states together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSummary:
    """One tensor that ``.metadata`` names."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: int
    nbytes: int


@dataclass(slots=True, kw_only=True)
class Summary:
    """The content of a run or a checkpoint."""

    path: str
    kind: str
    """"run", "checkpoint", "plain checkpoint" of DCP that tierstore did not publish, or the foreign
    format, as "deepspeed checkpoint"."""
    step: int | None = None
    """The committed step; None if nothing was committed, or no file names it."""
    epoch: int = 0
    """Number of times that the run was rewound before that step."""
    committed_at: float | None = None
    """Time at which a run committed the step, in seconds since 1970."""
    steps_per_hour: float | None = None
    """Between the commits since the run was last opened that are still there; None if one is."""
    run_id: str | None = None
    attempt: str | None = None
    world_size: int | None = None
    page_bytes: int | None = None
    pages: int = 0
    """Number of pages of all ranks."""
    hyperparameters: Sequence[Mapping[str, Any]] = ()
    """One dict for each group, in the form of manifests: a tuple is {"$tuple": [...]}."""
    parameters: list[ParameterSummary] = field(default_factory=list)
    state_bytes: dict[str, int] = field(default_factory=dict)
    """State -> bytes of all parameters together."""
    tensors: Sequence[TensorSummary] = ()
    """Tensors that ``.metadata`` names, in a checkpoint."""
    objects: int = 0
    """Number of other values that ``.metadata`` names."""
    marked_whole: bool | None = None
    """True if all ranks have marked the checkpoint as whole after publishing; None if tierstore did
    not publish it."""
    directories: dict[str, float] = field(default_factory=dict)
    """Directory of a striped run -> its share of the pages."""
    files: int = 0
    file_bytes: int = 0
    shared_files: int = 0
    """Number of files that have another name, here or elsewhere, and share the space."""
    shared_bytes: int = 0
    in_use_by: str | None = None
    notes: list[str] = field(default_factory=list)
    lost: Sequence[str] = ()
    """Things that a conversion of a foreign checkpoint does not carry, one sentence each."""


def summarize(path: str | os.PathLike[str]) -> Summary:
    """Return the content of a run or a checkpoint, of tierstore or any format that convert() reads.

    Raises:
        CheckpointError: ``path`` is neither, or this user may not read it.
        CorruptionError: no file that describes the content is whole; verify() names the faults.
        StorageError: the disk cannot list ``path``.
    """
    root = Path(path)
    kind = kind_at(root) or kind_of(root)
    if kind == "run":
        summary = _summarize_run(root)
    elif kind in ("checkpoint", "plain checkpoint"):
        summary = _summarize_checkpoint(root, kind)
    else:
        summary = _summarize_foreign(root, kind)
    for directory in (root, *map(Path, summary.directories)):
        if directory == root or root not in directory.parents:
            found = count_files(directory)
            summary.files += found.files
            summary.file_bytes += found.nbytes
            summary.shared_files += found.shared_files
            summary.shared_bytes += found.shared_bytes
    return summary


def _summarize_run(root: Path) -> Summary:
    for _ in range(_TRIES):
        reader = Reader(root)
        ranks = read_ranks(reader)
        newest = newest_commit(ranks)
        has_commits = any(rank.commits for rank in ranks)
        if not reader.faults and (newest is not None or not has_commits):
            break
    summary = Summary(
        path=str(root),
        kind="run",
        step=newest.step if newest else None,
        in_use_by=holder_of(reader),
    )
    for rank in ranks:
        if rank.identity is not None:
            summary.run_id, summary.world_size = rank.identity.run_id, rank.identity.world_size
            summary.page_bytes = rank.identity.page_bytes
        if rank.striping is not None:
            weights = rank.striping.weights
            directories = (str(root / rank.folder), *rank.striping.directories[1:])
            shares = [weight / sum(weights) for weight in weights]
            summary.directories |= dict(zip(directories, shares, strict=True))
    missing = missing_ranks(ranks)
    if missing is not None:
        reader.faults.append(missing)
    if newest is not None:
        _add_commits(summary, committed_in(reader, ranks, newest))
        _add_times(summary, root, ranks[0], newest)
    elif has_commits:
        reader.fault(str(root), "has no commit that is whole on all ranks")
        _require_good(reader)
    else:
        summary.notes.append("nothing was committed yet")
    _note_faults(summary, reader)
    return summary


def _add_times(summary: Summary, root: Path, rank: Rank, newest: Revision) -> None:
    """Add when the run committed, and how fast, by the times of the files of one rank."""
    times = commit_times(root, rank)
    summary.committed_at = times.get(newest)
    attempt = rank.manifests[newest].attempt  # A run may have been stopped before it.
    since = (r for r in times if rank.manifests[r].attempt == attempt and r.epoch == newest.epoch)
    before = min(since, default=newest)
    if newest in times and newest.step > before.step and times[newest] > times[before]:
        hours = (times[newest] - times[before]) / 3600
        summary.steps_per_hour = (newest.step - before.step) / hours


def _summarize_foreign(root: Path, kind: str) -> Summary:
    summary = Summary(path=str(root), kind=f"{kind} checkpoint")
    try:
        contents = read_sources([root])
    except CheckpointError as error:  # Of the optimizer, whose parameters may have no names.
        contents = read_sources([root], optimizer=False)
        summary.notes.append(f"the optimizer cannot be read: {error}")
    summary.step, summary.lost = contents.step, contents.lost
    summary.notes += contents.notes
    # The Trainer of transformers writes its checkpoints into the directory of the final weights.
    within = sorted(path.name for path in root.glob("checkpoint-*") if kind_at(path) is not None)
    if within:
        summary.notes.append(f"files of checkpoints in it count: inspect {', '.join(within)}")
    summary.hyperparameters = [
        {key: _encoded(value) for key, value in group.hyperparameters.items()}
        for group in contents.groups
    ]
    groups = {name: n for n, group in enumerate(contents.groups) for name in group.parameters}
    entries: dict[str, list[Entry]] = {}
    for entry in contents.entries:
        entries.setdefault(entry.parameter, []).append(entry)
        state = _state_of(entry, contents)
        summary.state_bytes[state] = summary.state_bytes.get(state, 0) + entry.nbytes
    for name, states in entries.items():
        weight = contents.weights.get(name, states[0])
        summary.parameters.append(
            ParameterSummary(
                group=groups.get(name),
                name=name,
                shape=weight.shape,
                dtype=dtype_name(contents.dtypes.get(name, weight.dtype)),
                states={_state_of(one, contents): dtype_name(one.dtype) for one in states},
                nbytes=sum(one.nbytes for one in states),
            )
        )
    return summary


def _state_of(entry: Entry, contents: Contents) -> str:
    """Return the name of a state; a master is the weight if the model has the same dtype."""
    if entry.state == BUFFER:
        return "buffer"
    is_weight = entry.state == MASTER and entry.parameter not in contents.dtypes
    return "weight" if is_weight else entry.state


def _encoded(value: object) -> Any:
    """Return a value in the form of manifests, or as text if it has none."""
    try:
        return encode(value)
    except (TypeError, ValueError):
        return str(value)


def _summarize_checkpoint(root: Path, kind: str) -> Summary:
    reader = Reader(root)
    summary = Summary(path=str(root), kind=kind)
    if kind == "checkpoint":
        marker, commits = read_published(reader, reader.list())
        summary.marked_whole = is_marked_whole(marker, reader.get)
        _add_commits(summary, commits)
    with reader.record_faults(METADATA_NAME):
        _add_metadata(summary, read_metadata(reader.get(METADATA_NAME), METADATA_NAME))
    if not summary.parameters and not summary.tensors and not summary.objects:
        _require_good(reader)
    _note_faults(summary, reader)
    return summary


def _require_good(reader: Reader) -> None:
    if reader.faults:
        fault = reader.faults[0]
        raise CorruptionError(f"{reader.root}: {fault.place} {fault.what}")


def _note_faults(summary: Summary, reader: Reader) -> None:
    summary.notes += [f"{fault.place} {fault.what}" for fault in reader.faults]


def _add_commits(summary: Summary, commits: Sequence[Commit]) -> None:
    if not commits:
        return
    first = commits[0].manifest
    summary.step, summary.epoch = first.step, first.epoch
    summary.run_id, summary.attempt = first.run_id, first.attempt
    summary.world_size, summary.page_bytes = first.world_size, first.page_bytes
    summary.pages = sum(len(commit.manifest.entries) for commit in commits)
    summary.hyperparameters = first.hyperparameters
    for number, group in enumerate(commits[0].groups):
        for spec in group:
            summary.parameters.append(
                ParameterSummary(
                    group=number,
                    name=spec.name,
                    shape=spec.shape,
                    dtype=dtype_name(spec.dtype),
                    states={tensor.name: dtype_name(tensor.dtype) for tensor in spec.stored},
                    nbytes=spec.nbytes,
                )
            )
            for tensor in spec.stored:
                nbytes = math.prod(spec.state_shape(tensor.name)) * tensor.dtype.itemsize
                known = summary.state_bytes.get(tensor.name, 0)
                summary.state_bytes[tensor.name] = known + nbytes


def _add_metadata(summary: Summary, metadata: Metadata) -> None:
    summary.tensors = [
        TensorSummary(
            key=key,
            shape=tuple(item.size),
            dtype=dtype_name(item.properties.dtype),
            chunks=len(item.chunks),
            nbytes=math.prod(item.size) * item.properties.dtype.itemsize,
        )
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    ]
    summary.objects = len(metadata.state_dict_metadata) - len(summary.tensors)
