"""The page files of one rank's commit on their way into a checkpoint: linked, else copied."""

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
"""How a filesystem says that a file can have no second name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommit:
    """The commit of one rank, and its files."""

    storage: Storage
    commit: Commit
    pages: Sequence[CommittedPage]
    """The pages of the commit."""
    provide_spares: Callable[[Iterable[str]], None]
    """Allocates what shall take the place of these page files in the run."""


class PageFiles:
    """Brings the page files of one rank into a directory that all ranks publish in.

    Args:
        commit: the rank's.
        token: tells the names that hold files meanwhile from those of others.
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
        self._held: list[str] = []
        self._unlinked: list[CommittedPage] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.layout.nbytes for page in self.commit.pages)

    @property
    def bytes_to_copy(self) -> int:
        """Bytes of those that could not be linked."""
        return sum(page.layout.nbytes for page in self._unlinked)

    def link(self, folder: Folder, child: str) -> None:
        """Link as many pages as can be, and have space for what takes their place in the run."""
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
        """Give page files that are to be copied second names, by which they stay as they are.

        Returns:
            Whether that can be. Else the run may write nothing until they are copied.
        """
        for page in self._unlinked:
            name, _ = self.names[page.number]
            self._held.append(f"{name}.copying-{self._token}")
            try:
                self._storage.link(name, self._held[-1])
            except StorageError as error:
                if error.errno not in _NO_LINK:
                    raise
                self._held.pop()
                self._release()
                return False
        return True

    def copy(self, folder: Folder, child: str, on_copied: Callable[[int], None]) -> None:
        """Copy what could not be linked, each block checked on the way.

        Args:
            folder: where the checkpoint is made.
            child: its name there.
            on_copied: told of the bytes of each block.
        """
        if not self._unlinked:
            return
        # Not closed: after an error something may still refer to it.
        memory = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_DONTFORK)
        buffer = memoryview(memory)
        sources = list(self._held) or [self.names[page.number][0] for page in self._unlinked]
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
        """Give up the names that hold files, whatever fails."""
        for name in self._held:  # The last one is perhaps not there yet.
            with contextlib.suppress(TierstoreError):
                self._storage.unlink(name)

    def _release(self) -> None:
        while self._held:
            self._storage.unlink(self._held[-1])
            self._held.pop()

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
