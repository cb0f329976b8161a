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
from tierstore.inspection.reader import Reader, unsealed, wrong_name
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
from tierstore.run.sealed import body_errors, is_count, unseal
from tierstore.run.striping import Striping, stripe
from tierstore.storage.checks import LOCK_NAME
from tierstore.storage.paths import OPEN_FLAGS

_STATE_BYTES_MAX = 2**50
"""More than any state has: a number above it is not one that was meant."""


@dataclass(slots=True)
class Rank:
    """What one rank's folder of a run says about itself."""

    rank: int
    folder: str
    identity: RunIdentity | None = None
    manifests: dict[Revision, Manifest] = field(default_factory=dict)
    """Those that are whole."""
    names: Sequence[str] = ()
    """Of everything in the folder."""
    striping: Striping | None = None
    """The striping of its pages over several directories, if there is one."""
    page_folders: Sequence[str | None] = ()
    """The folder of each page of one round; None for a folder that cannot be read."""

    def page_place(self, page: int, slot: str) -> str | None:
        """Return the name of a page file for a Reader; None where it cannot be read."""
        folder = self.page_folders[page % len(self.page_folders)]
        return None if folder is None else f"{folder}/{page_file(page, slot)}"

    @property
    def commits(self) -> dict[str, Revision]:
        """Name -> what it is of, of each manifest, whole or not."""
        return commits_in(self.names)


def commits_in(names: Iterable[str]) -> dict[str, Revision]:
    """Return those of the names that are manifests', with what each is of."""
    return {name: revision for name in names if (revision := manifest_revision(name))}


def read_ranks(reader: Reader) -> list[Rank]:
    """Return what there is of each rank of a run, noting every file that is not whole.

    Raises:
        CheckpointError: the directory is a further one of a run; the message names the first.
    """
    ranks = []
    for folder in reader.list():
        number = folder_rank(folder)
        if number is None:
            continue
        rank = Rank(number, folder)
        with reader.noting(folder):
            if (reader.root / folder).is_symlink():
                raise CorruptionError("is a link: no link is followed")
            rank.names = reader.list(folder)
            rank.page_folders = [folder]
            if STRIPING_NAME in rank.names:
                _read_striping(reader, rank)
            _read_rank(reader, rank)
            ranks.append(rank)
    # A job of more ranks that was refused leaves folders with nothing in them.
    world_sizes = [rank.identity.world_size for rank in ranks if rank.identity]
    return [
        rank
        for rank in ranks
        if rank.rank < max(world_sizes, default=len(ranks)) or _holds_run(rank)
    ]


def _holds_run(rank: Rank) -> bool:
    return IDENTITY_NAME in rank.names or bool(rank.commits)


def _read_striping(reader: Reader, rank: Rank) -> None:
    """Admit the other directories of a rank's striping, if their striping files agree."""
    place = f"{rank.folder}/{STRIPING_NAME}"
    rank.page_folders = [None]
    with reader.noting(place):
        rank.striping = _striping_in(reader, rank.folder)
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
        folders.append(_admitted(reader, directory, rank.striping.striping_id, index))
    rank.page_folders = [folders[index] for index in stripe(rank.striping.weights)]


def _admitted(reader: Reader, directory: str, striping_id: str, index: int) -> str | None:
    """Admit a further directory if it says itself that it is that; else note why not."""
    with reader.noting(directory):
        reader.admit(directory)
        with reader.noting(f"{directory}/{STRIPING_NAME}"):
            found = _striping_in(reader, directory)
            if (found.striping_id, found.index) == (striping_id, index):
                return directory
            raise CorruptionError("is of another run, or of another directory of this one")
    reader.note(f"pages of the run are striped over {directory}, which could not be read")
    return None


def _striping_in(reader: Reader, folder: str) -> Striping:
    place = f"{folder}/{STRIPING_NAME}"
    return unsealed(Striping.from_bytes, reader.get(place), place)


