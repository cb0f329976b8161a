"""A commit of one rank as recovery and inspection read it: a manifest with its layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierstore.errors import CorruptionError
from tierstore.layout.page_layout import PageLayout
from tierstore.layout.parameters import ParameterSpec
from tierstore.run.checksums import block_hash
from tierstore.run.layout_file import RankLayout, load_layout
from tierstore.run.manifest import Manifest, PageEntry, unpack_scalars
from tierstore.storage.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedPage:
    """A page in a commit."""

    run_id: str
    number: int
    entry: PageEntry
    layout: PageLayout

    def block_fault(self, index: int, pieces: Iterable[memoryview]) -> str | None:
        """Return text for the fault of a block; None if the block is as written.

        Args:
            index: index of the block in ``layout.blocks``.
            pieces: the content of the block in order. Each piece is used before the next is taken.
        """
        block, step = self.layout.blocks[index], self.entry.step
        found = block_hash(run_id=self.run_id, page=self.number, offset=block.offset, step=step)
        for piece in pieces:
            found.update(piece)
        if found.intdigest() == self.entry.checksums[index]:
            return None
        return (
            f"the {block.nbytes} bytes at offset {block.offset} are not those written in step "
            f"{step}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A manifest and the layout that it names.

    Raises:
        CorruptionError: the manifest does not fit the layout.
    """

    manifest: Manifest
    layout: RankLayout

    def __post_init__(self) -> None:
        manifest, layout = self.manifest, self.layout
        found = len(manifest.pages), len(manifest.hyperparameters)
        if found != (len(layout.subgroups), len(layout.groups)):
            raise CorruptionError(
                f"the commit of rank {manifest.rank} has other pages or groups than the layout "
                "that it names"
            )

    @property
    def groups(self) -> Sequence[Sequence[ParameterSpec]]:
        """Param groups in order."""
        return self.layout.groups

    @property
    def scalars(self) -> dict[str, dict[str, float]]:
        """Parameter name -> scalar name -> value."""
        names = [[spec.name for spec in group] for group in self.layout.groups]
        return unpack_scalars(self.manifest.scalars, names)

    def pages(self, layouts: Sequence[PageLayout] = ()) -> list[CommittedPage]:
        """Return the pages in order.

        Args:
            layouts: the layouts of all pages. If empty, they are computed here, which takes time.

        Raises:
            CorruptionError: the number of checksums of a page differs from its number of blocks, or
                its records are at other places than when the page was written.
        """
        layouts = layouts or self.layout.lay_out()
        pages = [
            CommittedPage(
                run_id=self.manifest.run_id, number=number, entry=entry, layout=layouts[number]
            )
            for number, entry in self.manifest.entries.items()
        ]
        for page in pages:
            if len(page.entry.checksums) != len(page.layout.blocks):
                raise CorruptionError(
                    f"page {page.number} has {len(page.entry.checksums)} checksums for "
                    f"{len(page.layout.blocks)} blocks"
                )
        return pages


def load_commit(storage: Storage, manifest: Manifest) -> Commit:
    """Return a commit, given its manifest and the storage of its rank.

    Raises:
        CorruptionError: the layout is missing or damaged.
        RunDirectoryError: another version wrote the layout.
    """
    return Commit(manifest=manifest, layout=load_layout(storage, manifest.layout))
