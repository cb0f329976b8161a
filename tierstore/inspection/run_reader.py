"""The commits of a run or a checkpoint, read without a store and without changing any."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Reader, wrong_name
from tierstore.run.commit import Commit
from tierstore.run.file_names import (
    IDENTITY_NAME,
    MARKER_NAME,
    STRIPING_NAME,
    Revision,
    folder_rank,
    layout_name,
    manifest_revision,
    page_file,
    published_layout,
    published_manifest,
)
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest, RunIdentity
from tierstore.run.recovery import newest_in_common, read_manifest
from tierstore.run.sealed import body_errors, is_count, require, unseal
from tierstore.run.striping import Striping, stripe
from tierstore.storage.checks import LOCK_NAME
from tierstore.storage.paths import OPEN_FLAGS

_STATE_BYTES_MAX = 2**50
"""Larger than any state; a larger number is not taken seriously."""

_RANKS_MAX = 10**5


@dataclass(slots=True)
class Rank:
    """What the folder of one rank of a run holds."""

    rank: int
    folder: str
    identity: RunIdentity | None = None
    manifests: dict[Revision, Manifest] = field(default_factory=dict)
    """The manifests that are whole."""
    names: Sequence[str] = ()
    """Names of everything in the folder."""
    striping: Striping | None = None
    """The striping of its pages over several directories, if there is one."""
    page_folders: Sequence[str | None] = ()
    """The folder of each page of one round; None for a folder that cannot be read."""

    def page_path(self, page: int, slot: str) -> str | None:
        """Return the path of a page file for a Reader; None if its folder cannot be read."""
        folder = self.page_folders[page % len(self.page_folders)]
        return None if folder is None else f"{folder}/{page_file(page, slot)}"

    @property
    def commits(self) -> dict[str, Revision]:
        """Name -> revision of each manifest, whole or not."""
        return commits_in(self.names)

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds a run; a job that was refused may leave an empty one."""
        return IDENTITY_NAME in self.names or bool(self.commits)


def commits_in(names: Iterable[str]) -> dict[str, Revision]:
    """Return the names of manifests, with their revisions."""
    return {name: revision for name in names if (revision := manifest_revision(name))}


def read_ranks(reader: Reader) -> list[Rank]:
    """Return what the folder of each rank of a run holds; record every file with a fault.

    Raises:
        CheckpointError: the directory is not the first one of a run; the message names that.
    """
    ranks = []
    for folder in reader.list():
        number = folder_rank(folder)
        if number is None:
            continue
        rank = Rank(number, folder)
        with reader.record_faults(folder):
            if (reader.root / folder).is_symlink():
                raise CorruptionError("is a link: no link is followed")
            rank.names = reader.list(folder)
            rank.page_folders = [folder]
            if STRIPING_NAME in rank.names:
                _read_striping(reader, rank)
            _read_rank(reader, rank)
            ranks.append(rank)
    world_sizes = [rank.identity.world_size for rank in ranks if rank.identity]
    world_size = max(world_sizes, default=len(ranks))
    return [rank for rank in ranks if rank.rank < world_size or rank.holds_run]


def _read_striping(reader: Reader, rank: Rank) -> None:
    """Find the folders that the pages of a rank are striped over, and allow to read them."""
    path = f"{rank.folder}/{STRIPING_NAME}"
    rank.page_folders = [None]
    with reader.record_faults(path):
        rank.striping = reader.parse(path, Striping.from_bytes)
    if rank.striping is None:
        return
    first, *others = rank.striping.directories
    if rank.striping.index:
        raise CheckpointError(
            f"{reader.root} has only pages of a run that is striped over "
            f"{len(rank.striping.directories)} directories: name the first, "
            f"{os.path.dirname(first)}"
        )
    folders: list[str | None] = [rank.folder]
    for index, directory in enumerate(others, start=1):
        folders.append(_allowed(reader, directory, rank.striping.striping_id, index))
    rank.page_folders = [folders[index] for index in stripe(rank.striping.weights)]


def _allowed(reader: Reader, directory: str, striping_id: str, index: int) -> str | None:
    """Return a further directory that is of the same striping; else record why it is not used."""
    with reader.record_faults(directory):
        reader.allow(directory)
        path = f"{directory}/{STRIPING_NAME}"
        with reader.record_faults(path):
            found = reader.parse(path, Striping.from_bytes)
            if (found.striping_id, found.index) == (striping_id, index):
                return directory
            raise CorruptionError("is of another run, or of another directory of this one")
    reader.note(f"pages of the run are striped over {directory}, which could not be read")
    return None


def _read_rank(reader: Reader, rank: Rank) -> None:
    if rank.holds_run:
        path = f"{rank.folder}/{IDENTITY_NAME}"
        with reader.record_faults(path):
            identity = reader.parse(path, RunIdentity.from_bytes)
            if identity.rank != rank.rank or identity.world_size <= rank.rank:
                raise CorruptionError(
                    f"is of rank {identity.rank} of {identity.world_size}: it does not belong here"
                )
            rank.identity = identity
    for name, revision in rank.commits.items():
        path = f"{rank.folder}/{name}"
        with reader.record_faults(path):
            rank.manifests[revision] = reader.parse(
                path,
                partial(read_manifest, revision=revision, rank=rank.rank, identity=rank.identity),
            )


