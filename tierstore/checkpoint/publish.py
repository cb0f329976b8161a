"""Publishing a committed step: links to its page files, and one metadata file.

The page files are the checkpoint already. A directory is built under a temporary name:
links to the page files, each rank's manifest with its checksums, a file of all that is in
no page, ``tierstore.json`` and last ``.metadata``; then it takes its name. Pages that cannot
be linked, because the path is on another filesystem, are copied in the background. Where
ranks do not see the same directory, as on disks of their own, there is a part of the
checkpoint on each: the files of those ranks, and what says which files all of it has.

Until the name is durable, whatever fails or interrupts leaves nothing behind; from then on
nothing takes the checkpoint away again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tierstore.checkpoint.dcp_writer import checkpoint_metadata
from tierstore.checkpoint.model_contents import ModelContents, Names
from tierstore.checkpoint.page_links import PageFiles, RankCommit
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.retention import (
    is_taken,
    remove,
    remove_leftovers,
    retain,
    temporary_prefix,
)
from tierstore.errors import (
    CheckpointError,
    RunDirectoryError,
    StorageError,
    TierstoreError,
)
from tierstore.layout.page_layout import PageLayout
from tierstore.ranks.peers import Peers, agree, on_rank_0, together
from tierstore.run.file_names import (
    MARKER_NAME,
    METADATA_NAME,
    RESHARDED_NAME,
    UNPAGED_NAME,
    published_manifest,
    published_page,
)
from tierstore.run.manifest import Manifest
from tierstore.run.page_files import layouts_of
from tierstore.run.sealed import seal
from tierstore.storage.base import Folder

logger = logging.getLogger("tierstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What one process has to publish: a commit, and names for what is in it."""

    peers: Peers
    """The processes that publish it together."""
    commits: Sequence[RankCommit]
    """Those of one rank, or of more where one process has the files of all; empty if nothing
    was committed yet, which is refused."""
    contents: Callable[[], ModelContents]
    """Says what of the model is in no page, and the names of what is."""
    model_prefix: str
    """What stands before the names of the model: ends in a dot, or is empty."""
    for_reshard: bool = False
    """Whether it is what reshard=True begins from, whose name nothing else may have."""

    def __post_init__(self) -> None:
        if self.model_prefix and not re.fullmatch(r"[^.]+\.", self.model_prefix):
            raise ValueError(
                f'model_prefix must be a name and a dot, or "", got {self.model_prefix!r}'
            )


def publish(
    committed: Committed,
    path: str,
    *,
    keep_last: int | None = None,
    on_progress: Callable[[int, int], None] = lambda copied, total: None,
    on_copying: Callable[[Publication], None] = lambda publication: None,
) -> Publication:
    """Publish a commit as the directory ``path``; all ranks call it together.

    With links it is there when this returns. Pages that cannot be linked are copied in the
    background from links that hold their files meanwhile; with several ranks, or where a
    filesystem has no links at all, before this returns.

    Args:
        committed: what to publish.
        path: the directory; absent or empty.
        keep_last: how many checkpoints of this run to keep beside it, itself among them.
        on_progress: told of bytes copied, and of all that are to be.
        on_copying: told of a publication that goes on in the background, whether this then
            returns it or is interrupted.

    Raises:
        CheckpointError: there is something at ``path``, it cannot be made, or the model
            holds what no checkpoint can.
        StorageError: the disk is full, say. Nothing is left of the checkpoint.
        CorruptionError: a page that was copied is not what was committed. Likewise.
    """
    publishing = _Publishing(committed, path, keep_last, on_progress)
    try:
        publishing.begin()
        copying = any(agree(committed.peers, "link pages", publishing.link_pages))
        held = copying and all(agree(committed.peers, "hold pages", publishing.hold_pages))
        publishing.describe()
        if held and committed.peers.world_size == 1:
            publishing.start(on_copying)
            return publishing.publication
        publishing.finish(copying=copying)
    except BaseException:
        publishing.give_up()
        raise
    publishing.publication.outcome.set_result(None)
    return publishing.publication


