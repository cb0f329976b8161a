"""Publishing a committed step: links to its page files, and one metadata file.

The page files are the checkpoint already. A directory is built under a temporary name:
links to the page files, each rank's manifest with its checksums, a file of all that is in
no page, ``tierstore.json`` and last ``.metadata``; then it takes its name. Pages that cannot
be linked, because the path is on another filesystem, are copied in the background.

Until the name is durable, whatever fails or interrupts leaves nothing behind; from then on
nothing takes the checkpoint away again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from tierstore.checkpoint.contents import ModelContents, plain_names
from tierstore.checkpoint.files import (
    MARKER_NAME,
    METADATA_NAME,
    UNPAGED_NAME,
    published_manifest,
    published_page,
)
from tierstore.checkpoint.metadata import checkpoint_metadata, layouts_of
from tierstore.checkpoint.retention import (
    is_taken,
    remove,
    remove_leftovers,
    retain,
    temporary_prefix,
)
from tierstore.checkpoint.verify import kind_of
from tierstore.checksums import block_checksum
from tierstore.directories import open_run_directory, rank_directory
from tierstore.errors import (
    CheckpointError,
    CorruptionError,
    RunDirectoryError,
    StorageError,
    TierstoreError,
)
from tierstore.manifest import Manifest, page_file, seal
from tierstore.page import BLOCK_BYTES, PageLayout
from tierstore.peers import Alone, Peers, agree
from tierstore.publication import Publication
from tierstore.run import LOCK_TIMEOUT_S, find_run
from tierstore.storage.base import Folder, Storage

logger = logging.getLogger("tierstore")

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""How a filesystem says that a file can have no second name there."""
_RANK_FOLDER = re.compile(r"rank-\d{5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What one rank has to publish: a commit, its files, and names for what is in them."""

    storage: Storage
    peers: Peers
    manifest: Manifest | None
    """None if nothing was committed yet, which is refused."""
    layouts: Sequence[PageLayout]
    """Those of its pages."""
    contents: Callable[[], ModelContents]
    """Says what of the model is in no page, and the names of what is."""
    model_prefix: str
    """What stands before the names of the model: ends in a dot, or is empty."""
    provide_spares: Callable[[Iterable[str]], None]
    """Allocates what shall take the place of these page files in the run."""

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
        copying = any(agree(committed.peers, publishing.link_pages))
        held = copying and all(agree(committed.peers, publishing.hold_pages))
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


def publish_run(
    run: Path, out: Path, *, on_progress: Callable[[int, int], None] = lambda copied, total: None
) -> Publication:
    """Publish the committed step of a run that nobody uses; see publish().

    It holds what is paged: the rest of the model is not in a run.

    Raises:
        CheckpointError: ``run`` holds no run, or one of several ranks, or this user may not
            read it; or as in publish().
        RunDirectoryError: nothing was committed, or the directory cannot be used.
        RunLockedError: a process uses the run.
        StorageError, CorruptionError: as in publish().
    """
    if kind_of(run) != "run":
        raise CheckpointError(f"{run} is a checkpoint already: name a run directory")
    directory = rank_directory(run, rank=0)
    if list(filter(_RANK_FOLDER.fullmatch, os.listdir(run))) != [directory.name]:
        raise CheckpointError(
            f"{run} holds a run of several ranks: publish it from the job, with store.checkpoint()"
        )
    with contextlib.closing(open_run_directory(run, rank=0)) as storage:
        storage.lock(LOCK_TIMEOUT_S)
        _, manifest = find_run(storage, Alone())
        assert manifest is not None
        names = plain_names(spec.name for group in manifest.groups for spec in group)
        committed = Committed(
            storage=storage,
            peers=Alone(),
            manifest=manifest,
            layouts=layouts_of(manifest),
            contents=lambda: ModelContents(names=names, unpaged={}),
            model_prefix="model.",
            # Whoever goes on with the run allocates them.
            provide_spares=lambda names: None,
        )
        publication = publish(committed, os.fspath(out), on_progress=on_progress)
        publication.wait()
        return publication


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
        self._token: str = agree(self._peers, self._prepare)[0]
        self._child = f"{temporary_prefix(self._name, self._manifest.run_id)}{self._token}"
        self._page_files = [
            (page_file(page, entry.copy), published_page(self._manifest.rank, page))
            for page, entry in enumerate(self._manifest.pages)
        ]
        self._held: list[str] = []
        self._copied: list[int] = []  # Those of this rank's pages that cannot be linked.
        self._named = False
        self._published = False  # Whether it has its name for good.
        self._mutex = threading.Lock()  # Of these two, only one ever becomes true.
        self._copying = threading.Event()
        self._given_up = False
        self._blocks = [layout.blocks for layout in committed.layouts]
        self.publication = Publication(path, self._manifest.step)

    def _prepare(self) -> str:
        """Refuse a wrong call on all ranks; return what tells this attempt from others."""
        if self._keep_last is not None and (
            not isinstance(self._keep_last, int) or self._keep_last < 1
        ):
            raise ValueError(
                f"keep_last must be at least 1, or None for all; got {self._keep_last!r}"
            )
        folder, self._name = os.path.split(os.path.abspath(self._path))
        if not self._name or self._name.startswith((".", "rank-")):
            raise CheckpointError(
                f"{self._path!r} cannot name a checkpoint: give a directory whose name begins "
                'neither with a dot nor with "rank-"'
            )
        if self._committed.manifest is None:
            raise CheckpointError("there is no step to publish yet: do one first")
        self._manifest = self._committed.manifest
        self._contents = self._committed.contents()
        try:
            self._folder: Folder = self._committed.storage.folder(folder)
        except RunDirectoryError as error:  # No directory of a run, here.
            raise CheckpointError(str(error)) from error
        return secrets.token_hex(4)

    def begin(self) -> None:
        """Make the temporary directory, after looking whether its name will be free."""

        def make() -> None:
            if self._peers.rank:
                return
            if is_taken(self._folder, self._name):
                raise CheckpointError(
                    f"{self._folder.location}/{self._name} is there already: name another "
                    "directory, or remove that one first"
                )
            remove_leftovers(self._folder, self._manifest.run_id)
            self._folder.make(self._child)

        agree(self._peers, make)

    def link_pages(self) -> bool:
        """Link pages into the directory; return whether any must be copied instead."""
        storage = self._committed.storage
        self._committed.provide_spares(name for name, _ in self._page_files)
        for page, (name, new_name) in enumerate(self._page_files):
            try:
                self._folder.link(storage, name, self._child, new_name)
            except StorageError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._copied.append(page)
        nbytes = [layout.nbytes for layout in self._committed.layouts]
        bytes_to_copy = sum(nbytes[page] for page in self._copied)
        self.publication.bytes_total = bytes_to_copy or sum(nbytes)
        self.publication.bytes_linked = sum(nbytes) - bytes_to_copy
        return bool(self._copied)

    def hold_pages(self) -> bool:
        """Give page files that are to be copied second names, by which they stay as they are.

        Returns:
            Whether that can be. Else the run may write nothing until they are copied.
        """
        for page in self._copied:
            name, _ = self._page_files[page]
            self._held.append(f"{name}.copying-{self._token}")
            try:
                self._committed.storage.link(name, self._held[-1])
            except StorageError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._held.pop()
                self._release_pages()
                return False
        return True

    def describe(self) -> None:
        """Write all that is not a page, and say what is where; the model may change then."""
        data = self._manifest.to_bytes()
        gathered = self._peers.gather((self._manifest, _digest(data), self._contents.names))
        names = {name: found for _, _, theirs in gathered for name, found in theirs.items()}

        def put() -> None:
            self._folder.put(self._child, published_manifest(self._peers.rank), data)
            if self._peers.rank == 0:
                self._describe(
                    [manifest for manifest, _, _ in gathered],
                    [digest for _, digest, _ in gathered],
                    replace(self._contents, names=names),
                )

        agree(self._peers, put)

    def finish(self, *, copying: bool) -> None:
        """Copy what could not be linked, and give the directory its name."""
        if copying:
            agree(self._peers, self._copy_pages)
        agree(self._peers, self._take_name)

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
        for name in self._held:  # The last one is perhaps not there yet.
            with contextlib.suppress(TierstoreError):
                self._committed.storage.unlink(name)
        if self._peers.rank == 0 and not self._published:
            with contextlib.suppress(TierstoreError):
                if self._named:
                    self._folder.rename(self._name, self._child)
                    self._folder.sync_children()  # Or a part of it might keep the name.
                remove(self._folder, self._child)

    def _release_pages(self) -> None:
        while self._held:
            self._committed.storage.unlink(self._held[-1])
            self._held.pop()

    def _copy_pages(self) -> None:
        if not self._copied:
            return
        # Not closed: after an error something may still refer to it.
        memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_DONTFORK)
        buffer = memoryview(memory)
        sources = list(self._held) or [self._page_files[page][0] for page in self._copied]
        for page, source in zip(self._copied, sources, strict=True):
            new_name = self._page_files[page][1]
            for number, block in enumerate(self._blocks[page]):
                data = buffer[: block.nbytes]
                self._committed.storage.read(source, block, data).wait()
                self._check(page, number, data)
                self._folder.append(self._child, new_name, data)
                self.publication.bytes_copied += block.nbytes
                self._on_progress(self.publication.bytes_copied, self.publication.bytes_total)
            self._folder.flush(self._child, new_name)
        self._release_pages()

    def _check(self, page: int, number: int, data: memoryview) -> None:
        entry, block = self._manifest.pages[page], self._blocks[page][number]
        if not entry.checksums:
            return
        found = block_checksum(
            data,
            run_id=self._manifest.run_id,
            page=page,
            offset=block.offset,
            step=entry.step,
        )
        if found != entry.checksums[number]:
            name = page_file(page, entry.copy)
            raise CorruptionError(
                f"{self._committed.storage.home(name).location}/{name}: the "
                f"{block.nbytes} bytes at offset {block.offset} are not those written in step "
                f"{entry.step}; nothing was published"
            )

    def _describe(
        self,
        manifests: Sequence[Manifest],
        digests: Sequence[dict[str, Any]],
        contents: ModelContents,
    ) -> None:
        commits = [(self._manifest, self._committed.layouts)]
        commits += [(manifest, layouts_of(manifest)) for manifest in manifests[1:]]
        unpaged = _UnpagedFile(self._folder, self._child)
        self._metadata = checkpoint_metadata(
            commits, contents, self._committed.model_prefix, unpaged.append
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
        self._folder.put(self._child, MARKER_NAME, seal("checkpoint", marker))

    def _take_name(self) -> None:
        """Rank 0 makes the names in the directory durable, those of all ranks, then its own."""
        if self._peers.rank:
            return
        folder, child = self._folder, self._child
        folder.put(child, METADATA_NAME, self._metadata)
        folder.sync(child)
        folder.rename(child, self._name)
        self._named = True
        folder.sync_children()
        self._published = True
        if self._keep_last is not None:
            try:
                retain(folder, self._manifest.run_id, self._name, self._keep_last)
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