def read_commits(
    reader: Reader, manifests: Sequence[Manifest], layouts: Sequence[str]
) -> list[Commit]:
    """Return the commits of the ranks whose layout is whole; record every other layout.

    Args:
        reader: of the run or checkpoint.
        manifests: of one commit, by rank.
        layouts: the name of the layout file of each rank.
    """
    commits = []
    for manifest, path in zip(manifests, layouts, strict=True):
        with reader.record_faults(path):
            layout = reader.parse(path, partial(RankLayout.from_bytes, digest=manifest.layout))
            _require_size(layout)
            commits.append(Commit(manifest=manifest, layout=layout))
    return commits


def _require_size(layout: RankLayout) -> None:
    """Refuse sizes that would take forever to lay out."""
    shards = (shard for page in layout.subgroups for shard in page.shards)
    nbytes = sum(
        shard.parameter.element_bytes * sum(chunk.numel for chunk in shard.chunks)
        for shard in shards
    )
    if nbytes > _STATE_BYTES_MAX:
        raise CorruptionError("has a right checksum but more in its pages than there can be")


def read_marker(reader: Reader) -> Mapping[str, Any]:
    """Return the content of tierstore.json in a published checkpoint.

    Raises:
        CorruptionError: it is not whole.
    """

    def parse(data: bytes, where: str) -> Mapping[str, Any]:
        body = unseal("checkpoint", data, where)
        with body_errors(where):
            files = body["files"].values()
            numbers = [body["step"], body["world_size"], *(file["nbytes"] for file in files)]
            texts = [body["run_id"], body["name"], *(file["xxh3_128"] or "" for file in files)]
            require(all(map(is_count, numbers)), all(type(text) is str for text in texts))
            require(not any(wrong_name(name) or "/" in name for name in body["files"]))
            require(body["world_size"] > 0)
        return body

    return reader.parse(MARKER_NAME, parse)


def read_published(
    reader: Reader, names: Sequence[str], marker: Mapping[str, Any] | None
) -> list[Commit]:
    """Return the commits of all ranks whose files are whole, and of one commit.

    Args:
        reader: of the checkpoint; records every other file as a fault.
        names: of everything in the checkpoint.
        marker: from read_marker(); None if that is not whole.
    """
    if marker is not None:
        ranks = range(min(marker["world_size"], _RANKS_MAX))
    else:
        ranks = range(sum(re.fullmatch(r"rank-\d{5}\.commit", name) is not None for name in names))
    manifests: list[Manifest] = []
    for rank in ranks:
        name = published_manifest(rank)
        with reader.record_faults(name):
            manifest = reader.parse(name, Manifest.from_bytes)
            commit = (manifest.run_id, manifest.world_size, *manifest.revision, manifest.attempt)
            first = manifests[0] if manifests else manifest
            run_id, world_size, step = first.run_id, first.world_size, first.step
            if marker is not None:
                run_id, world_size, step = (marker[k] for k in ("run_id", "world_size", "step"))
            expected = (run_id, world_size, step, first.number, first.attempt)
            if manifest.rank != rank or commit != expected:
                raise CorruptionError(
                    f"is of rank {manifest.rank} of {manifest.world_size}, step {manifest.step} "
                    f"of run {manifest.run_id}, attempt {manifest.attempt}; expected rank {rank} "
                    f"of {world_size}, step {step} of run {run_id}, attempt {first.attempt}"
                )
            manifests.append(manifest)
    layouts = [published_layout(manifest.rank) for manifest in manifests]
    return read_commits(reader, manifests, layouts)


def newest_commit(ranks: Sequence[Rank]) -> Revision | None:
    """Return the newest commit that every rank has, of one attempt; None if there is none."""
    return newest_in_common(
        [{r: manifest.attempt for r, manifest in rank.manifests.items()} for rank in ranks]
    )


def committed_in(reader: Reader, ranks: Sequence[Rank], revision: Revision) -> list[Commit]:
    """Return a commit of all ranks of a run whose layouts are whole."""
    manifests = [rank.manifests[revision] for rank in ranks]
    layouts = [
        f"{rank.folder}/{layout_name(manifest.layout)}"
        for rank, manifest in zip(ranks, manifests, strict=True)
    ]
    return read_commits(reader, manifests, layouts)


def holder_of(reader: Reader) -> str | None:
    """Return the process that uses a run, or None, without disturbing it."""
    for folder in (name for name in reader.list() if folder_rank(name) is not None):
        path = reader.root / folder / LOCK_NAME
        with (
            reader.permission_errors(path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS)
            try:
                # A shared lock for a moment; a store that is opened meanwhile waits for longer.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 1024, 0).decode(errors="replace")
                return holder or "an unknown process"
            finally:
                os.close(fd)
    return None
