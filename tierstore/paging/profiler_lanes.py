"""Ranges and lanes in the timeline of ``torch.profiler``.

A profile of all threads (``_ExperimentalConfig(profile_all_threads=True)``) shows them beside
the computation on the training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property

from torch.autograd import profiler

from tierstore.errors import TierstoreError
from tierstore.storage.base import Transfer
from tierstore.threads import Threads


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a context that a running profiler shows as a range. Else it does nothing."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(name)
    return contextlib.nullcontext()


class Lane:
    """A lane for transfers of one kind. The transfers end in the order in which they begin.

    Has no thread until a profiler runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def show(self, what: str, transfers: Sequence[Transfer]) -> None:
        """Show the duration of these transfers as one range, if a profiler runs."""
        if profiler._is_profiler_enabled:
            self._thread.submit(self._follow, f"tierstore::{self._name} {what}", transfers)

    def close(self) -> None:
        """End the thread."""
        if "_thread" in vars(self):
            self._thread.close()

    @cached_property
    def _thread(self) -> Threads:
        return Threads(1, f"tierstore-{self._name}")

    def _follow(self, name: str, transfers: Sequence[Transfer]) -> None:
        with profiler.record_function(name):
            for transfer in transfers:
                with contextlib.suppress(
                    TierstoreError
                ):  # The caller that waits for the page gets the error.
                    transfer.wait()
