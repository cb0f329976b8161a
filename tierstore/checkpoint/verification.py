"""Verification of published checkpoints in the background.

A checkpoint is *whole* when every byte of its files was read after the last write and matched its
checksum, on all ranks. A rank that has read its files puts a mark into the checkpoint. Retention
finds whole checkpoints by these marks.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tierstore.checkpoint.page_links import PageLinks
from tierstore.checkpoint.publication import Publication
from tierstore.checkpoint.whole_mark import mark_of
from tierstore.errors import CorruptionError, RunDirectoryError, StorageError
from tierstore.inspection.run_reader import parse_marker
from tierstore.paging.buffers import map_memory
from tierstore.run.commit import CommittedPage
from tierstore.run.file_names import (
    MARKER_NAME,
    METADATA_NAME,
    UNPAGED_NAME,
    published_layout,
    published_manifest,
    published_mark,
    published_page,
)
from tierstore.storage.base import Folder
from tierstore.threads import Result, Threads
from tierstore.units import SECTOR_BYTES, Extent

logger = logging.getLogger("tierstore")

_PIECE_BYTES = 2**20

_MOVED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE})
"""Errors of a file whose directory was moved or removed after publishing."""

_DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors of a disk that cannot read bytes of a file, or of a filesystem that finds them wrong."""


