"""Resources that a store releases when it is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Releases:
    """Calls that release resources. close() makes them, and so does an error in a ``with`` block.

    Unlike ``contextlib.ExitStack``, the next close() repeats a call that was interrupted, and makes
    the calls after it. A call must therefore work twice.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Add a call. close() makes it before all calls that were added earlier."""
        self._calls.append(call)

    def close(self) -> None:
        """Make all calls, the last one first, even if some raise; then raise the error."""
        while self._calls:
            try:
                self._calls[-1]()
            except Exception:
                self._calls.pop()
                self.close()
                raise
            self._calls.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.close()
