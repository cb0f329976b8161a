"""The manifests of a run or a checkpoint, read without a store and without changing any."""

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
from tierstore.run.file_names import (
    DEALING_NAME,
    IDENTITY_NAME,
    MARKER_NAME,
    Revision,
    folder_rank,
    manifest_revision,
    page_file,
    published_manifest,
)
from tierstore.run.manifest import Manifest, RunIdentity
from tierstore.run.recovery import newest_in_common, read_manifest
from tierstore.run.sealed import body_errors, is_count, unseal
from tierstore.run.striping import Dealing, deal
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
    dealing: Dealing | None = None
    """How its pages are dealt over several directories, if they are."""
    page_folders: Sequence[str | None] = ()
    """The folders that pages are dealt to, one round; None for one that cannot be read."""

    def page_place(self, page: int, copy: str) -> str | None:
        """Return the name of a page file for a Reader; None where it cannot be read."""
        folder = self.page_folders[page % len(self.page_folders)]
        return None if folder is None else f"{folder}/{page_file(page, copy)}"

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
            if DEALING_NAME in rank.names:
                _read_dealing(reader, rank)
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


def _read_dealing(reader: Reader, rank: Rank) -> None:
    """Admit the directories that pages of a rank were dealt to: what says so in them, too."""
    place = f"{rank.folder}/{DEALING_NAME}"
    rank.page_folders = [None]
    with reader.noting(place):
        rank.dealing = _dealing_in(reader, rank.folder)
    if rank.dealing is None:
        return
    first, *others = rank.dealing.directories
    if rank.dealing.index:
        raise CheckpointError(
            f"{reader.root} has only pages of a run that is dealt over "
            f"{len(rank.dealing.directories)} directories: name the first, "
            f"{os.path.dirname(first)}"
        )
    folders: list[str | None] = [rank.folder]
    for index, directory in enumerate(others, start=1):
        folders.append(_admitted(reader, directory, rank.dealing.dealing_id, index))
    rank.page_folders = [folders[index] for index in deal(rank.dealing.weights)]


def _admitted(reader: Reader, directory: str, dealing_id: str, index: int) -> str | None:
    """Admit a further directory if it says itself that it is that; else note why not."""
    with reader.noting(directory):
        reader.admit(directory)
        with reader.noting(f"{directory}/{DEALING_NAME}"):
            found = _dealing_in(reader, directory)
            if (found.dealing_id, found.index) == (dealing_id, index):
                return directory
            raise CorruptionError("is of another run, or of another directory of this one")
    reader.note(f"pages of the run were dealt to {directory}, which could not be read")
    return None


def _dealing_in(reader: Reader, folder: str) -> Dealing:
    place = f"{folder}/{DEALING_NAME}"
    return unsealed(Dealing.from_bytes, reader.get(place), place)


def _read_rank(reader: Reader, rank: Rank) -> None:
    if _holds_run(rank):
        place = f"{rank.folder}/{IDENTITY_NAME}"
        with reader.noting(place):
            rank.identity = _read_identity(reader, place, rank.rank)
    for name, revision in rank.commits.items():
        place = f"{rank.folder}/{name}"
        with reader.noting(place):
            read = partial(read_manifest, revision=revision, rank=rank.rank, identity=rank.identity)
            manifest = unsealed(read, reader.get(place), place)
            _require_pages_for(manifest)
            rank.manifests[revision] = manifest


def _read_identity(reader: Reader, place: str, rank: int) -> RunIdentity:
    identity = unsealed(RunIdentity.from_bytes, reader.get(place), place)
    if identity.rank != rank or identity.world_size <= rank:
        raise CorruptionError(
            f"is of rank {identity.rank} of {identity.world_size}: it does not belong here"
        )
    return identity


def _require_pages_for(manifest: Manifest) -> None:
    """Refuse sizes that would take forever to lay out."""
    if manifest.subgroups is not None:
        shards = [shard for subgroup in manifest.subgroups for shard in subgroup.shards]
        numels = ((shard.parameter, sum(c.numel for c in shard.chunks)) for shard in shards)
        if sum(spec.element_bytes * numel for spec, numel in numels) > _STATE_BYTES_MAX:
            raise CorruptionError("has a right checksum but more in its pages than there can be")
        return
    specs = [spec for group in manifest.groups for spec in group]
    cut = [spec for spec in specs if spec.elementwise]
    # No page of parameters that may be cut holds more than this.
    page_bytes_max = max([manifest.page_bytes, *(spec.element_bytes for spec in specs)])
    if sum(spec.nbytes for spec in specs) > _STATE_BYTES_MAX or (
        sum(spec.nbytes for spec in cut) > len(manifest.pages) * page_bytes_max
    ):
        raise CorruptionError("has a right checksum but parameters that its pages cannot hold")


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
) -> list[Manifest]:
    """Return the manifests of all ranks that are whole, and of one commit.

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
            _require_pages_for(manifest)
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
    return manifests


def newest_commit(ranks: Sequence[Rank]) -> Revision | None:
    """Return the newest commit that every rank has, of one attempt; None if there is none."""
    return newest_in_common(
        [{r: manifest.attempt for r, manifest in rank.manifests.items()} for rank in ranks]
    )


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
