"""The calls of a program that all ranks make together: each calls the roll at most once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.ranks.peers import Ranks


class Calls:
    """Names the call that the program makes now, and calls the roll before it needs other ranks.

    Args:
        ranks: all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._current: _Call | None = None

    @property
    def is_named(self) -> bool:
        """True within a block of named()."""
        return self._current is not None

    @contextlib.contextmanager
    def named(self, name: str, *, patient: bool = False) -> Iterator[None]:
        """Name the call that is made in the block, unless the block is within another one.

        Args:
            name: the name, as it appears in errors, such as "state_dict()".
            patient: wait for a rank for ``peer_timeout`` instead of ``roll_call_timeout``.
        """
        if self._current is not None:
            yield
            return
        self._current = _Call(name=name, patient=patient)
        try:
            yield
        finally:
            self._current = None

    @contextlib.contextmanager
    def together(self, name: str, *, patient: bool = False) -> Iterator[None]:
        """Call the roll of all ranks before the block, unless the current call did."""
        with self.named(name, patient=patient):
            assert self._current is not None
            if not self._current.all_came:
                self._ranks.roll_call(self._current.name, patient=self._current.patient)
                self._current.all_came = True
            yield


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call of the program that may need other ranks."""

    name: str
    patient: bool
    all_came: bool = False
    """True if all ranks make the call: the roll was called."""
