"""One pass of an optimizer over the subgroups: pages in, stepped, out."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence

import torch

from tierstore.paging.device import Copy, Device
from tierstore.paging.host_mirrors import Mirror, Mirrors
from tierstore.paging.page import Needed
from tierstore.paging.page_table import LocalSubgroup, pages_of
from tierstore.paging.pager import Pager
from tierstore.paging.replication import Spread
from tierstore.paging.views import PageView


class Sweep:
    """A pass over subgroups, and how far it came.

    Args:
        pager: moves the pages.
        subgroups: all of the store, in order.
        mirrors: bring gradients and parameters to the host; None: they are used where they are.
        spread: sends what was stepped to the replicas.
        free_gradients: whether to let go of each gradient after its use.
        present: names of the parameters of which any rank has a gradient.
        window: how many subgroups are stepped at once.
    """

    def __init__(
        self,
        pager: Pager,
        subgroups: Sequence[LocalSubgroup],
        *,
        mirrors: Mirrors | None,
        spread: Spread,
        free_gradients: bool,
        present: Collection[str],
        window: int,
    ) -> None:
        self._pager = pager
        self._subgroups = subgroups
        self._mirrors = mirrors
        self._spread = spread
        self._free_gradients = free_gradients
        self._present = present
        self._window = window
        self.stepped = [each for each in subgroups if self._has_gradient(each)]
        """The subgroups of which some parameter has a gradient."""
        self._last_uses: dict[str, LocalSubgroup] = {}
        self.reading = False
        """Whether the pager may have been asked for pages."""
        self.begun = False
        """Whether a page may have been stepped or written, or another rank told of one."""
        self.finished = False
        self.changed: list[tuple[str, torch.Tensor]] = []
        """Names of parameters, and whether they were changed; see adopt_parameters()."""

    def stepped_pages(self) -> Generator[PageView, None, None]:
        """Yield what is to be stepped, and write it when as many as the window were asked for."""
        # Those that are only to be written come last, so that each of the others stays valid
        # while a window of them is asked for, and all ranks spread them at the same time.
        unstepped = (each for each in self._subgroups if not self._has_gradient(each))
        subgroups = [*self.stepped, *(each for each in unstepped if each.is_fresh)]
        self._last_uses = {name: each for each in subgroups for name in each.parameters}
        pages = pages_of(subgroups)
        self.reading = True
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(contextlib.closing(self._pager.stream(pages, Needed.STEP)))
            mirrors: Iterator[Mirror | None] = itertools.repeat(None)
            if self._mirrors is not None:
                mirrors = stack.enter_context(contextlib.closing(self._mirrors.of(pages)))
            stepped: deque[tuple[LocalSubgroup, PageView, Mirror | None]] = deque()
            for subgroup in subgroups:
                if len(stepped) == self._window:
                    self._finish(*stepped.popleft())
                mirror = None
                if subgroup.page is not None:
                    next(stream)
                    mirror = next(mirrors)
                view = subgroup.view(mirror or subgroup.direct, self._present)
                self.changed += view.adopt_parameters().items()
                self.begun = True
                if self._has_gradient(subgroup):
                    yield view
                stepped.append((subgroup, view, mirror))
            while stepped:
                self._finish(*stepped.popleft())
            self._spread.finish()
        self.finished = True

    def _finish(self, subgroup: LocalSubgroup, view: PageView, mirror: Mirror | None) -> None:
        """Bring what was stepped to where it belongs."""
        has_gradient = self._has_gradient(subgroup)
        if has_gradient:
            view.write_parameters()
        view.read_parameters()
        if has_gradient:
            self._spread.begin(subgroup, mirror or subgroup.direct, self._present)
        if mirror is not None:
            mirror.send_back()
        if subgroup.page is not None:
            self._pager.swap_out(subgroup.page)
        if self._free_gradients:
            for name, parameter in subgroup.parameters.items():
                if self._last_uses[name] is subgroup:
                    parameter.tensor.grad = None

    def _has_gradient(self, subgroup: LocalSubgroup) -> bool:
        return not subgroup.parameters.keys().isdisjoint(self._present)


class SteppedPages:
    """An iterator over the pages of one step.

    Args:
        pages: the pages.
        present: names of the parameters of which this rank or another has a gradient.
        subgroups: one for each page.
    """

    def __init__(
        self,
        pages: Iterator[PageView],
        present: frozenset[str],
        subgroups: Sequence[LocalSubgroup],
    ) -> None:
        self._pages = pages
        self.present = present
        """Names of the parameters of which this rank or another has a gradient."""
        self.count = len(subgroups)
        """How many pages there are."""
        self.shared = [each.shared for each in subgroups]
        """What the ranks own of each page."""

    def __iter__(self) -> Iterator[PageView]:
        return self._pages

    def __next__(self) -> PageView:
        return next(self._pages)


class Changes:
    """Warns, once, of parameters that were changed outside of the optimizer."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._flags = torch.empty(0)
        self._copy: Copy | None = None  # Of the flags, to the host.
        self._warned = False

    def note(self, found: Sequence[tuple[str, torch.Tensor]], device: Device) -> None:
        """Keep what a sweep found.

        Args:
            found: names of parameters, and bools of no dimension on the device.
            device: where that is.
        """
        if found and not self._warned:
            self._names = [name for name, _ in found]
            self._flags, self._copy = device.fetch(torch.stack([flag for _, flag in found]))

    def warn(self, *, wait: bool) -> None:
        """Warn if a parameter was changed; unless told to wait, only if that is known by now."""
        if self._copy is None or not (wait or self._copy.done()):
            return
        self._copy.wait()
        self._copy = None
        name = next(itertools.compress(self._names, self._flags.tolist()), None)
        if name is not None:
            self._warned = True
            warnings.warn(
                f"parameter {name!r} was changed outside of the optimizer; its "
                "master follows it. Later changes are adopted without a warning",
                stacklevel=4,
            )
