"""The ranks of a simulated job: threads of one process that gather through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tests.simulation.log import Log
from tierstore.errors import PeerFailed

T = TypeVar("T")

# Ranks that disagree about what comes next wait for each other, as they would in a job.
DEADLINE_S = 10.0


class Ranks:
    """A job of simulated ranks, whose gathers are noted in a log.

    Args:
        log: where to; says how many ranks there are.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self._changed = threading.Condition()
        self._rounds: list[list[Any]] = []  # One list of told values for each gather.
        self._told: list[set[int]] = []
        self._failed: dict[int, str] = {}
        self._peers = [SimulatedPeers(self, rank) for rank in range(log.world_size)]

    def run(self, act: Callable[[SimulatedPeers], T]) -> list[T | BaseException]:
        """Do something on all ranks at once; return what each got or raised."""
        outcomes: list[Any] = [None] * self.log.world_size

        def run(rank: int) -> None:
            try:
                outcomes[rank] = act(self._peers[rank])
            except BaseException as error:
                outcomes[rank] = error
                self.fail(rank, str(error))

        threads = [
            threading.Thread(target=run, args=(rank,)) for rank in range(1, self.log.world_size)
        ]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        return outcomes

    def fail(self, rank: int, reason: str) -> None:
        """Say that a rank will not gather any more."""
        with self._changed:
            self._failed[rank] = reason
            self._changed.notify_all()

    def gather(self, rank: int, number: int, value: Any) -> list[Any]:
        """Take part in the gather of this number, counted from 0 on each rank."""
        everyone = range(self.log.world_size)
        with self._changed:
            while len(self._rounds) <= number:
                self._rounds.append([None] * len(everyone))
                self._told.append(set())
            self._rounds[number][rank] = value
            self._told[number].add(rank)
            self._changed.notify_all()
            while len(self._told[number]) < len(everyone):
                gone = sorted(self._failed.keys() - self._told[number])
                if gone:
                    raise PeerFailed(gone[0], self._failed[gone[0]])
                if not self._changed.wait(DEADLINE_S):
                    absent = min(set(everyone) - self._told[number])
                    self._failed[absent] = f"did not come to gather {number}"
                    self._changed.notify_all()
            return list(self._rounds[number])


class SimulatedPeers:
    """All ranks of a simulated job, seen from one; see Peers.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.world_size = ranks.log.world_size
        self._mutex = threading.Lock()
        self._count = 0

    def gather(self, value: Any) -> list[Any]:
        """See Peers.gather."""
        with self._mutex:
            number, self._count = self._count, self._count + 1
        values = self._ranks.gather(self.rank, number, value)
        self._ranks.log.gathered(self.rank, str(number))
        return values
