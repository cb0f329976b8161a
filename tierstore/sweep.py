"""One pass of an optimizer over the pages: in, stepped, out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence

from tierstore.residency import Pager
from tierstore.transit import Page
from tierstore.views import PageView


class Sweep:
    """A pass over pages, and how far it came.

    Args:
        pager: moves the pages.
        pages: all pages of the store, in order.
        swap_out: writes a held page to where it may be written.
        warn: whether to warn of a parameter that was changed outside of the optimizer.
    """

    def __init__(
        self,
        pager: Pager,
        pages: Sequence[Page],
        swap_out: Callable[[Page], None],
        *,
        warn: bool,
    ) -> None:
        self._pager = pager
        self._pages = pages
        self._swap_out = swap_out
        self.warns = warn
        """Whether no warning was given yet."""
        self.reading = False
        """Whether the pager may have been asked for pages."""
        self.begun = False
        """Whether a page may have been stepped or written."""
        self.finished = False

    def stepped_pages(self) -> Generator[PageView, None, None]:
        """Yield the pages to step, and write each one as soon as the next is asked for."""
        pages = [page for page in self._pages if page.is_fresh or page.has_gradient]
        self.reading = True
        with contextlib.closing(
            self._pager.stream(pages, lambda page: page.layout.readable)
        ) as stream:
            for page in stream:
                view = page.view()
                changed = view.adopt_parameters()
                if changed and self.warns:
                    self.warns = False
                    warnings.warn(
                        f"parameter {changed[0]!r} was changed outside of the optimizer; its "
                        "master follows it. Later changes are adopted without a warning",
                        stacklevel=2,
                    )
                self.begun = True
                if page.has_gradient:
                    yield view
                    view.write_parameters()
                view.read_parameters()
                self._swap_out(page)
        self.finished = True
