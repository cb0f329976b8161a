"""Page files of one rank's commit in a checkpoint: linked, or copied if links are impossible."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tierstore.errors import CorruptionError, StorageError, TierstoreError
from tierstore.layout.page_layout import BLOCK_BYTES
from tierstore.paging.buffers import map_memory
from tierstore.run.commit import Commit, CommittedPage
from tierstore.run.file_names import page_file, published_page
from tierstore.storage.base import Folder, Storage

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a filesystem that cannot make a link to a file there."""


class PageLinks:
    """Links or copies the page files of one rank into the directory of a checkpoint.

    Args:
        storage: the storage of the rank's files.
        commit: the commit of the rank.
        pages: the pages of the commit.
        provide_spares: allocates the files that will replace these page files in the run.
    """

    def __init__(
        self,
        storage: Storage,
        commit: Commit,
        pages: Sequence[CommittedPage],
        provide_spares: Callable[[Iterable[str]], None] = lambda names: None,
    ) -> None:
        self.storage = storage
        self.commit = commit
        self.pages = pages
        self._provide_spares = provide_spares
        self._unlinked: list[CommittedPage] = []
        """The pages to copy."""
        self._links: list[str] = []
        """Temporary links to the files of unlinked pages. The run may then replace the files."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(page.layout.nbytes for page in self.pages)

    @property
    def bytes_to_copy(self) -> int:
        """Bytes of the pages that could not be linked."""
        return sum(page.layout.nbytes for page in self._unlinked)

    def is_linked(self, page: CommittedPage) -> bool:
        """Return whether the checkpoint shares the file of the page with the run."""
        return all(page is not unlinked for unlinked in self._unlinked)

    def link(self, folder: Folder, child: str) -> None:
        """Allocate the files that will replace the pages, then link the pages where possible."""
        self._provide_spares(map(_name, self.pages))
        for page in self.pages:
            if not _linked(folder.link, self.storage, _name(page), child, self._new_name(page)):
                self._unlinked.append(page)

    def hold(self, token: str) -> bool:
        """Link the page files to copy within the run, to protect them from writes.

        Args:
            token: identifies the temporary links of this attempt.

        Returns:
            False if the filesystem has no links. The run must then not write before copy() ends.
        """
        for page in self._unlinked:
            self._links.append(f"{_name(page)}.copying-{token}")
            if not _linked(self.storage.link, _name(page), self._links[-1]):
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
        # Do not close it: after an error a traceback may still refer to it.
        buffer = memoryview(map_memory(BLOCK_BYTES))
        sources = list(self._links) or map(_name, self._unlinked)
        for page, source in zip(self._unlinked, sources, strict=True):
            new_name = self._new_name(page)
            for index, block in enumerate(page.layout.blocks):
                data = buffer[: block.nbytes]
                self.storage.read(source, block, data).wait()
                fault = page.block_fault(index, [data])
                if fault is not None:
                    name = _name(page)
                    path = f"{self.storage.home(name).location}/{name}"
                    raise CorruptionError(f"{path}: {fault}; nothing was published")
                folder.append(child, new_name, data)
                on_copied(block.nbytes)
            folder.flush(child, new_name)
        self._release()

    def drop(self) -> None:
        """Remove the temporary links. Recovery removes a link that stays."""
        for name in self._links:  # The last one may not exist yet.
            with contextlib.suppress(TierstoreError):
                self.storage.unlink(name)

    def _release(self) -> None:
        while self._links:
            self.storage.unlink(self._links[-1])
            self._links.pop()

    def _new_name(self, page: CommittedPage) -> str:
        return published_page(self.commit.manifest.rank, page.number)


def _linked(link: Callable[..., None], *arguments: Any) -> bool:
    """Make a link; return False if the filesystem has no links."""
    try:
        link(*arguments)
    except StorageError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True


def _name(page: CommittedPage) -> str:
    return page_file(page.number, page.entry.slot)
