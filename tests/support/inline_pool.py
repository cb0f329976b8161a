"""A pool that makes each call at once, in the thread that submits it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tierstore.paging.page import PageFiles


class InlinePool:
    """Takes the place of a ThreadPoolExecutor where the order of operations must be one."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        pass


def compute_inline(files: PageFiles) -> None:
    """Let page files check and compute checksums in the thread that calls them."""
    for name in ("_in", "_out"):
        getattr(files, name).shutdown()
        setattr(files, name, InlinePool())
