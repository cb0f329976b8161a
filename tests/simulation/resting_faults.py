"""Faults of a pager that keeps pages in memory; see tests/simulation/mutants.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from tierstore.paging.page import Content, Page
from tierstore.paging.pager import Pager
from tierstore.run.manifest import PageEntry
from tierstore.storage.base import Transfer


@contextlib.contextmanager
def left_out_of_commits() -> Iterator[None]:
    original = Pager.write_changed

    def write_changed(self: Pager, pages: Iterable[Page]) -> list[Transfer]:
        resting = [page for page in pages if page.content is Content.CHANGED and page.entry]
        for page in resting:
            page.content = Content.LOADED
        writes = original(self, pages)
        for page in resting:
            page.content = Content.CHANGED
        return writes

    with mock.patch.object(Pager, "write_changed", write_changed):
        yield


_keep, _make_way, _reset = Pager._keep, Pager.make_way, Pager.reset
_move_to_memory = Pager._move_to_memory


def kept_as_stored(self: Pager, page: Page) -> None:
    _keep(self, page)
    if page.entry is not None:
        page.content = Content.LOADED


def changes_dropped(self: Pager, *args: Any) -> None:
    def drop(page: Page) -> None:
        page.content = Content.LOADED

    with mock.patch.object(self, "_write", drop):
        _make_way(self, *args)


def written_over_itself(self: Pager, *args: Any) -> None:
    def claim_slot(index: int) -> str:
        entry = pages[index].entry
        return original(index) if entry is None else entry.slot

    pages, original = args[0], self._committer.claim_slot
    with mock.patch.object(self._committer, "claim_slot", claim_slot):
        _make_way(self, *args)


def read_again(self: Pager, page: Page, *args: Any) -> None:
    _move_to_memory(self, page, *args)
    if page.in_memory and page.entry is not None:
        page.content = Content.STORED


def memory_kept(self: Pager, pages: Sequence[Page], entries: Sequence[PageEntry]) -> None:
    resting = [page for page in pages if page.in_memory]
    _reset(self, pages, entries)
    for page in resting:
        page.content = Content.LOADED
