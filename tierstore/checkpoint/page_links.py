"""Page files of one rank's commit in a checkpoint: linked, or copied if that is impossible."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tierstore.errors import CorruptionError, StorageError, TierstoreError
from tierstore.layout.page_layout import BLOCK_BYTES
from tierstore.run.checksums import block_fault
from tierstore.run.commit import Commit, CommittedPage
from tierstore.run.file_names import page_file, published_page
from tierstore.storage.base import Folder, Storage

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a filesystem that cannot give a file a further name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """The commit of one rank, and the storage of its files."""

    storage: Storage
    commit: Commit
    pages: Sequence[CommittedPage]
    """The pages of the commit."""
    provide_spares: Callable[[Iterable[str]], None]
    """Allocates the files that will replace these page files in the run."""


class PageFiles:
    """Links or copies the page files of one rank into the directory of a checkpoint.

    Args:
        commit: of the rank.
        token: distinguishes the temporary links of this attempt.
    """

    def __init__(self, commit: RankCommit, token: str) -> None:
        self.commit = commit
        manifest = commit.commit.manifest
        self.names = {
            page: (page_file(page, entry.slot), published_page(manifest.rank, page))
            for page, entry in manifest.entries.items()
        }
        """Page number -> the name of its file in the run and in the checkpoint."""
        self._token = token
        self._storage = commit.storage
        self._unlinked: list[CommittedPage] = []
        """The pages to copy."""
        self._links: list[str] = []
        """Temporary links to their files, so that the run may replace these meanwhile."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.layout.nbytes for page in self.commit.pages)

    @property
    def bytes_to_copy(self) -> int:
        """Bytes of the pages that could not be linked."""
        return sum(page.layout.nbytes for page in self._unlinked)

    def link(self, folder: Folder, child: str) -> None:
        """Allocate what will replace the pages in the run, then link the pages where possible."""
        self.commit.provide_spares(name for name, _ in self.names.values())
        for page in self.commit.pages:
            name, new_name = self.names[page.number]
            try:
                folder.link(self._storage, name, child, new_name)
            except StorageError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._unlinked.append(page)

    def hold(self) -> bool:
        """Link the page files to copy within the run, so that nothing overwrites them.

        Returns:
            Whether the filesystem can. Else the run must not write until they are copied.
        """
        for page in self._unlinked:
            name, _ = self.names[page.number]
            self._links.append(f"{name}.copying-{self._token}")
            try:
                self._storage.link(name, self._links[-1])
            except StorageError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._links.pop()
                self._release()
                return False
        return True

    def copy(self, folder: Folder, child: str, on_copied: Callable[[int], None]) -> None:
        """Copy the pages that could not be linked, and check each block.

        Args:
            folder: the directory above the checkpoint.
            child: the name of the checkpoint there.
            on_copied: called with the number of bytes of each block.

        Raises:
            CorruptionError: a block is not what was committed.
            StorageError: the disk refuses.
        """
        if not self._unlinked:
            return
        # Not closed: after an error a traceback may still refer to it.
        memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_DONTFORK)
        buffer = memoryview(memory)
        sources = list(self._links) or [self.names[page.number][0] for page in self._unlinked]
        for page, source in zip(self._unlinked, sources, strict=True):
            _, new_name = self.names[page.number]
            for number, block in enumerate(page.layout.blocks):
                data = buffer[: block.nbytes]
                self._storage.read(source, block, data).wait()
                self._check(page, number, data)
                folder.append(child, new_name, data)
                on_copied(block.nbytes)
            folder.flush(child, new_name)
        self._release()

    def drop(self) -> None:
        """Remove the temporary links; recovery removes a link that stays."""
        for name in self._links:  # The last one may not exist yet.
            with contextlib.suppress(TierstoreError):
                self._storage.unlink(name)

    def _release(self) -> None:
        while self._links:
            self._storage.unlink(self._links[-1])
            self._links.pop()

    def _check(self, page: CommittedPage, number: int, data: memoryview) -> None:
        fault = block_fault(
            data,
            page.entry.checksums,
            number,
            page.layout.blocks[number],
            run_id=self.commit.commit.manifest.run_id,
            page=page.number,
            step=page.entry.step,
        )
        if fault is not None:
            name, _ = self.names[page.number]
            raise CorruptionError(
                f"{self._storage.home(name).location}/{name}: {fault}; nothing was published"
            )
