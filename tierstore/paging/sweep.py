"""A sweep: one step of an optimizer over all subgroups, and the rules for errors in it."""

from __future__ import annotations

import contextlib
import enum
import itertools
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence

import torch

from tierstore.errors import SweepError, TierstoreError
from tierstore.layout.ownership import SharedSubgroup
from tierstore.paging.device import Copy, Device
from tierstore.paging.local_subgroups import LocalSubgroup, pages_of
from tierstore.paging.page import Needed
from tierstore.paging.page_table import PageTable
from tierstore.paging.pager import Pager
from tierstore.paging.views import PageView, Source
from tierstore.ranks.peers import Ranks
from tierstore.run.committer import Progress
from tierstore.run.usability import Usability


class Phase(enum.Enum):
    """How far a sweep came.

    What an error does in each phase, in a store with a directory:

        phase       from                                      an error
        CHECKED     the checks that can refuse a step passed  changes nothing; retry the step
        READING     the pager was asked for pages             the same, if may_retry() says so;
                                                              else as in STEPPING
        STEPPING    a page was handed out or made             fails the store; restore()
        FINISHED    every page was given back                 likewise, within the sweep
    """

    CHECKED = enum.auto()
    READING = enum.auto()
    STEPPING = enum.auto()
    FINISHED = enum.auto()


def may_retry(error: BaseException, pager: Pager, ranks: Ranks) -> bool:
    """Return whether a call that only read pages changed nothing, although it raised an error.

    Not after an interrupt, which may come anywhere within the pager; not after a failed write,
    whose page is lost; and not among several ranks, which may be in the middle of the step.
    """
    return ranks.world_size == 1 and isinstance(error, TierstoreError) and not pager.lost_write


class Sweep:
    """One step over all subgroups.

    Args:
        table: the subgroups and their pages.
        committer: counts the steps.
        usability: of the store; failed by errors as Phase says.
        ranks: all ranks of the job.
        free_gradients: whether to set each gradient to None after its use.
        present: names of the parameters of which any rank has a gradient.
        window: how many subgroups are stepped at once.
    """

    def __init__(
        self,
        table: PageTable,
        committer: Progress,
        usability: Usability,
        ranks: Ranks,
        *,
        free_gradients: bool,
        present: frozenset[str],
        window: int,
    ) -> None:
        self._table = table
        self._pager = table.pager
        self._committer = committer
        self._usability = usability
        self._ranks = ranks
        self._free_gradients = free_gradients
        self._present = present
        self._window = window
        self._stepped = [s for s in table.subgroups if self._has_gradient(s)]
        # Pages that are only to be written come last: a stepped page stays valid while the next
        # pages of a window are asked for, and all ranks replicate subgroups at the same time.
        unstepped = [s for s in table.subgroups if not self._has_gradient(s)]
        self._subgroups = [*self._stepped, *(s for s in unstepped if s.is_fresh)]
        self._last_uses = {name: s for s in self._subgroups for name in s.parameters}
        self._phase = Phase.CHECKED
        self.changed: list[tuple[str, torch.Tensor]] = []
        """Parameter names, and whether they were changed; see PageView.adopt_parameters()."""

    @contextlib.contextmanager
    def run(self) -> Iterator[SteppedPages]:
        """Yield the pages to step; see TierStore.sweep()."""
        step = self._committer.step
        try:
            self._usability.sweeping = True
            self._committer.step = step + 1
            with contextlib.closing(self._pages()) as pages:
                partition = [subgroup.shared for subgroup in self._stepped]
                yield SteppedPages(pages, self._present, partition)
            if self._phase is not Phase.FINISHED:
                raise SweepError("the sweep was left before its last page")
            self._committer.note_written(len(self._table.groups))
        except BaseException as error:
            if self._is_unchanged_by(error):
                self._committer.step = step
            else:
                self._usability.fail(error)
            raise
        finally:
            self._usability.sweeping = False

    def _is_unchanged_by(self, error: BaseException) -> bool:
        if self._phase is Phase.READING:
            return may_retry(error, self._pager, self._ranks)
        return self._phase is Phase.CHECKED

    def _pages(self) -> Generator[PageView, None, None]:
        """Yield what is to be stepped; give a page back when a window of pages follows it."""
        pages = pages_of(self._subgroups)
        self._phase = Phase.READING
        with contextlib.ExitStack() as stack:
            stream = self._pager.stream(pages, Needed.STEP)
            stack.enter_context(contextlib.closing(stream))
            sources = self._table.mirrors.of(pages)
            stack.enter_context(contextlib.closing(sources))
            stepped: deque[tuple[LocalSubgroup, PageView, Source]] = deque()
            for subgroup in self._subgroups:
                if len(stepped) == self._window:
                    self._finish(*stepped.popleft())
                source: Source = subgroup.direct
                if subgroup.page is not None:
                    next(stream)
                    source = next(sources)
                view = subgroup.view(source, self._present)
                self.changed += view.adopt_parameters().items()
                self._phase = Phase.STEPPING
                if self._has_gradient(subgroup):
                    yield view
                stepped.append((subgroup, view, source))
            while stepped:
                self._finish(*stepped.popleft())
            self._table.replication.finish()
        self._phase = Phase.FINISHED

    def _finish(self, subgroup: LocalSubgroup, view: PageView, source: Source) -> None:
        """Write the parameters and the page of a subgroup that was stepped."""
        has_gradient = self._has_gradient(subgroup)
        if has_gradient:
            view.write_parameters()
        view.read_parameters()
        if has_gradient:
            self._table.replication.begin(subgroup, source, self._present)
        source.send_back()
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
        shared: the part that each rank owns of each page.
    """

    def __init__(
        self,
        pages: Iterator[PageView],
        present: frozenset[str],
        shared: Sequence[SharedSubgroup],
    ) -> None:
        self._pages = pages
        self.present = present
        """Names of the parameters of which this rank or another has a gradient."""
        self.count = len(shared)
        """Number of pages."""
        self.shared = shared
        """The part that each rank owns of each page."""

    def __iter__(self) -> Iterator[PageView]:
        return self._pages

    def __next__(self) -> PageView:
        return next(self._pages)


class Changes:
    """Warns, once, of parameters that were changed outside of the optimizer."""

    def __init__(self) -> None:
        # Names, whether each parameter was changed, and the copy of that to the host.
        self._found: tuple[list[str], torch.Tensor, Copy] | None = None
        self._warned = False

    def note(self, found: Sequence[tuple[str, torch.Tensor]], device: Device) -> None:
        """Keep what a sweep found.

        Args:
            found: parameter names, and bools of no dimension on ``device``.
            device: the device that pages are stepped on.
        """
        if found and not self._warned:
            flags = torch.stack([flag for _, flag in found])
            self._found = ([name for name, _ in found], *device.fetch(flags))

    def warn(self, *, wait: bool) -> None:
        """Warn if a parameter was changed; without ``wait``, only if that is known by now."""
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
            warnings.warn(
                f"parameter {name!r} was changed outside of the optimizer; its "
                "master follows it. Later changes are adopted without a warning",
                stacklevel=4,
            )