class _Publishing:
    def __init__(
        self,
        committed: Committed,
        path: str,
        keep_last: int | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._committed = committed
        self._path = path
        self._peers = committed.peers
        self._keep_last = keep_last
        self._on_progress = on_progress
        prepared = agree(self._peers, "prepare a checkpoint", self._prepare)
        if any(name != prepared[0][2] for *_, name in prepared):
            raise CheckpointError(
                "all ranks must give the checkpoint one name, but they give "
                f"{[name for *_, name in prepared]}: pass the same path on each"
            )
        if any(cut != prepared[0][1] for _, cut, _ in prepared):
            raise CheckpointError(
                "the ranks have different buffers or frozen parameters, or have them in another "
                "order: give all ranks the same model"
            )
        token: str = prepared[0][0]
        self._child = f"{temporary_prefix(self._name, self._manifest.run_id)}{token}"
        self._page_files = [PageFiles(commit, token) for commit in committed.commits]
        self._maker = 0  # Which rank makes the next.
        self._is_first = False  # Of the ranks that see the directory that it lies in.
        self._places = 0  # Number of such directories.
        self._metadata = self._marker = b""
        self._named = False
        self._published = False  # Whether it has its name for good.
        self._mutex = threading.Lock()  # Of these two, only one ever becomes true.
        self._copying = threading.Event()
        self._given_up = False
        self.publication = Publication(path, self._manifest.step)

    def _prepare(self) -> tuple[str, str, str]:
        """Refuse a wrong call on all ranks.

        Returns:
            What tells this attempt from others, what the ranks put together, and the name.
        """
        if self._keep_last is not None and (
            not isinstance(self._keep_last, int) or self._keep_last < 1
        ):
            raise ValueError(
                f"keep_last must be at least 1, or None for all; got {self._keep_last!r}"
            )
        path = Path(self._path).absolute()  # Not abspath(): the system follows links before "..".
        folder, self._name = str(path.parent), path.name
        is_reserved = self._name == RESHARDED_NAME and not self._committed.for_reshard
        if not self._name or self._name.startswith((".", "rank-")) or is_reserved:
            raise CheckpointError(
                f"{self._path!r} cannot name a checkpoint: give a directory whose name is not "
                f'"{RESHARDED_NAME}" and begins neither with a dot nor with "rank-"'
            )
        if not self._committed.commits:
            raise CheckpointError("there is no step to publish yet: do one first")
        self._manifest = self._committed.commits[0].manifest
        self._contents = self._committed.contents()
        try:
            self._folder: Folder = self._committed.commits[0].storage.folder(folder)
        except RunDirectoryError as error:  # No directory of a run, here.
            raise CheckpointError(str(error)) from error
        cut = xxhash.xxh3_128_hexdigest(repr(self._contents.cut).encode())
        return secrets.token_hex(4), cut, self._name

    def begin(self) -> None:
        """Make the temporary directory wherever ranks see another place under the path."""
        maker: int | None = 0
        while maker is not None:
            self._maker = maker
            together(self._peers, "make the checkpoint directory", self._make)
            self._places += 1
            sees = [True]
            if self._peers.world_size > 1:
                sees = agree(
                    self._peers,
                    "list the checkpoint directory",
                    lambda: self._child in self._folder.children(),
                )
            maker = None if all(sees) else sees.index(False)
        if self._places > 1 and self._peers.rank == 0:
            logger.warning(
                "the checkpoint %s is in %d parts, as ranks see that many directories under its "
                "path: copy all of them into one directory to load it",
                self.publication.path,
                self._places,
            )

    def _make(self) -> None:
        """Make the temporary directory on one rank, after looking whether its name will be free."""
        if self._peers.rank != self._maker:
            return
        if is_taken(self._folder, self._name):
            raise CheckpointError(
                f"{self._folder.location}/{self._name} is there already: name another "
                "directory, or remove that one first"
            )
        remove_leftovers(self._folder, self._manifest.run_id)
        self._folder.make(self._child)
        self._is_first = True

    def link_pages(self) -> bool:
        """Link pages into the directory; return whether any must be copied instead."""
        for files in self._page_files:
            files.link(self._folder, self._child)
        total = sum(files.nbytes for files in self._page_files)
        bytes_to_copy = sum(files.bytes_to_copy for files in self._page_files)
        self.publication.bytes_total = bytes_to_copy or total
        self.publication.bytes_linked = total - bytes_to_copy
        return bytes_to_copy > 0

    def hold_pages(self) -> bool:
        """Hold the files of pages that are to be copied; return whether all of them can be."""
        return all(files.hold() for files in self._page_files)

    def describe(self) -> None:
        """Write all that is not a page, and say what is where; the model may change then."""
        own = [commit.manifest for commit in self._committed.commits]
        data = [manifest.to_bytes() for manifest in own]
        gathered = self._peers.gather((own, list(map(_digest, data)), self._contents.names))
        manifests = [manifest for theirs, _, _ in gathered for manifest in theirs]
        digests = [digest for _, theirs, _ in gathered for digest in theirs]
        names = {name: found for _, _, theirs in gathered for name, found in theirs.items()}

        def put() -> None:
            values = self._contents.values()
            try:
                for manifest, content in zip(own, data, strict=True):
                    self._folder.put(self._child, published_manifest(manifest.rank), content)
                if self._peers.rank == 0:
                    self._describe(manifests, digests, names, values)
            finally:
                for _ in values:  # What the ranks put together they do to the end.
                    pass

        together(self._peers, "describe the checkpoint", put)
        if self._places > 1:
            described = self._peers.gather((self._metadata, self._marker))
            self._metadata, self._marker = described[0]
            together(
                self._peers,
                "mark the checkpoint",
                lambda: self._put_marker() if self._peers.rank else None,
            )

    def _put_marker(self) -> None:
        if self._is_first:
            self._folder.put(self._child, MARKER_NAME, self._marker)

    def finish(self, *, copying: bool) -> None:
        """Copy what could not be linked, and give the directory its name."""
        if copying:
            together(self._peers, "copy pages", self._copy_pages)
        if self._places > 1:
            together(
                self._peers,
                "name the parts of the checkpoint",
                lambda: self._take_name() if self._peers.rank else None,
            )
            # Rank 0 may publish now, and be gone before it says so.
            self._published = self._peers.rank > 0
        try:
            on_rank_0(self._peers, "name the checkpoint", self._take_name)
        except TierstoreError:
            if self._places > 1:
                self._peers.gather(None)  # Raises, unless it was rank 0 that said so.
                self._published = False
            raise
        if self._peers.rank and self._is_first:
            self._retain()

    def start(self, on_copying: Callable[[Publication], None]) -> None:
        """Copy and finish in the background, and return when that has begun."""
        threading.Thread(
            target=self._finish_alone, args=(on_copying,), name="tierstore-publish"
        ).start()
        self._copying.wait()

    def _finish_alone(self, on_copying: Callable[[Publication], None]) -> None:
        with self._mutex:
            if self._given_up:
                return
            on_copying(self.publication)
            self._copying.set()
        try:
            self.finish(copying=True)
        except BaseException as error:
            self.undo()
            # Nobody may be told of it for long.
            logger.error("the checkpoint %s was not published: %s", self.publication.path, error)
            self.publication.outcome.set_exception(error)
        else:
            self.publication.outcome.set_result(None)

    def give_up(self) -> None:
        """Leave nothing behind, unless it is published or goes on in the background."""
        with self._mutex:
            self._given_up = not self._copying.is_set()
        if self._given_up:
            self.undo()

    def undo(self) -> None:
        """Remove what there is; the first error is the one to mend."""
        for files in self._page_files:
            files.drop()
        if self._is_first and not self._published:
            with contextlib.suppress(TierstoreError):
                if self._named:
                    self._folder.rename(self._name, self._child)
                    self._folder.sync_children()  # Or a part of it might keep the name.
                self._remove_child()

    def _remove_child(self) -> None:
        """Remove the temporary directory, though after an interrupt others still link into it."""
        end = time.monotonic() + 1.0
        while True:
            try:
                return remove(self._folder, self._child)
            except StorageError as error:
                if error.errno != errno.ENOTEMPTY or time.monotonic() > end:
                    raise

    def _copy_pages(self) -> None:
        def count(nbytes: int) -> None:
            self.publication.bytes_copied += nbytes
            self._on_progress(self.publication.bytes_copied, self.publication.bytes_total)

        for files in self._page_files:
            files.copy(self._folder, self._child, count)

    def _describe(
        self,
        manifests: Sequence[Manifest],
        digests: Sequence[dict[str, Any]],
        names: Names,
        values: Iterable[tuple[str, Any, Hashable]],
    ) -> None:
        known = {commit.manifest.rank: commit.layouts for commit in self._committed.commits}
        commits: list[tuple[Manifest, Sequence[PageLayout]]] = [
            (manifest, known.get(manifest.rank) or layouts_of(manifest)) for manifest in manifests
        ]
        unpaged = _UnpagedFile(self._folder, self._child)
        self._metadata = checkpoint_metadata(
            commits, names, values, self._committed.model_prefix, unpaged.append
        )
        unpaged.flush()
        files = {
            published_page(manifest.rank, page): {"nbytes": layout.nbytes, "xxh3_128": None}
            for manifest, layouts in commits
            for page, layout in enumerate(layouts)
        }
        for manifest, digest in zip(manifests, digests, strict=True):
            files[published_manifest(manifest.rank)] = digest
        files[METADATA_NAME] = _digest(self._metadata)
        files[UNPAGED_NAME] = unpaged.digest()
        marker = {
            "run_id": self._manifest.run_id,
            "step": self._manifest.step,
            "world_size": self._manifest.world_size,
            "name": self._name,
            "files": files,
        }
        self._marker = seal("checkpoint", marker)
        self._put_marker()

    def _take_name(self) -> None:
        """Make the names in the directory durable, those of all ranks there, then its own."""
        if not self._is_first:
            return
        folder, child = self._folder, self._child
        folder.put(child, METADATA_NAME, self._metadata)
        folder.sync(child)
        folder.rename(child, self._name)
        self._named = True
        folder.sync_children()
        if self._peers.rank == 0:
            self._published = True
            self._retain()

    def _retain(self) -> None:
        if self._keep_last is None:
            return
        try:
            retain(self._folder, self._manifest.run_id, self._name, self._keep_last)
        except Exception as error:  # No reason to call the new one a failure.
            logger.warning("older checkpoints beside %s stay: %r", self._name, error)


class _UnpagedFile:
    """The file of all that lies in no page, while it is written."""

    def __init__(self, folder: Folder, child: str) -> None:
        self._folder = folder
        self._child = child
        self._nbytes = 0
        self._hash = xxhash.xxh3_128()
        self.append(b"")  # There even if nothing is in it.

    def append(self, data: bytes) -> int:
        """Add bytes at the end; return where they begin."""
        offset = self._nbytes
        self._folder.append(self._child, UNPAGED_NAME, memoryview(data))
        self._hash.update(data)
        self._nbytes += len(data)
        return offset

    def flush(self) -> None:
        """Make the file's data durable."""
        self._folder.flush(self._child, UNPAGED_NAME)

    def digest(self) -> dict[str, Any]:
        """Return what the marker says of the file."""
        return {"nbytes": self._nbytes, "xxh3_128": self._hash.hexdigest()}


def _digest(data: bytes) -> dict[str, Any]:
    return {"nbytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
