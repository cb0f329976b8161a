"""What can be wrong with pages that rest in memory: see tests/simulation/mutants.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from tierstore.paged import PagedStates
from tierstore.paging.page import Content, Page
from tierstore.paging.pager import Pager


@contextlib.contextmanager
def left_out_of_commits() -> Iterator[None]:
    original = PagedStates._begin_commit

    def begin(self: PagedStates) -> None:
        resting = [
            page
            for page in self._pages
            if page.content is Content.CHANGED and page.entry is not None
        ]
        for page in resting:
            page.content = Content.LOADED
        original(self)
        for page in resting:
            page.content = Content.CHANGED

    with mock.patch.object(PagedStates, "_begin_commit", begin):
        yield


_keep, _make_way, _abandon = Pager.keep, Pager.make_way, Pager.abandon
_move_to_memory = Pager._move_to_memory


def kept_as_stored(self: Pager, page: Page) -> None:
    _keep(self, page)
    if page.entry is not None:
        page.content = Content.LOADED


def changes_dropped(self: Pager, *args: Any) -> None:
    def drop(page: Page) -> None:
        page.content = Content.LOADED

    _make_way(self, *args[:-1], drop)


def written_over_itself(self: Pager, *args: Any) -> None:
    def write(page: Page) -> None:
        if page.entry is None:
            args[-1](page)
        else:
            self.write(page, step=page.entry.step, slot=page.entry.copy)

    _make_way(self, *args[:-1], write)


def read_again(self: Pager, page: Page, *args: Any) -> None:
    _move_to_memory(self, page, *args)
    if page.in_memory and page.entry is not None:
        page.content = Content.STORED


def memory_kept(self: Pager, pages: Iterable[Page]) -> None:
    pages = list(pages)
    resting = [page for page in pages if page.in_memory]
    _abandon(self, pages)
    for page in resting:
        page.content = Content.LOADED
