"""Reader of the commits of a run or a checkpoint. It needs no store and changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tierstore.errors import CheckpointError, CorruptionError
from tierstore.inspection.reader import Fault, Reader, wrong_name
from tierstore.run.commit import Commit, CommittedPage
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
    rank_folder,
)
from tierstore.run.layout_file import RankLayout
from tierstore.run.manifest import Manifest, RunIdentity
from tierstore.run.recovery import newest_in_common, read_manifest
from tierstore.run.sealed import body_errors, is_count, require, unseal
from tierstore.run.striping import Striping, stripe
from tierstore.storage.checks import LOCK_NAME
from tierstore.storage.paths import NO_LOCKS, OPEN_FLAGS

_STATE_BYTES_MAX = 2**50
"""A larger number of bytes is damage: no state is as large."""

RANKS_MAX = 10**5
"""A larger number of ranks is damage."""

_NAMES_MAX = 8
"""Most missing ranks that a fault names."""


@dataclass(slots=True)
class Rank:
    """The content of the folder of one rank of a run."""

    rank: int
    folder: str
    identity: RunIdentity | None = None
    manifests: dict[Revision, Manifest] = field(default_factory=dict)
    """Revision -> manifest, for each whole manifest."""
    names: Sequence[str] = ()
    """All names in the folder."""
    striping: Striping | None = None
    """The striping of the pages over several directories; None for one directory."""
    page_folders: Sequence[str | None] = ()
    """The folder of each page of one round; None for a folder that cannot be read."""

    def path(self, page: CommittedPage) -> str | None:
        """Return the path of a page file for a Reader; None if the folder cannot be read."""
        folder = self.page_folders[page.number % len(self.page_folders)]
        return folder and f"{folder}/{page_file(page.number, page.entry.slot)}"

    @property
    def commits(self) -> dict[str, Revision]:
        """Name -> revision of each manifest, whole or not."""
        return {name: revision for name in self.names if (revision := manifest_revision(name))}

    @property
    def holds_run(self) -> bool:
        """True if the folder holds a run. A refused job may leave an empty folder."""
        return IDENTITY_NAME in self.names or bool(self.commits)


def read_ranks(reader: Reader) -> list[Rank]:
    """Return the content of each rank's folder of a run; record the faults of files.

    Raises:
        CheckpointError: the directory is not the first of a run; the message names the first.
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
    # All ranks hold the run before a rank commits, so an empty folder then is a missing rank.
    has_commits = any(rank.commits for rank in ranks)
    return [
        rank for rank in ranks if rank.holds_run or (rank.rank < world_size and not has_commits)
    ]


def missing_ranks(ranks: Sequence[Rank]) -> Fault | None:
    """Return one fault that names all absent ranks of a run, given the ranks that were found."""
    world_size = max((rank.identity.world_size for rank in ranks if rank.identity), default=1)
    present = {rank.rank for rank in ranks}
    absent = [rank for rank in range(min(world_size, RANKS_MAX)) if rank not in present]
    if not absent:
        return None
    several = len(absent) > 1
    return Fault(
        ", ".join(map(rank_folder, absent[:_NAMES_MAX])) + (", ..." * (len(absent) > _NAMES_MAX)),
        f"{'are' if several else 'is'} missing, and the run has {world_size} ranks: if "
        f"{'they are' if several else 'it is'} on the disk of another machine, copy the folders "
        "of all ranks into one directory first",
    )


def _read_striping(reader: Reader, rank: Rank) -> None:
    """Find the folders that hold the striped pages of a rank, and allow reads from them."""
    path = f"{rank.folder}/{STRIPING_NAME}"
    rank.page_folders = [None]
    with reader.record_faults(path):
        rank.striping = striping = reader.parse(path, Striping.from_bytes)
        first, *others = striping.directories
        if striping.index:
            raise CheckpointError(
                f"{reader.root} has only pages of a run that is striped over "
                f"{len(striping.directories)} directories: name the first, "
                f"{os.path.dirname(first)}"
            )
        folders = [
            rank.folder,
            *(
                _allowed(reader, directory, striping.striping_id, index)
                for index, directory in enumerate(others, start=1)
            ),
        ]
        rank.page_folders = [folders[index] for index in stripe(striping.weights)]


def _allowed(reader: Reader, directory: str, striping_id: str, index: int) -> str | None:
    """Return a further directory of the same striping; else record a fault and return None."""
    with reader.record_faults(directory):
        reader.allow(directory)
        path = f"{directory}/{STRIPING_NAME}"
        with reader.record_faults(path):
            found = reader.parse(path, Striping.from_bytes)
            if (found.striping_id, found.index) == (striping_id, index):
                return directory
            raise CorruptionError("is of another run, or of another directory of this one")
    reader.notes.append(f"pages of the run are striped over {directory}, which could not be read")
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


