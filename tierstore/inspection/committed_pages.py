"""Check of the pages that commits name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierstore.inspection.page_file import check_page
from tierstore.inspection.reader import Reader
from tierstore.run.commit import Commit, CommittedPage


def pages_to_check(
    reader: Reader,
    commits: Sequence[Commit],
    path_of: Callable[[int, CommittedPage], str | None],
) -> list[tuple[str, CommittedPage]]:
    """Return (path, page) of the pages that this reader checks; announce their bytes.

    Args:
        reader: of the run or checkpoint.
        commits: the same commit of some ranks.
        path_of: returns the path of a page of a rank; None if its directory cannot be read.
    """
    found = []
    for commit in commits:
        rank = commit.manifest.rank
        with reader.record_faults(f"the commit of rank {rank}"):
            for page in commit.pages():
                path = path_of(rank, page)
                if path is not None and reader.takes_next():
                    found.append((path, page))
                    reader.expect(page.layout.nbytes)
    return found


def check_pages(reader: Reader, pages: Sequence[tuple[str, CommittedPage]]) -> None:
    """Record the faults of pages, given as pages_to_check() returns them."""
    for path, page in pages:
        check_page(reader, path, page)
