"""Publishing of a committed step: links to page files, and files that describe the pages.

A directory is built under a temporary name and then renamed. Pages on another filesystem are copied
in the background. Until the name is durable, a failure or an interrupt leaves nothing behind. From
then on, no failure removes the checkpoint.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from tierstore.checkpoint.dcp_writer import checkpoint_metadata
from tierstore.checkpoint.directory import CheckpointDirectory
from tierstore.checkpoint.model_contents import ModelContents
from tierstore.checkpoint.page_links import PageLinks
from tierstore.checkpoint.parts import Marked, Parts
from tierstore.checkpoint.publication import Publication
from tierstore.errors import CheckpointError, RunDirectoryError, StorageError
from tierstore.ranks.peers import Peers, agree, on_rank_0, together
from tierstore.run.commit import Commit
from tierstore.run.file_names import (
    IDENTITY_NAME,
    MARKER_NAME,
    METADATA_NAME,
    RESHARDED_NAME,
    STRIPING_NAME,
    UNPAGED_NAME,
    folder_rank,
    published_layout,
    published_manifest,
    published_page,
)
from tierstore.run.sealed import seal
from tierstore.storage.base import Folder
from tierstore.threads import Latch, Threads

logger = logging.getLogger("tierstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The commit that one process publishes, and the names of the model."""

    peers: Peers
    """The processes that publish the commit together."""
    page_files: Sequence[PageLinks]
    """The page files of one rank, or of all ranks if one process has all files. Empty if nothing
    was committed; publishing is then refused."""
    contents: Callable[[], ModelContents]
    """Returns the unpaged values of the model, and all names."""
    model_prefix: str
    """Prefix of the names of the model. It ends in a dot, or is empty."""
    is_rewind: bool = False
    """True if the run was rewound to the committed step and has done no step since."""
    for_reshard: bool = False
    """True if another number of ranks begins from the checkpoint; allows RESHARDED_NAME."""


def publish(
    committed: Committed,
    path: str,
    *,
    keep_last: int | None = None,
    on_progress: Callable[[int, int], None] = lambda copied, total: None,
    on_copying: Callable[[Publication], None] = lambda publication: None,
) -> Publication:
    """Publish a commit as the directory ``path``; all ranks call it together.

    If all pages are linked, the checkpoint is published when this returns. Other pages are copied:
    in the background if there is one rank and its filesystem has links, else before this returns.

    Args:
        committed: the commit.
        path: the directory; absent or empty.
        keep_last: number of checkpoints of this run to keep in the directory above, including this
            one. At most one more is kept; see retention.retain().
        on_progress: called with the bytes copied so far and the bytes to copy in total.
        on_copying: called with a publication that continues in the background, before publish()
            returns it or is interrupted.

    Raises:
        CheckpointError: ``path`` exists or cannot be made, or as in checked_place(); or a
            checkpoint cannot hold a value of the model.
        StorageError: the disk refused, for example because it is full. Nothing is left of the
            checkpoint.
        CorruptionError: a copied page is not what was committed. Nothing is left.
    """
    peers = committed.peers
    publishing = together(
        peers,
        "check the call of checkpoint()",
        lambda: _Publishing(committed, path, keep_last, on_progress),
    )
    try:
        publishing.agree_on_call()
    except BaseException:
        publishing.close()
        raise
    try:
        publishing.make_directory()
        copying = any(agree(peers, "link pages", publishing.link_pages))
        # decisions: A shared page file is recognized by its link count. With a second link in the
        # run, training can continue while the bytes of the file are copied.
        held = copying and all(agree(peers, "hold pages", publishing.hold_pages))
        publishing.describe()
        # With several ranks, collectives of another thread would have to be ordered with the
        # collectives of training.
        if held and peers.world_size == 1:
            publishing.finish_in_background(on_copying)
            return publishing.publication
        publishing.finish(copying=copying)
    except BaseException:
        publishing.give_up()
        raise
    publishing.close()
    publishing.publication.outcome.settle(lambda: None)
    return publishing.publication