def read_commits(reader: Reader, layouts: Mapping[str, Manifest]) -> list[Commit]:
    """Return the commits with a whole layout; record every other layout as a fault.

    Args:
        reader: of the run or checkpoint.
        layouts: path of the layout file of a rank -> manifest of the rank, all of one commit.
    """
    commits = []
    for path, manifest in layouts.items():
        with reader.record_faults(path):
            layout = reader.parse(path, partial(RankLayout.from_bytes, digest=manifest.layout))
            _require_size(layout)
            commits.append(Commit(manifest=manifest, layout=layout))
    return commits


def _require_size(layout: RankLayout) -> None:
    """Refuse sizes whose layout would take too long to compute."""
    nbytes = sum(
        shard.parameter.bytes_of(chunk.numel)
        for page in layout.subgroups
        for shard in page.shards
        for chunk in shard.chunks
    )
    if nbytes > _STATE_BYTES_MAX:
        raise CorruptionError("has a right checksum but impossibly many elements in its pages")


def parse_marker(data: bytes, where: str) -> Mapping[str, Any]:
    """Return the content of tierstore.json in a published checkpoint, always with ``epoch``.

    Raises:
        CorruptionError: the file is not whole.
        RunDirectoryError: another version wrote it.
    """
    body = {"epoch": 0, **unseal("checkpoint", data, where)}
    with body_errors(where):
        _require_files(body["files"])
        numbers = [body["epoch"], body["step"], body["world_size"]]
        texts = [body["run_id"], body["name"]]
        require(all(map(is_count, numbers)), all(type(text) is str for text in texts))
        require(body["world_size"] > 0)
    return body


def parse_conversion(data: bytes, where: str) -> Mapping[str, Any]:
    """Return the files that CONVERSION_NAME lists: name -> ``nbytes`` and ``xxh3_128``.

    Raises:
        CorruptionError: the file is not whole.
        RunDirectoryError: another version wrote it.
    """
    body = unseal("conversion", data, where)
    with body_errors(where):
        files: Mapping[str, Any] = body["files"]
        _require_files(files)
    return files


def _require_files(files: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or LookupError unless these are names with sizes and digests."""
    require(all(is_count(file["nbytes"]) for file in files.values()))
    require(all(type(file["xxh3_128"] or "") is str for file in files.values()))
    require(not any(wrong_name(name) or "/" in name for name in files))


def read_published(
    reader: Reader, names: Sequence[str]
) -> tuple[Mapping[str, Any] | None, list[Commit]]:
    """Return the marker of a published checkpoint, and the commits of all ranks.

    Args:
        reader: of the checkpoint. Every file that is not whole, or not of the commit, is
            recorded as a fault and left out.
        names: the names of all files of the checkpoint.
    """
    marker: Mapping[str, Any] | None = None
    with reader.record_faults(MARKER_NAME):
        marker = reader.parse(MARKER_NAME, parse_marker)
    # Compare full names: a stray file is not a rank.
    world_size = len({published_manifest(rank) for rank in range(len(names))}.intersection(names))
    if marker is not None:
        world_size = marker["world_size"]
    layouts: dict[str, Manifest] = {}
    for rank in range(min(world_size, RANKS_MAX)):
        name = published_manifest(rank)
        with reader.record_faults(name):
            manifest = reader.parse(name, Manifest.from_bytes)
            expected = replace(next(iter(layouts.values()), manifest), rank=rank)
            if marker is not None:
                common = {key: marker[key] for key in ("run_id", "world_size", "epoch", "step")}
                expected = replace(expected, **common)
            if _commit_text(manifest) != _commit_text(expected):
                raise CorruptionError(
                    f"is of {_commit_text(manifest)}; expected {_commit_text(expected)}"
                )
            layouts[published_layout(rank)] = manifest
    return marker, read_commits(reader, layouts)


def _commit_text(manifest: Manifest) -> str:
    """Return text that names the rank and the commit of a manifest."""
    epoch = f" in epoch {manifest.epoch}" if manifest.epoch else ""
    return (
        f"rank {manifest.rank} of {manifest.world_size}, commit {manifest.number} of step "
        f"{manifest.step}{epoch} of run {manifest.run_id}, attempt {manifest.attempt}"
    )


def newest_commit(ranks: Sequence[Rank]) -> Revision | None:
    """Return the newest commit that every rank has from one attempt; None if none exists."""
    return newest_in_common(
        [{r: manifest.attempt for r, manifest in rank.manifests.items()} for rank in ranks]
    )


def committed_in(reader: Reader, ranks: Sequence[Rank], revision: Revision) -> list[Commit]:
    """Return a commit of all ranks of a run whose layouts are whole."""
    layouts = {}
    for rank in ranks:
        manifest = rank.manifests[revision]
        layouts[f"{rank.folder}/{layout_name(manifest.layout)}"] = manifest
    return read_commits(reader, layouts)


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
                # The shared lock lasts a moment. A store that is opened meanwhile waits longer.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in NO_LOCKS:  # Without locks no process can use the run.
                    continue
                if not isinstance(error, BlockingIOError):
                    raise
                holder = os.pread(fd, 1024, 0).decode(errors="replace")
                return holder or "an unknown process"
            finally:
                os.close(fd)
    return None
