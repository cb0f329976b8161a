"""One pass of an optimizer over the pages: in, stepped, out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from tierstore.device import Device
from tierstore.mirrors import Mirror, Mirrors
from tierstore.residency import Pager
from tierstore.transit import Page
from tierstore.views import DIRECT, PageView


class Sweep:
    """A pass over pages, and how far it came.

    Args:
        pager: moves the pages.
        pages: all pages of the store, in order.
        swap_out: writes a held page to where it may be written.
        mirrors: bring gradients and parameters to the host; None: they are used where they are.
        free_gradients: whether to let go of each gradient after its use.
    """

    def __init__(
        self,
        pager: Pager,
        pages: Sequence[Page],
        swap_out: Callable[[Page], None],
        *,
        mirrors: Mirrors | None,
        free_gradients: bool,
    ) -> None:
        self._pager = pager
        self._pages = pages
        self._swap_out = swap_out
        self._mirrors = mirrors
        self._free_gradients = free_gradients
        self.reading = False
        """Whether the pager may have been asked for pages."""
        self.begun = False
        """Whether a page may have been stepped or written."""
        self.finished = False
        self.changed: list[tuple[str, torch.Tensor]] = []
        """Names of parameters, and whether they were changed; see adopt_parameters()."""

    def stepped_pages(self) -> Generator[PageView, None, None]:
        """Yield the pages to step, and write each one as soon as the next is asked for."""
        pages = [page for page in self._pages if page.is_fresh or page.has_gradient]
        last_uses = {name: page for page in pages for name in page.parameters}
        self.reading = True
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(
                contextlib.closing(self._pager.stream(pages, lambda page: page.layout.readable))
            )
            mirrors: Iterator[Mirror | None] = itertools.repeat(None)
            if self._mirrors is not None:
                mirrors = stack.enter_context(contextlib.closing(self._mirrors.of(pages)))
            for page, mirror in zip(stream, mirrors, strict=False):
                view = page.view(mirror or DIRECT)
                self.changed += view.adopt_parameters().items()
                self.begun = True
                if page.has_gradient:
                    yield view
                    view.write_parameters()
                view.read_parameters()
                if mirror is not None:
                    mirror.send_back()
                self._swap_out(page)
                if self._free_gradients:
                    for name, parameter in page.parameters.items():
                        if last_uses[name] is page:
                            parameter.tensor.grad = None
        self.finished = True


class Changed:
    """Parameters that a sweep found changed, as soon as the device has told.

    Args:
        found: names, and bools of no dimension on the device.
        device: where that is.
    """

    def __init__(self, found: Sequence[tuple[str, torch.Tensor]], device: Device) -> None:
        self._names = [name for name, _ in found]
        self._flags, self._copy = device.fetch(torch.stack([flag for _, flag in found]))

    def is_known(self) -> bool:
        """Return whether first() would return at once."""
        return self._copy.done()

    def first(self) -> str | None:
        """Return the name of the first one, if there is one."""
        self._copy.wait()
        return next(itertools.compress(self._names, self._flags.tolist()), None)
