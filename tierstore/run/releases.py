"""Resources that a store releases when it is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Releases:
    """Calls that release something, made by close(), or where an error leaves a ``with`` block.

    Beside ``contextlib.ExitStack``: a call that an interrupt has ended, and those after it, are
    made by the next close(). So a call must work twice.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Let close() make this call before all that were added earlier."""
        self._calls.append(call)

    def close(self) -> None:
        """Make all calls, the last one first, whatever they raise; then raise it."""
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
