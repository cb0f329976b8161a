"""Verification of published checkpoints in the background.

A checkpoint is *whole* when every block of every page file in it was read after its last write and
matched its checksum, on all ranks. A rank that has read its page files puts a mark into the
checkpoint, by which retention knows which checkpoints are whole.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from tierstore.checkpoint.page_links import PageLinks
from tierstore.checkpoint.publication import Publication
from tierstore.errors import CorruptionError, RunDirectoryError, StorageError
from tierstore.paging.buffers import map_memory
from tierstore.run.file_names import published_mark, published_page
from tierstore.run.whole_mark import mark_of
from tierstore.storage.base import Folder
from tierstore.threads import started_pool
from tierstore.units import Extent

logger = logging.getLogger("tierstore")

_PIECE_BYTES = 2**20


class Verifier:
    """Reads the checkpoints that one rank has published, one at a time, on a thread of its own.

    Its methods are called by one thread.

    Args:
        active: False if the pages have no checksums; then all methods do nothing.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._executor: ThreadPoolExecutor | None = None
        self._verification: Future[None] | None = None
        self._cancelled = threading.Event()

    def start(self) -> None:
        """Start the thread and allocate its buffer, unless that was done.

        Raises:
            ThreadError: the system starts no further thread.
            BudgetError: the machine has not enough memory.
        """
        if self.active and self._executor is None:
            # Not closed: after an error a traceback may still refer to it.
            self._buffer = memoryview(map_memory(_PIECE_BYTES))
            self._executor = started_pool(1, "tierstore-verify")

    def begin(self, page_files: PageLinks, publication: Publication) -> None:
        """Begin to verify a checkpoint, once it is published. Call start() and wait() first.

        A checkpoint is not marked, and nothing is raised, if pages of earlier steps have no
        checksums, or if it was moved or removed meanwhile, or the directory above it cannot be
        opened.

        Args:
            page_files: the page files of this rank.
            publication: the checkpoint.
        """
        if self._executor is None:
            return
        path = Path(publication.path).absolute()
        try:  # Now: later there may be another directory at this path, or none, which is made.
            folder = page_files.storage.folder(str(path.parent))
        except (StorageError, RunDirectoryError) as error:
            logger.warning("the checkpoint %s is not verified: %s", path, error)
            return
        self._verification = self._executor.submit(
            self._verify, page_files, publication, folder, path.name
        )

    def check(self) -> None:
        """Raise what the last verification has found, if it has ended.

        Raises:
            CorruptionError, StorageError: as wait().
        """
        if self._verification is not None and self._verification.done():
            self.wait()

    def wait(self) -> None:
        """Block until the last verification has ended, and raise what it has found, once.

        Raises:
            CorruptionError: a page file is not what was committed.
            StorageError: a page file cannot be read.
        """
        verification = self._verification
        if verification is not None:
            wait([verification])  # An interrupt leaves the outcome to the next call.
            self._verification = None
            verification.result()

    def close(self) -> None:
        """End the thread. A verification in progress stops, and the checkpoint is not marked."""
        self._cancelled.set()
        if self._executor is not None:
            self._executor.shutdown()

    def _verify(
        self, page_files: PageLinks, publication: Publication, folder: Folder, child: str
    ) -> None:
        """Read the page files of this rank and mark the checkpoint; runs on the thread."""
        try:
            publication.settle()
            has_checksums = all(page.entry.checksums for page in page_files.pages)
            is_published = publication.outcome.exception() is None
            if is_published and has_checksums and self._is_whole(page_files, folder, child):
                _mark(page_files, folder, child)
        finally:
            _close(folder)

    def _is_whole(self, page_files: PageLinks, folder: Folder, child: str) -> bool:
        """Compare all pages of this rank; False if they are not there, or if close() came first."""
        try:
            return self._read(page_files, folder, child)
        except (CorruptionError, StorageError) as error:
            where = f"{folder.location}/{child}"
            if isinstance(error, StorageError) and error.errno == errno.ENOENT:
                logger.warning(
                    "the checkpoint %s was moved or removed before all of it was verified: %s",
                    where,
                    error,
                )
                return False
            # The program may make no further call.
            logger.error("the checkpoint %s is not whole: %s", where, error)
            raise

    def _read(self, page_files: PageLinks, folder: Folder, child: str) -> bool:
        """Compare all blocks of the pages of this rank; return False if close() came first."""
        for page in page_files.pages:
            name = published_page(page_files.commit.manifest.rank, page.number)
            for index, block in enumerate(page.layout.blocks):
                if self._cancelled.is_set():
                    return False
                fault = page.block_fault(index, self._pieces(folder, child, name, block))
                if fault is not None:
                    raise CorruptionError(
                        f"{folder.location}/{child}/{name}: {fault}. The checkpoint is damaged, "
                        "and so is the run if it shares this file: begin a new run with "
                        "restore(checkpoint=PATH) from the newest checkpoint that "
                        "`tierstore verify` finds good"
                    )
        return True

    def _pieces(self, folder: Folder, child: str, name: str, block: Extent) -> Iterator[memoryview]:
        """Read a block, a piece at a time into the one buffer."""
        end = block.offset + block.nbytes
        for offset in range(block.offset, end, _PIECE_BYTES):
            piece = self._buffer[: min(_PIECE_BYTES, end - offset)]
            folder.read(child, name, Extent(offset, len(piece)), piece)
            yield piece


def _close(folder: Folder) -> None:
    """Close a folder; log an error, since everything in it is done."""
    try:
        folder.close()
    except StorageError as error:
        logger.warning("%s", error)


def _mark(page_files: PageLinks, folder: Folder, child: str) -> None:
    """Put the mark of this rank into a checkpoint; log an error, since only the mark is missing."""
    manifest = page_files.commit.manifest
    try:
        folder.put(child, published_mark(manifest.rank), mark_of(manifest))
        folder.sync(child)
    except StorageError as error:
        logger.warning(
            "%s/%s is whole and cannot be marked, so keep_last does not count on it: %s",
            folder.location,
            child,
            error,
        )
