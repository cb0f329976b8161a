"""A pool that makes each call at once, in the thread that submits it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tierstore.paging.page import PageFiles


class InlinePool(Executor):
    """Takes the place of a ThreadPoolExecutor where the order of operations must be one."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)
        return future


class _InlineFiles(PageFiles):
    _in = _out = InlinePool()  # type: ignore[assignment]


def compute_inline(files: PageFiles) -> None:
    """Let page files check and compute checksums in the thread that calls them."""
    files._end_threads()
    files.__class__ = _InlineFiles