class Verifier:
    """Reads the checkpoints that one rank has published, one at a time, on a separate thread.

    One thread calls the methods.
    """

    def __init__(self) -> None:
        self._thread: Threads | None = None
        self._verification: Result[None] | None = None
        self._forgotten: Result[None] | None = None
        self._cancelled = False
        self._page: CommittedPage | None = None  # The page whose file the thread reads.

    def start(self) -> None:
        """Start the thread and allocate its buffer, unless this was done before.

        Raises:
            ThreadError: the system starts no further thread.
            BudgetError: the machine has not enough memory.
        """
        if self._thread is None:
            # Do not close it: after an error a traceback may still refer to it.
            self._buffer = memoryview(map_memory(_PIECE_BYTES))
            self._thread = Threads(1, "tierstore-verify")

    def begin(
        self,
        page_files: PageLinks,
        publication: Publication,
        is_in_run: Callable[[CommittedPage], bool],
    ) -> None:
        """Begin to verify a checkpoint, once it is published. Call start() and wait() first.

        In these cases a checkpoint is not marked and no error is raised: it was moved or removed
        meanwhile, this process cannot open its files, or only files that the run does not have are
        damaged.

        Args:
            page_files: the page files of this rank.
            publication: the checkpoint.
            is_in_run: returns whether the committed step uses the same file of a page. Called on
                the thread.
        """
        assert self._thread is not None, "start() comes first"
        path = Path(publication.path).absolute()
        try:  # Open it now: the path may later name another directory, or would be created.
            folder = page_files.storage.folder(str(path.parent))
        except (StorageError, RunDirectoryError) as error:
            logger.warning("the checkpoint %s is not verified: %s", path, error)
            return
        self._verification = self._thread.submit(
            self._verify, page_files, publication, folder, path.name, is_in_run
        )

    def check(self) -> None:
        """Raise the damage that the last verification has found, if it has ended.

        Raises:
            CorruptionError, StorageError: as in wait().
        """
        if self._verification is not None and self._verification.is_set:
            self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the last verification has ended. Raise the damage that it found, once.

        Returns:
            False if it is still running after ``timeout_s``.

        Raises:
            CorruptionError: a page file that the run also has is not what was committed.
            StorageError: such a page file cannot be read.
        """
        verification = self._verification
        if verification is not None:
            # An interrupt leaves the outcome to the next call.
            if not verification.wait(timeout_s):
                return False
            self._verification = None
            if verification is not self._forgotten:
                verification.result()
        return True

    def forget(self) -> None:
        """Discard the result of the last verification: the run now has other files."""
        self._forgotten = self._verification

    def cancel(self) -> None:
        """Stop a verification in progress; the checkpoint is not marked."""
        self._cancelled = True

    def close(self) -> None:
        """End the thread. A verification in progress stops, and the checkpoint is not marked."""
        self.cancel()
        if self._thread is not None:
            self._thread.close()

    def _verify(
        self,
        page_files: PageLinks,
        publication: Publication,
        folder: Folder,
        child: str,
        is_in_run: Callable[[CommittedPage], bool],
    ) -> None:
        """Read the files of this rank and mark the checkpoint. Runs on the thread."""
        try:
            publication.settle()
            if publication.outcome.error is None:
                self._page = None
                try:
                    if self._read(page_files, folder, child):
                        _mark(page_files, folder, child)
                except (CorruptionError, StorageError) as error:
                    self._tell(error, f"{folder.location}/{child}", is_in_run)
        finally:
            _close(folder)

    def _tell(
        self,
        error: CorruptionError | StorageError,
        where: str,
        is_in_run: Callable[[CommittedPage], bool],
    ) -> None:
        """Log an error in the checkpoint ``where``. Raise it if the run has the same damage."""
        if isinstance(error, StorageError) and error.errno in _MOVED:
            text = "the checkpoint %s was moved or removed before all of it was verified: %s"
            logger.warning(text, where, error)
        elif isinstance(error, StorageError) and error.errno not in _DAMAGE:
            logger.warning("the checkpoint %s is not verified: %s", where, error)
        elif self._page is None or not is_in_run(self._page):
            logger.error(
                "the checkpoint %s is damaged, but the run is not: remove the checkpoint and check "
                "its disk: %s",
                where,
                error,
            )
        else:
            # Log it: the program may make no further call.
            logger.error("the checkpoint %s is not whole: %s", where, error)
            raise error

    def _read(self, page_files: PageLinks, folder: Folder, child: str) -> bool:
        """Compare all files of this rank; return False if close() came first."""
        where, rank = f"{folder.location}/{child}", page_files.commit.manifest.rank
        files: Mapping[str, Any] = parse_marker(
            folder.get(child, MARKER_NAME), f"{where}/{MARKER_NAME}"
        )["files"]
        for self._page in page_files.pages:
            fault = self._page_fault(
                self._page, folder, child, published_page(rank, self._page.number)
            )
            if self._cancelled:
                return False
            if fault is not None:
                raise CorruptionError(
                    f"{where}/{published_page(rank, self._page.number)}: {fault}. The checkpoint "
                    "and the run share this file, so both are damaged: begin a new run with "
                    "restore(checkpoint=PATH) from the newest checkpoint in which `tierstore "
                    "verify` finds no fault"
                )
        self._page = None
        names = [published_manifest(rank), published_layout(rank)]
        for name in names if rank else [*names, METADATA_NAME, UNPAGED_NAME]:
            nbytes, digest = self._digest(folder, child, name)
            if self._cancelled:
                return False
            if {"nbytes": nbytes, "xxh3_128": digest} != files.get(name):
                raise CorruptionError(f"{where}/{name} is not what was published")
        return True

    def _page_fault(self, page: CommittedPage, folder: Folder, child: str, name: str) -> str | None:
        """Return text for the fault of a page file; None without a fault, or after close()."""
        for index, block in enumerate(page.layout.blocks):
            if self._cancelled:
                return None
            fault = page.block_fault(index, self._pieces(folder, child, name, block))
            if fault is not None:
                return fault
        end = self._buffer[:SECTOR_BYTES]
        if folder.read(child, name, page.layout.nbytes, end):
            return f"it has more than its {page.layout.nbytes} bytes"
        return None

    def _pieces(self, folder: Folder, child: str, name: str, block: Extent) -> Iterator[memoryview]:
        """Read a block in pieces into the single buffer. Stops early if the file ends."""
        end = block.offset + block.nbytes
        for offset in range(block.offset, end, _PIECE_BYTES):
            piece = self._buffer[: min(_PIECE_BYTES, end - offset)]
            yield piece[: folder.read(child, name, offset, piece)]

    def _digest(self, folder: Folder, child: str, name: str) -> tuple[int, str]:
        """Return the length and the checksum of a file; of a part of the file after close()."""
        found, nbytes = xxhash.xxh3_128(), 0
        while not self._cancelled:
            count = folder.read(child, name, nbytes, self._buffer)
            found.update(self._buffer[:count])
            nbytes += count
            if count < len(self._buffer):
                break
        return nbytes, found.hexdigest()


def _close(folder: Folder) -> None:
    """Close a folder. Log an error instead of raising it: all work in the folder is done."""
    try:
        folder.close()
    except StorageError as error:
        logger.warning("%s", error)


def _mark(page_files: PageLinks, folder: Folder, child: str) -> None:
    """Put the mark of this rank into a checkpoint. Log an error: only the mark is then missing."""
    manifest = page_files.commit.manifest
    try:
        folder.put(child, published_mark(manifest.rank), mark_of(manifest))
        folder.sync(child)
    except StorageError as error:
        logger.warning(
            "%s/%s is whole but cannot be marked, so keep_last does not rely on it: %s",
            folder.location,
            child,
            error,
        )
