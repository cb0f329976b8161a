"""A sweep: one step of an optimizer over all subgroups, and the rules for errors in it."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import torch

from tierstore.errors import SweepError, TierstoreError
from tierstore.layout.ownership import SharedSubgroup
from tierstore.paging.device import Copy, Device
from tierstore.paging.gradients import NonFinite
from tierstore.paging.page import Content, Needed, Page
from tierstore.paging.page_table import PageTable
from tierstore.paging.views import PageView, Source, without_collections
from tierstore.user_warnings import warn_user


class Phase(enum.Enum):
    """The progress of a sweep.

    The effect of an error by phase, in a store with a directory:

        phase       begins when                               an error
        CHECKED     the checks that can refuse a step passed  changes nothing; retry the step
        READING     the pager was asked for pages             the same, if may_retry();
                                                              else as in STEPPING
        STEPPING    a page was handed out or made             fails the store; restore()
        FINISHED    every page was given back                 the same, within the sweep
    """

    CHECKED = enum.auto()
    READING = enum.auto()
    STEPPING = enum.auto()
    FINISHED = enum.auto()


def may_retry(error: BaseException, table: PageTable) -> bool:
    """Return whether a call that only reads pages raised an error and changed nothing.

    False after an interrupt, which may come anywhere within the pager; after a failed write, whose
    page is lost; and with several ranks, because others may be in the middle of the step.
    """
    is_alone = table.ranks.world_size == 1
    return is_alone and isinstance(error, TierstoreError) and not table.pager.lost_write


class Sweep:
    """One step over all subgroups.

    Args:
        table: the pages. An error marks the store as failed by the rules of Phase.
        free_gradients: whether to set each gradient to None after its use.
        present: names of the parameters that have a gradient on any rank.
        window: number of pages that are stepped at once.
        unread: a check for gradients that are not finite; the sweep raises its error at the end.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        free_gradients: bool,
        present: frozenset[str],
        window: int,
        unread: NonFinite | None = None,
    ) -> None:
        self._table = table
        self._unread = unread
        self._free_gradients = free_gradients
        self._present = present
        self._window = window
        swept = table.swept
        self._stepped = [page for page in swept if self._has_gradient(page)]
        # Pages that are only written come last: a stepped page then stays valid while the caller
        # asks for the next pages of a window, and all ranks replicate subgroups at the same time.
        others = (page for page in swept if not self._has_gradient(page))
        changed = [page for page in others if page.content is Content.FRESH or page.was_edited]
        self._pages = [*self._stepped, *changed]
        self._last_uses = {name: page for page in self._pages for name in page.parameters}
        for page in self._pages:
            page.look_for_writes()
        self._phase = Phase.CHECKED
        self.changed: list[tuple[str, torch.Tensor]] = []
        """Pairs of parameter name and whether it was changed; see PageView.changed."""

    def run(self) -> Iterator[SteppedPages]:
        """Yield the pages to step, once; see Pages.sweep()."""
        committer, usability = self._table.committer, self._table.usability
        step = committer.step
        try:
            usability.sweeping = True
            committer.step = step + 1
            with contextlib.closing(self._views()) as views:
                partition = [page.shared for page in self._stepped]
                yield SteppedPages(views, self._present, partition)
            if self._phase is not Phase.FINISHED:
                raise SweepError("the sweep ended before its last page")
            if self._unread is not None:  # The result is ready by now, and no commit has begun.
                self._unread.require_none()
            committer.note_written(len(self._table.groups))
        except BaseException as error:
            is_reading = self._phase is Phase.READING and may_retry(error, self._table)
            if self._phase is Phase.CHECKED or is_reading:
                committer.step = step
            elif isinstance(error, GeneratorExit):
                usability.fail(SweepError("the step was interrupted"))
            else:
                usability.fail(error)
            raise
        finally:
            usability.sweeping = False

    def _views(self) -> Generator[PageView, None, None]:
        """Yield the pages to step. Give a page back when a window of pages has followed it."""
        self._phase = Phase.READING
        table = self._table
        with (
            contextlib.closing(table.pager.stream(self._pages, Needed.STEP)) as stream,
            contextlib.closing(table.sources.of(self._pages)) as sources,
        ):
            held: deque[tuple[Page, PageView, Source]] = deque()
            for page in self._pages:
                if len(held) == self._window:
                    self._finish(*held.popleft())
                next(stream)
                source = next(sources)
                with without_collections():
                    view = page.view(source, self._present)
                view.adopt_parameters(page.written)
                self._phase = Phase.STEPPING
                if self._has_gradient(page):
                    yield view
                held.append((page, view, source))
            while held:
                self._finish(*held.popleft())
            table.replication.finish()
            table.sources.finish()
        for page in self._pages:
            page.note_parameters()
        self._phase = Phase.FINISHED

    def _finish(self, page: Page, view: PageView, source: Source) -> None:
        """Write the parameters and the content of a page that was stepped."""
        has_gradient = self._has_gradient(page)
        view.write_read_masters()
        self.changed += view.changed.items()
        if not self._table.pager.leaves_out_parameters(page):
            view.read_parameters()
        if has_gradient:
            self._table.replication.begin(page, source, self._present)
        source.send_back()
        self._table.pager.swap_out(page)
        if self._free_gradients:
            for name, parameter in page.parameters.items():
                if self._last_uses[name] is page:
                    parameter.tensor.grad = None

    def _has_gradient(self, page: Page) -> bool:
        return not page.parameters.keys().isdisjoint(self._present)


class SteppedPages:
    """An iterator over the pages of one step.

    Args:
        pages: the pages.
        present: names of the parameters that have a gradient on any rank.
        shared: for each page, the part that each rank owns.
    """

    def __init__(
        self, pages: Iterator[PageView], present: frozenset[str], shared: Sequence[SharedSubgroup]
    ) -> None:
        self._pages = pages
        self.present = present
        """Names of the parameters that have a gradient on any rank."""
        self.count = len(shared)
        """Number of pages."""
        self.shared = shared
        """For each page, the part that each rank owns."""

    def __iter__(self) -> Iterator[PageView]:
        return self._pages

    def __next__(self) -> PageView:
        return next(self._pages)


class Changes:
    """Warns once if parameters were changed outside of the optimizer."""

    def __init__(self) -> None:
        # Names, a flag for each parameter that says if it was changed, and the copy of the flags.
        self._found: tuple[list[str], torch.Tensor, Copy] | None = None
        self._warned = False

    def note(self, found: Sequence[tuple[str, torch.Tensor]], device: Device) -> None:
        """Keep the changes that a sweep found.

        Args:
            found: pairs of parameter name and bool of shape () on ``device``.
            device: the device that pages are stepped on.
        """
        if found and not self._warned:
            flags = torch.stack([flag for _, flag in found])
            self._found = ([name for name, _ in found], *device.fetch(flags))

    def warn(self, *, wait: bool) -> None:
        """Warn if a parameter was changed; without ``wait``, only if the result is ready."""
        if self._found is None:
            return
        names, flags, copy = self._found
        if not (wait or copy.done()):
            return
        copy.wait()
        self._found = None
        name = next(itertools.compress(names, flags.tolist()), None)
        if name is not None:
            self._warned = True
            warn_user(
                f"parameter {name!r} was changed outside of the optimizer; its master follows it, "
                "and its other states stay: optimizer.reset_state([parameter]) resets them. Later "
                "changes are adopted without a warning"
            )
