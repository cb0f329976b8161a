"""A job whose ranks are threads of this process and send through memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import override

from tierstore.errors import PeerFailed
from tierstore.ranks.peers import Alone, Peers, Ranks

T = TypeVar("T")

# Ranks that make different calls wait for each other, as they would in a job.
DEADLINE_S = 10.0

Meeting = tuple[Any, ...]
"""Names one collective."""


class ThreadJob:
    """A job whose ranks are threads; one rank is alone, as in a lone process.

    Args:
        world_size: number of ranks.
        on_gathered: called on a rank before a gather returns there, with rank and meeting.
    """

    def __init__(
        self, world_size: int, on_gathered: Callable[[int, str], None] = lambda rank, text: None
    ) -> None:
        self.world_size = world_size
        self._on_gathered = on_gathered
        self._changed = threading.Condition()
        self._sent: dict[Meeting, dict[int, Any]] = {}
        self._failed: dict[tuple[str, int], str] = {}  # (channel, rank) -> why.
        self.ranks: list[Ranks] = [ThreadRanks(self, rank) for rank in range(world_size)]
        if world_size == 1:
            self.ranks = [Alone()]

    def run(self, act: Callable[[Ranks], T]) -> list[Any]:
        """Call ``act`` on all ranks at once; return what it returned or raised on each rank."""
        outcomes: list[Any] = [None] * self.world_size

        def run(rank: int) -> None:
            try:
                outcomes[rank] = act(self.ranks[rank])
            except BaseException as error:
                outcomes[rank] = error
                self.ranks[rank].fail(error)
                self.end(rank, "commits", str(error))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, self.world_size)]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        return outcomes

    def end(self, rank: int, channel: str, reason: str) -> None:
        """Note that a rank sends nothing more on a channel, because it failed."""
        with self._changed:
            self._failed.setdefault((channel, rank), reason)
            self._changed.notify_all()

    def send(self, channel: str, meeting: Meeting, rank: int, value: Any) -> None:
        """Take part in a collective as a sender."""
        with self._changed:
            if (channel, rank) in self._failed:
                raise PeerFailed(rank, self._failed[channel, rank])
            self._sent.setdefault((channel, *meeting), {})[rank] = value
            self._changed.notify_all()

    def receive(self, channel: str, meeting: Meeting, sources: Sequence[int]) -> list[Any]:
        """Return what some ranks sent to a collective, when all of them have."""
        with self._changed:
            sent = self._sent.setdefault((channel, *meeting), {})
            while absent := [rank for rank in sources if rank not in sent]:
                for rank in absent:
                    if (channel, rank) in self._failed:
                        raise PeerFailed(rank, self._failed[channel, rank])
                if not self._changed.wait(DEADLINE_S):
                    self.end(absent[0], channel, f"did not come to {meeting}")
            return [sent[rank] for rank in sources]

    def gather(self, channel: str, rank: int, number: int, value: Any) -> list[Any]:
        """Take part in the gather of this number, counted from 0 on each rank and channel."""
        self.send(channel, ("gather", number), rank, value)
        values = self.receive(channel, ("gather", number), range(self.world_size))
        self._on_gathered(rank, f"{channel} {number}")
        return values


class ThreadRanks(Ranks):
    """The ranks of a ThreadJob, seen from one of them."""

    def __init__(self, job: ThreadJob, rank: int) -> None:
        self.rank = rank
        self.world_size = job.world_size
        self.global_ranks = range(job.world_size)
        self._job = job
        self._training = _Channel(job, rank, "training")
        self.commits: Peers = _Channel(job, rank, "commits")
        self._broadcasts: Counter[tuple[int, ...]] = Counter()  # Group -> number of broadcasts.

    @override
    def gather(self, value: Any) -> list[Any]:
        return self._training.gather(value)

    @override
    def roll_call(self, call: str) -> None:
        pass

    @override
    def new_group(self, ranks: Sequence[int], *, backend: str | None = None) -> Any:
        asked = self.gather(list(ranks))
        if any(other != asked[0] for other in asked):
            raise ValueError(f"all ranks must ask for the same group, but they ask for {asked}")
        return tuple(ranks) if self.rank in ranks else None

    @override
    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Any) -> Any:
        meeting = ("broadcast", group, self._broadcasts[group])
        self._broadcasts[group] += 1
        if source == self.rank:
            self._job.send("training", meeting, source, tensor.clone())
            return None
        return meeting, source, tensor

    @override
    def wait(self, work: Any) -> None:
        if work is not None:
            meeting, source, tensor = work
            tensor.copy_(self._job.receive("training", meeting, [source])[0])

    @override
    def fail(self, error: BaseException, *, other_group: bool = False) -> None:
        # What the thread of commits has begun it ends. So which gathers other ranks complete
        # depends on no race.
        self._job.end(self.rank, "training", str(error) or type(error).__name__)

    @override
    def close(self) -> None:
        pass


class _Channel(Peers):
    def __init__(self, job: ThreadJob, rank: int, name: str) -> None:
        self.rank = rank
        self.world_size = job.world_size
        self._job = job
        self._name = name
        self._gathers = 0

    @override
    def gather(self, value: Any) -> list[Any]:
        number, self._gathers = self._gathers, self._gathers + 1
        return self._job.gather(self._name, self.rank, number, value)
