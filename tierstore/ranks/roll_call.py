"""Roll calls: all ranks begin the same call of a store, or no rank begins it.

``Calls`` makes at most one roll call for each call of the program.

A rank cannot leave a collective that other ranks do not enter, but it can leave a roll call. All
ranks announce a call in the key-value store of the job before a rank enters a collective.

| key | content |
|---|---|
| at/<rank> | number of the last roll call that the rank came to |
| <n>/came/<call> | how many ranks came to roll call n with this call |
| <n>/first | the first rank that came to roll call n, and its call |
| <n>/outcome | [null, []]: all ranks begin the call; [reason, absent]: no rank does. Written once |

Example: ranks 0 and 1 of 3 call state_dict(), and rank 2 computes.

1. Rank 0 adds 1 to "7/came/state_dict()" and gets 1 back. It therefore writes "7/first" and
   periodically looks for absent ranks. Rank 1 gets 2 back. Both wait for "7/outcome".
2. After WARN_S rank 0 logs that rank 2 is absent: "at/2" is 6.
3. After the timeout rank 0 writes ["rank 2 did not call state_dict() ...", [2]] to "7/outcome".
   Ranks 0 and 1 raise RollCallError. If rank 2 had come just before, it would have got 3 back and
   written [null, []]. The value that is written first stays.
4. Rank 2 comes to roll call 7 later, finds that it was absent, and goes to roll call 8.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from torch._C._distributed_c10d import Store

from tierstore.errors import RollCallError
from tierstore.ranks.peers import Ranks
from tierstore.threads import Latch

logger = logging.getLogger("tierstore")

WARN_S = 5.0
# Time of the first look for absent ranks. The time to each further look doubles.
_LOOK_S = WARN_S / 4

# A rank asks for the outcome again after this fraction of the time that it has waited. All ranks
# together ask at most 100,000 times per second. One process can answer that many requests.
_PAUSE_PER_WAITED = 1 / 8
_PAUSE_S_PER_RANK = 10e-6
_PAUSE_S_MAX = 0.05

# The reason why no rank begins the call, or None if all ranks begin it; the absent ranks.
Outcome = tuple[str | None, list[int]]


class RollCalls:
    """The roll calls of one store, seen from one rank. One thread at a time uses them.

    Args:
        store: a key-value store for the roll calls of these ranks.
        rank: this rank.
        world_size: number of ranks.
        awaits_this_rank: returns True if a rank opens a store together with this rank. That rank
            cannot come before this rank opens the store.

    Attributes:
        closing: set when the store is closed. It ends a waiting roll call.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        awaits_this_rank: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.closing = False
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._awaits_this_rank = awaits_this_rank
        self._number = 0
        self._newest: list[str] = []  # The keys of the last roll call, if all ranks came.
        self._unused: list[str] = []

    def take_part(self, call: str, *, timeout_s: float, interrupted: Latch) -> bool:
        """Announce a call; return when all ranks have announced it.

        Args:
            call: names the call, such as "state_dict()".
            timeout_s: seconds to wait for all ranks. Then the call is refused.
            interrupted: set it to leave the roll call, unless all ranks came.

        Returns:
            False if the roll call ended before this rank came. Take part in the next one.

        Raises:
            RollCallError: no rank begins the call.
        """
        number, store = self._number, self._store
        keys = [f"{number}/{name}" for name in (f"came/{call}", "first", "outcome")]
        counter, first, _ = keys
        store.set(f"at/{self._rank}", str(number))
        came = store.add(counter, 1)
        outcome: Outcome | None = None
        if came == self._world_size:
            outcome = self._settle(None)
        elif came == 1:
            announced = store.compare_set(first, "", json.dumps([self._rank, call]))
            other, other_call = json.loads(announced)
            if other_call != call:
                outcome = self._settle(
                    f"rank {other} calls {other_call} and rank {self._rank} calls {call}: all "
                    "ranks make the same calls in the same order"
                )
        reason, absent = outcome or self._await_outcome(
            call, is_first=came == 1, timeout_s=timeout_s, interrupted=interrupted
        )
        self._number += 1
        # All ranks came to this roll call, so no rank still reads the keys of the previous one.
        self._unused = self._newest if reason is None and came == self._world_size else []
        self._newest = keys if reason is None else []
        if reason is not None and self._rank not in absent:
            raise RollCallError(f"{reason}. Nothing was done, and the next call works")
        return reason is None

    def remove_keys(self) -> None:
        """Remove the keys that no rank still reads."""
        for key in self._unused:
            self._store.delete_key(key)
        self._unused = []

    def _await_outcome(
        self, call: str, *, is_first: bool, timeout_s: float, interrupted: Latch
    ) -> Outcome:
        began, look_s = time.monotonic(), _LOOK_S
        key = f"{self._number}/outcome"
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if self.closing:
                raise RollCallError(f"the store was closed in {call}")
            if interrupted.is_set:
                self._settle(f"rank {self._rank} was interrupted in {call}", self._absent())
            elif is_first and waited > timeout_s and (absent := self._absent()):
                self._settle(
                    f"{_named(absent)} did not call {call} within {timeout_s:g} s: call it on all "
                    "ranks together, or pass a longer timeout to TierStore()",
                    absent,
                )
            elif is_first and waited > look_s:
                self._look(call, warns=look_s == WARN_S)
                look_s *= 2
            else:
                pause_s = max(waited * _PAUSE_PER_WAITED, _PAUSE_S_PER_RANK * self._world_size)
                interrupted.wait(min(pause_s, _PAUSE_S_MAX))
        outcome: Outcome = json.loads(self._store.get(key))
        return outcome

    def _look(self, call: str, *, warns: bool) -> None:
        """Look for absent ranks. Refuse a call to which they cannot come; else warn."""
        absent = self._absent()
        for rank in absent:
            if self._awaits_this_rank(rank):
                self._settle(f"rank {rank} calls TierStore() and this call is {call}", absent)
                return
        if warns and absent:
            logger.warning(
                "rank %d has waited for %g s in %s, which %s did not call yet",
                *(self._rank, WARN_S, call, _named(absent)),
            )

    def _absent(self) -> list[int]:
        """Return the ranks that have not come to this roll call."""
        keys = {rank: f"at/{rank}" for rank in range(self._world_size)}
        return [
            rank
            for rank, key in keys.items()
            if not self._store.check([key]) or int(self._store.get(key)) < self._number
        ]

    def _settle(self, reason: str | None, absent: Sequence[int] = ()) -> Outcome:
        """Write the outcome, unless another rank wrote it before; return the first one written."""
        text = json.dumps([reason, list(absent)])
        outcome: Outcome = json.loads(self._store.compare_set(f"{self._number}/outcome", "", text))
        return outcome


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class Calls:
    """Names the current call of the program, and makes a roll call before it needs other ranks.

    Args:
        ranks: all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._current: str | None = None  # The current call of the program.
        self._all_came = False

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Name the call of the block, unless the block is within the block of another call.

        Args:
            name: the name, as it appears in errors, such as "state_dict()".
        """
        if self._current is not None:
            yield
            return
        self._current, self._all_came = name, False
        try:
            yield
        finally:
            self._current = None

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Make a roll call of all ranks before the block, unless the current call has made one."""
        with self.named(name):
            assert self._current is not None
            if not self._all_came:
                self._ranks.roll_call(self._current)
                self._all_came = True
            yield
