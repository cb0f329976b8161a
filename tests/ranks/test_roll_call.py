"""Roll calls: all ranks begin the same call, or no rank begins it and the next call works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.rank_programs import job as programs
from tests.rank_programs.job import running
from tierstore.errors import RollCallError
from tierstore.ranks.roll_call import RollCalls
from tierstore.threads import Latch

# Nobody waits for as long in a test that passes.
PATIENCE_S = 30.0


class Keys(HashStore):
    """A key-value store. Refusals wait until they may be written."""

    def __init__(self) -> None:
        super().__init__()
        self.refusing = threading.Event()
        self.may_refuse = threading.Event()
        self.may_refuse.set()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key.endswith("/outcome") and not desired.startswith("[null"):
            self.refusing.set()
            assert self.may_refuse.wait(PATIENCE_S)
        return super().compare_set(key, expected, desired)


class Call:
    """A rank that takes part in roll calls until one counts, in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, calls: RollCalls, keys: Keys) -> None:
        self._pool = pool
        self._calls = calls
        self.keys = keys
        self.interrupted = Latch()

    def __call__(self, call: str, timeout_s: float = PATIENCE_S) -> Future[str]:
        """Make a call; its result is "" if all ranks make it, else why no rank does."""
        self.interrupted = Latch()

        def take_part() -> str:
            options: Any = {"timeout_s": timeout_s, "interrupted": self.interrupted}
            try:
                while not self._calls.take_part(call, **options):
                    pass
            except RollCallError as error:
                return str(error)
            self._calls.remove_keys()
            return ""

        return self._pool.submit(take_part)


Ranks = Callable[[int], list[Call]]


@pytest.fixture
def ranks() -> Any:
    with ThreadPoolExecutor() as pool:
        calls = []

        def make(world_size: int) -> list[Call]:
            keys = Keys()
            calls[:] = [
                RollCalls(keys, rank=rank, world_size=world_size) for rank in range(world_size)
            ]
            return [Call(pool, each, keys) for each in calls]

        yield make
        for each in calls:
            each.closing = True


def test_all_ranks_begin_the_same_call(ranks: Ranks) -> None:
    everyone = ranks(3)
    for _ in range(20):
        assert [made.result() for made in [rank("step()") for rank in everyone]] == [""] * 3


def test_keys_do_not_accumulate() -> None:
    store = HashStore()
    calls = RollCalls(store, rank=0, world_size=1)
    counts = []
    for _ in range(10):
        assert calls.take_part("step()", timeout_s=1.0, interrupted=Latch())
        calls.remove_keys()
        counts.append(store.num_keys())
    assert counts[1:] == counts[1:2] * 9


def test_another_call_is_refused_at_once_on_all_ranks(ranks: Ranks) -> None:
    first, second, third = ranks(3)
    began = time.monotonic()
    made = [first("state_dict()"), second("step()")]
    messages = {each.result() for each in made}
    messages.add(third("step()").result())  # It comes later, and is not a call ahead of them.
    (message,) = messages
    assert "rank 0 calls state_dict()" in message or "rank 1 calls step()" in message
    assert "and rank " in message
    assert time.monotonic() - began < PATIENCE_S / 2
    made = [rank("step()") for rank in (first, second, third)]
    assert [each.result() for each in made] == [""] * 3


def test_a_call_that_a_rank_does_not_make_is_refused_and_the_rank_makes_the_next(
    ranks: Ranks,
) -> None:
    first, second, third = ranks(3)
    made = [first("state_dict()", 0.2), second("state_dict()", 0.2)]
    (message,) = {each.result() for each in made}
    assert message.startswith("rank 2 did not call state_dict() within 0.2 s")
    made = [rank("step()") for rank in (third, first, second)]
    assert [each.result() for each in made] == [""] * 3


@pytest.mark.long
def test_a_rank_that_waits_says_for_which(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = ranks(3)
    with caplog.at_level(logging.WARNING, "tierstore"):
        made = first("state_dict()", 6.0)
        first.keys.wait(["0/first"])
        also = second("state_dict()", 6.0)
        assert made.result() == also.result() != ""
    (record,) = caplog.records
    assert record.getMessage() == (
        "rank 0 has waited for 5 s in state_dict(), which rank 2 did not call yet"
    )


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_rank_makes_the_next_call_with_the_others(
    ranks: Ranks, interrupted: int
) -> None:
    everyone = ranks(3)
    made = [rank("step()") for rank in everyone[:2]]
    everyone[0].keys.wait(["at/0", "at/1"])
    everyone[interrupted].interrupted.set()
    (message,) = {each.result() for each in made}
    assert message.startswith(f"rank {interrupted} was interrupted in step()")
    made = [rank("step()") for rank in reversed(everyone)]
    assert [each.result() for each in made] == [""] * 3


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_rank_that_comes_at_the_last_moment_is_there_for_all_or_for_none(
    ranks: Ranks, comes_first: bool
) -> None:
    """The first rank found it absent: it comes just before that is written, or just after."""
    first, second = ranks(2)
    keys = first.keys
    keys.may_refuse.clear()
    made = first("state_dict()", 0.0)
    assert keys.refusing.wait(PATIENCE_S)
    if comes_first:
        assert second("state_dict()", 0.0).result() == ""
        keys.may_refuse.set()
        assert made.result() == ""
    else:
        keys.may_refuse.set()
        assert made.result().startswith("rank 1 did not call state_dict()")
        assert second("state_dict()", 0.0).result().startswith("rank 0 did not call state_dict()")
    assert [made.result() for made in [first("step()"), second("step()")]] == ["", ""]


# --------------------------------------------------------------------------- in processes


@pytest.mark.long
def test_a_rank_that_comes_late_is_refused_and_the_next_call_works() -> None:
    with running(programs.come_late_to_calls, 2) as job:
        refused, went = zip(*job.results(), strict=True)
    assert refused[0].startswith("rank 1 did not call state_dict() within")
    assert refused[1].startswith("rank 0 did not call state_dict() within")
    assert went == ("", "")


def test_an_interrupt_leaves_a_roll_call_and_the_next_call_works() -> None:
    with running(programs.interrupt_roll_call, 2) as job:
        job.meet()
        assert job.receive(1) == ["KeyboardInterrupt"]
        job.connections[0].send("go on")
        assert job.results() == [[""], ["KeyboardInterrupt", ""]]