def checked_place(path: str, *, for_reshard: bool = False) -> Path:
    """Return the absolute path of a checkpoint.

    Args:
        path: the directory that the user names.
        for_reshard: whether a run is published in itself, to go on on other ranks.

    Raises:
        CheckpointError: a checkpoint cannot have this name, or a run would remove the directory
            when it goes on on fewer ranks.
    """
    absolute = Path(path).absolute()  # Not abspath(): the system follows links before "..".
    name = absolute.name
    if not name or name.startswith((".", "rank-")) or (name == RESHARDED_NAME and not for_reshard):
        raise CheckpointError(
            f"{path!r} cannot name a checkpoint: give a directory whose name is not "
            f'"{RESHARDED_NAME}" and begins neither with a dot nor with "rank-"'
        )
    for directory in Path(os.path.realpath(absolute)).parents:
        is_named = folder_rank(directory.name) is not None or directory.name == RESHARDED_NAME
        if is_named and _is_run(directory.parent):
            raise CheckpointError(
                f"{path!r} is in {directory}, which a run uses and may remove: name a directory "
                "outside of it"
            )
    return absolute


def _is_run(directory: Path) -> bool:
    """Return whether a directory holds a run. Directories of users may also be called rank-*."""
    folder = glob.escape(str(directory))
    return any(glob.glob(f"{folder}/rank-*/{name}") for name in (IDENTITY_NAME, STRIPING_NAME))


