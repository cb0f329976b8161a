"""Verification of published checkpoints in the background.

A checkpoint is *whole* when every byte of its files was read after the last write and matched its
checksum, on all ranks. A rank that has read its files puts a mark into the checkpoint, by which
retention knows which checkpoints are whole.
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
"""Errors of a file whose directory is no longer where it was published."""

_DAMAGE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors of a disk that lacks the bytes of a file, or of a filesystem that finds them wrong."""


class Verifier:
    """Reads the checkpoints that one rank has published, one at a time, on a thread of its own.

    Its methods are called by one thread.
    """

    def __init__(self) -> None:
        self._thread: Threads | None = None
        self._verification: Result[None] | None = None
        self._forgotten: Result[None] | None = None
        self._cancelled = False
        self._page: CommittedPage | None = None  # The thread reads its file.

    def start(self) -> None:
        """Start the thread and allocate its buffer, unless that was done.

        Raises:
            ThreadError: the system starts no further thread.
            BudgetError: the machine has not enough memory.
        """
        if self._thread is None:
            # Not closed: after an error a traceback may still refer to it.
            self._buffer = memoryview(map_memory(_PIECE_BYTES))
            self._thread = Threads(1, "tierstore-verify")

    def begin(
        self,
        page_files: PageLinks,
        publication: Publication,
        is_in_run: Callable[[CommittedPage], bool],
    ) -> None:
        """Begin to verify a checkpoint, once it is published. Call start() and wait() first.

        A checkpoint is not marked, and nothing is raised, if it was moved or removed meanwhile, if
        this process cannot open its files, or if it is damaged in a file that the run does not
        also have.

        Args:
            page_files: the page files of this rank.
            publication: the checkpoint.
            is_in_run: returns whether the committed step has the same file of a page; called on
                the thread.
        """
        assert self._thread is not None, "start() comes first"
        path = Path(publication.path).absolute()
        try:  # Now: later there may be another directory at this path, or none, which is made.
            folder = page_files.storage.folder(str(path.parent))
        except (StorageError, RunDirectoryError) as error:
            logger.warning("the checkpoint %s is not verified: %s", path, error)
            return
        self._verification = self._thread.submit(
            self._verify, page_files, publication, folder, path.name, is_in_run
        )

    def check(self) -> None:
        """Raise what the last verification has found, if it has ended.

        Raises:
            CorruptionError, StorageError: as wait().
        """
        if self._verification is not None and self._verification.is_set:
            self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the last verification has ended, and raise what it has found, once.

        Returns:
            False if it goes on after ``timeout_s``.

        Raises:
            CorruptionError: a page file, which the run has, too, is not what was committed.
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
        """Drop what the last verification finds: the run has other files now."""
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
        """Read the files of this rank and mark the checkpoint; runs on the thread."""
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
        """Log what was found in the checkpoint ``where``; raise it if the run has it, too."""
        if isinstance(error, StorageError) and error.errno in _MOVED:
            text = "the checkpoint %s was moved or removed before all of it was verified: %s"
            logger.warning(text, where, error)
        elif isinstance(error, StorageError) and error.errno not in _DAMAGE:
            logger.warning("the checkpoint %s is not verified: %s", where, error)
        elif self._page is None or not is_in_run(self._page):
            logger.error(
                "the checkpoint %s is damaged, and the run is not: remove the checkpoint, and look "
                "at its disk: %s",
                where,
                error,
            )
        else:
            # The program may make no further call.
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
                    "is damaged, and so is the run, which has the same file: begin a new run with "
                    "restore(checkpoint=PATH) from the newest checkpoint that `tierstore verify` "
                    "finds good"
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
        """Return the fault of a page file in words; None if it has none, or if close() came."""
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
        """Read a block, a piece at a time into the one buffer; less of it if the file ends."""
        end = block.offset + block.nbytes
        for offset in range(block.offset, end, _PIECE_BYTES):
            piece = self._buffer[: min(_PIECE_BYTES, end - offset)]
            yield piece[: folder.read(child, name, offset, piece)]

    def _digest(self, folder: Folder, child: str, name: str) -> tuple[int, str]:
        """Return the length and the checksum of a file; of a part of it if close() came first."""
        found, nbytes = xxhash.xxh3_128(), 0
        while not self._cancelled:
            count = folder.read(child, name, nbytes, self._buffer)
            found.update(self._buffer[:count])
            nbytes += count
            if count < len(self._buffer):
                break
        return nbytes, found.hexdigest()


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
