"""Threads that make each call at once, in the thread that submits it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tierstore.paging.page import PageFiles
from tierstore.threads import Result


class InlinePool:
    """Takes the place of Threads where the order of operations must be one."""

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Result[Any]:
        result: Result[Any] = Result()
        result.settle(partial(act, *arguments))
        return result


class _InlineFiles(PageFiles):
    _in = _out = InlinePool()  # type: ignore[assignment]


def compute_inline(files: PageFiles) -> None:
    """Let page files check and compute checksums in the thread that calls them."""
    files._end_threads()
    files.__class__ = _InlineFiles