def _read_rank(reader: Reader, rank: Rank) -> None:
    if _holds_run(rank):
        place = f"{rank.folder}/{IDENTITY_NAME}"
        with reader.noting(place):
            rank.identity = _read_identity(reader, place, rank.rank)
    for name, revision in rank.commits.items():
        place = f"{rank.folder}/{name}"
        with reader.noting(place):
            read = partial(read_manifest, revision=revision, rank=rank.rank, identity=rank.identity)
            rank.manifests[revision] = unsealed(read, reader.get(place), place)


def _read_identity(reader: Reader, place: str, rank: int) -> RunIdentity:
    identity = unsealed(RunIdentity.from_bytes, reader.get(place), place)
    if identity.rank != rank or identity.world_size <= rank:
        raise CorruptionError(
            f"is of rank {identity.rank} of {identity.world_size}: it does not belong here"
        )
    return identity


def read_commits(
    reader: Reader, manifests: Sequence[Manifest], layouts: Sequence[str]
) -> list[Commit]:
    """Return the commits of all ranks whose layouts are whole, noting every layout that is not.

    Args:
        reader: of the run or checkpoint.
        manifests: of one commit, by rank.
        layouts: the name of the layout file of each rank.
    """
    commits = []
    for manifest, place in zip(manifests, layouts, strict=True):
        with reader.noting(place):
            read = partial(RankLayout.from_bytes, digest=manifest.layout)
            layout = unsealed(read, reader.get(place), place)
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
    """Return what a published checkpoint says of itself and its files.

    Raises:
        CorruptionError: it is not whole.
    """

    def read(data: bytes, where: str) -> Mapping[str, Any]:
        body = unseal("checkpoint", data, where)
        with body_errors(where):
            files = body["files"].values()
            numbers = [body["step"], body["world_size"], *(file["nbytes"] for file in files)]
            texts = [body["run_id"], body["name"], *(file["xxh3_128"] or "" for file in files)]
            if not all(map(is_count, numbers)) or not all(type(text) is str for text in texts):
                raise ValueError("a field is of another type")
            if any(wrong_name(name) or "/" in name for name in body["files"]):
                raise ValueError("a name leads elsewhere")
            if body["world_size"] == 0:
                raise ValueError("there are no ranks")
        return body

    return unsealed(read, reader.get(MARKER_NAME), MARKER_NAME)


def read_published(
    reader: Reader, names: Sequence[str], marker: Mapping[str, Any] | None
) -> list[Commit]:
    """Return what all ranks have committed, of ranks whose files are whole and of one commit.

    Args:
        reader: of the checkpoint; told of every other.
        names: of all that is in it.
        marker: from read_marker(), or None where that is not whole.
    """
    if marker is not None:
        ranks = range(min(marker["world_size"], 10**5))
    else:
        ranks = range(sum(re.fullmatch(r"rank-\d{5}\.commit", name) is not None for name in names))
    manifests: list[Manifest] = []
    for rank in ranks:
        place = published_manifest(rank)
        with reader.noting(place):
            manifest = unsealed(Manifest.from_bytes, reader.get(place), place)
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
    """Return a commit of all ranks of a run, of ranks whose layouts are whole."""
    manifests = [rank.manifests[revision] for rank in ranks]
    places = [
        f"{rank.folder}/{layout_name(manifest.layout)}"
        for rank, manifest in zip(ranks, manifests, strict=True)
    ]
    return read_commits(reader, manifests, places)


def holder_of(reader: Reader) -> str | None:
    """Return which process uses a run, or None; take nothing from it."""
    for folder in (name for name in reader.list() if folder_rank(name) is not None):
        path = reader.root / folder / LOCK_NAME
        with reader.permitted(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | OPEN_FLAGS)
            try:
                # Shared and for a moment: a store that is opened just now waits for longer.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 1024, 0).decode(errors="replace")
                return holder or "an unknown process"
            finally:
                os.close(fd)
    return None