class _Publishing:
    """One attempt to publish, on one rank.

    Args:
        committed: the commit.
        path: the directory.
        keep_last: as in publish().
        on_progress: as in publish().

    Raises:
        ValueError, CheckpointError: as in publish(), for the arguments of this rank.
    """

    def __init__(
        self,
        committed: Committed,
        path: str,
        keep_last: int | None,
        on_progress: Callable[[int, int], None],
    ) -> None:
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last must be at least 1, or None for all; got {keep_last!r}")
        if committed.model_prefix and not re.fullmatch(r"[^.]+\.", committed.model_prefix):
            raise ValueError(
                f'model_prefix must be a name and a dot, or "", got {committed.model_prefix!r}'
            )
        absolute = checked_place(path, for_reshard=committed.for_reshard)
        self._name = absolute.name
        if not committed.page_files:
            raise CheckpointError("the run has no step to publish yet: do a step first")
        self._peers = committed.peers
        self._page_files = committed.page_files
        self._contents = committed.contents()
        self._model_prefix = committed.model_prefix
        self._is_rewind = committed.is_rewind
        self._keep_last = keep_last
        self._on_progress = on_progress
        self._manifest = self._page_files[0].commit.manifest
        self._parent = str(absolute.parent)
        self._folder: Folder | None = None
        self._parts: Parts | None = None
        self._metadata = self._marker = b""
        self._copying = Latch()
        """Set when the background thread owns this attempt and the caller knows it."""
        self._owner = threading.Lock()  # The thread that finishes or gives up takes it once.
        self.publication = Publication(path, self._manifest.step)

    def agree_on_call(self) -> None:
        """Check that all ranks publish the same commit; agree on the name of this attempt.

        Raises:
            CheckpointError: the ranks pass different names or have different models, or the
                directory above the checkpoint cannot be used.
        """
        cut = xxhash.xxh3_128_hexdigest(repr(self._contents.cut).encode())

        def call() -> tuple[str, str, str]:
            self._open_folder()
            return secrets.token_hex(4), self._name, cut

        calls = agree(self._peers, "open the directory above the checkpoint", call)
        tokens, names, cuts = zip(*calls, strict=True)
        if len(set(names)) > 1:
            raise CheckpointError(
                f"all ranks must give the checkpoint one name, but they give {list(names)}: pass "
                "the same path on each"
            )
        if len(set(cuts)) > 1:
            raise CheckpointError(
                "the ranks have different buffers or frozen parameters, or have them in different "
                "orders: give all ranks the same model"
            )
        # The token is in the temporary name: an attempt never writes into leftovers of another one.
        self._token = tokens[0]
        assert self._folder is not None
        age = self._manifest.epoch - self._is_rewind, self._manifest.step
        self._directory = CheckpointDirectory(
            self._folder, self._name, self._manifest.run_id, self._token, age
        )

    def _open_folder(self) -> None:
        try:
            self._folder = self._page_files[0].storage.folder(self._parent)
        except RunDirectoryError as error:  # The directory above a checkpoint is not a run.
            raise CheckpointError(str(error)) from error

    def close(self) -> None:
        """Release the directory above the checkpoint. Log a failure."""
        if self._folder is not None:
            try:
                self._folder.close()
            except StorageError as error:  # The outcome of publishing is known already.
                logger.warning("%s", error)

    def make_directory(self) -> None:
        """Make the temporary directory, and a further one for ranks that do not see it."""
        sees = [False] * self._peers.world_size
        makers = 0
        while not all(sees):
            together(self._peers, "make the checkpoint directory", partial(self._make_on, sees))
            sees = agree(self._peers, "list the checkpoint directory", self._directory.is_visible)
            makers += 1
        if makers > 1:
            self._parts = Parts(self._peers, self._directory)
            if self._peers.rank == 0:
                logger.warning(
                    "the checkpoint %s is in %d parts, because ranks see different directories "
                    "under its path: copy all of them into one directory to load it",
                    self.publication.path,
                    makers,
                )

    def _make_on(self, sees: Sequence[bool]) -> None:
        """Make the directory on the first rank that does not see it."""
        if self._peers.rank == sees.index(False):
            self._directory.make()

    def link_pages(self) -> bool:
        """Link pages into the directory; return whether some must be copied."""
        for files in self._page_files:
            files.link(self._directory.folder, self._directory.child)
        total = sum(files.nbytes for files in self._page_files)
        bytes_to_copy = sum(files.bytes_to_copy for files in self._page_files)
        self.publication.bytes_total = bytes_to_copy or total
        self.publication.bytes_linked = total - bytes_to_copy
        return bytes_to_copy > 0

    def hold_pages(self) -> bool:
        """Link the pages to copy within the run; return whether that is possible."""
        return all(files.hold(self._token) for files in self._page_files)

    def describe(self) -> None:
        """Write all files except the pages. Afterwards the model may change."""
        commits = [files.commit for files in self._page_files]
        data: dict[str, bytes] = {}
        for commit in commits:
            data[published_manifest(commit.manifest.rank)] = commit.manifest.to_bytes()
            data[published_layout(commit.manifest.rank)] = commit.layout.to_bytes()
        digests = {name: _digest(content) for name, content in data.items()}
        gathered = self._peers.gather((commits, digests))
        commits = [commit for some, _ in gathered for commit in some]
        digests = {name: digest for _, some in gathered for name, digest in some.items()}

        def put() -> None:
            values = self._contents.values()
            try:
                for name, content in data.items():
                    self._directory.put(name, content)
                if self._peers.rank == 0:
                    self._describe(commits, digests, values)
            finally:
                # All ranks gather the values together. A rank that stops early would leave the
                # others in a collective.
                for _ in values:
                    pass

        together(self._peers, "describe the checkpoint", put)
        if self._parts is not None:
            self._metadata = self._parts.share(self._metadata, self._marker)

    def finish(self, *, copying: bool) -> None:
        """Copy the pages that could not be linked, and give the directory the final name."""
        if copying:
            together(self._peers, "copy pages", self._copy_pages)
        if self._parts is None:
            on_rank_0(self._peers, "name the checkpoint", lambda: self._take_name(self._marked()))
        else:
            self._parts.name(self._metadata, self._take_name, self._keep_last, self._marked)

    def finish_in_background(self, on_copying: Callable[[Publication], None]) -> None:
        """Start a thread that copies and finishes; return when the thread has begun."""
        Threads(1, "tierstore-publish").submit(self._finish_alone, on_copying)
        self._copying.wait()

    def _finish_alone(self, on_copying: Callable[[Publication], None]) -> None:
        if not self._owner.acquire(blocking=False):
            return  # give_up() came first.
        on_copying(self.publication)
        self._copying.set()
        self.publication.outcome.settle(self._finish_or_undo)

    def _finish_or_undo(self) -> None:
        try:
            self.finish(copying=True)
        except BaseException as error:
            self._undo()
            # Log it: the caller may never ask for the outcome.
            logger.error("the checkpoint %s was not published: %s", self.publication.path, error)
            raise
        self.close()

    def give_up(self) -> None:
        """Remove and release all of it, unless the background thread owns this attempt."""
        if self._owner.acquire(blocking=False):
            self._undo()
        else:
            self._copying.wait()

    def _undo(self) -> None:
        for files in self._page_files:
            files.drop()
        self._directory.remove()
        self.close()

    def _copy_pages(self) -> None:
        def count(nbytes: int) -> None:
            self.publication.bytes_copied += nbytes
            self._on_progress(self.publication.bytes_copied, self.publication.bytes_total)

        for files in self._page_files:
            files.copy(self._directory.folder, self._directory.child, count)

    def _describe(
        self,
        commits: Sequence[Commit],
        digests: Mapping[str, dict[str, Any]],
        values: Iterable[tuple[str, Any, Hashable]],
    ) -> None:
        """Write the unpaged values and the marker; build the content of ``.metadata``."""
        known = {files.commit.manifest.rank: files.pages for files in self._page_files}
        published = [
            (commit, known.get(commit.manifest.rank) or commit.pages()) for commit in commits
        ]
        unpaged = _UnpagedFile(self._directory.folder, self._directory.child)
        self._metadata = checkpoint_metadata(
            published, self._contents.names, values, self._model_prefix, unpaged.append
        )
        files = {
            published_page(commit.manifest.rank, page.number): {
                "nbytes": page.layout.nbytes,
                "xxh3_128": None,  # The manifest has checksums. This one would read every page.
            }
            for commit, pages in published
            for page in pages
        }
        files |= digests
        files[METADATA_NAME] = _digest(self._metadata)
        files[UNPAGED_NAME] = unpaged.finish()
        marker: dict[str, Any] = {
            "run_id": self._manifest.run_id,
            "step": self._manifest.step,
            "world_size": self._manifest.world_size,
            "name": self._directory.name,
            "files": files,
        }
        if self._manifest.epoch:
            marker["epoch"] = self._manifest.epoch
        self._marker = seal("checkpoint", marker)
        self._directory.put(MARKER_NAME, self._marker)

    def _marked(self) -> Marked:
        """Return the marks of the checkpoints beside this one, if retention may remove one."""
        return {} if self._keep_last is None else self._directory.marked_by_ranks()

    def _take_name(self, marked: Marked) -> None:
        """Publish the directory of rank 0, and remove the oldest checkpoints beside it."""
        # Make the new checkpoint durable before an old one is removed: a crash leaves one too many.
        self._directory.take_name(self._metadata)
        self._directory.keep()
        self._directory.retain(self._keep_last, marked)


class _UnpagedFile:
    """The file of all unpaged values while it is being written."""

    def __init__(self, folder: Folder, child: str) -> None:
        self._folder = folder
        self._child = child
        self._nbytes = 0
        self._hash = xxhash.xxh3_128()
        self.append(b"")  # Creates the file.

    def append(self, data: bytes) -> int:
        """Append bytes; return their offset."""
        offset = self._nbytes
        self._folder.append(self._child, UNPAGED_NAME, memoryview(data))
        self._hash.update(data)
        self._nbytes += len(data)
        return offset

    def finish(self) -> dict[str, Any]:
        """Make the file's data durable; return the entry of the file in the marker."""
        self._folder.flush(self._child, UNPAGED_NAME)
        return {"nbytes": self._nbytes, "xxh3_128": self._hash.hexdigest()}


def _digest(data: bytes) -> dict[str, Any]:
    return {"nbytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
