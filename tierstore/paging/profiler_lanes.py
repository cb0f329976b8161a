"""What goes on beside the training thread, in the timeline of ``torch.profiler``.

A profile of all threads (``_ExperimentalConfig(profile_all_threads=True)``) shows transfers
in lanes of their own, beside what is computed meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from torch.autograd import profiler

from tierstore.errors import TierstoreError
from tierstore.storage.base import Transfer


class Lane:
    """Transfers of one kind, which end in the order in which they begin.

    Costs nothing while no profiler runs: the thread begins with the first transfer that one
    is to see.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tierstore-{name}")

    def show(self, what: str, transfers: Sequence[Transfer]) -> None:
        """Show when these transfers were under way; together they are one range."""
        if profiler._is_profiler_enabled:
            self._thread.submit(self._follow, f"tierstore::{self._name} {what}", transfers)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _follow(self, name: str, transfers: Sequence[Transfer]) -> None:
        with profiler.record_function(name):
            for transfer in transfers:
                with contextlib.suppress(TierstoreError):  # Its own waiter is told.
                    transfer.wait()
