"""Why the ranks of a job cannot go on: the first reason of any of them, heard by all.

Ranks tell each other through the job's key-value store, where each has a thread asleep until
it is called. A store that does not answer, because the process that serves it is stopped,
holds up such threads and never a caller.

| key | says |
|---|---|
| call/<rank> | wakes the thread of that rank |
| here/<rank> | its answer: how long each of its threads has been waiting for other ranks |
| failure | which rank failed and why; written once |
| heard/<rank> | that rank knows the failure |
| left/<rank> | that rank was closed, and no failure was known to it |
| calls, accusers, answers | how many there were; the first call or accuser is for all ranks |
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from tierstore.errors import PeerFailed

THREAD_NAME = "tierstore-alarm"

# A rank is absent if it does not answer so long after the last one that did.
ANSWER_S = 1.0
ROLL_CALL_S = 3.0
# Callers wait no longer than that for the key-value store.
TELL_S = 1.0
ACCUSE_S = ROLL_CALL_S + TELL_S
# A thread in a call of torch's must not return from it as the interpreter exits, which kills
# the process: all that can be are waited for.
CLOSE_S = 10.0
POLL_S = 0.02
# Near to the longest that a poll() can be told, in milliseconds.
FOREVER = timedelta(days=20)

KEY_VALUE_STORE = "the job's key-value store, which global rank 0 serves unless a launcher does,"

ENDED = "its process ended or is stopped"

# Of each rank that answered: name of each thread that waits -> seconds it has waited.
Answers = dict[int, dict[str, float]]


class Alarm:
    """The alarm of one rank. Any thread may use it.

    Args:
        store: a key-value store that these ranks alone use, for one alarm only.
        rank: this rank.
        world_size: number of ranks.
        host: the rank to name where the store is gone, because its process serves it.
        waits: tells how many seconds each thread has been waiting for other ranks, by name.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        host: int,
        waits: Callable[[], Mapping[str, float]],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._waits = waits
        # A connection each: one may be asleep in a call while another is needed.
        self._telling, self._listening = _clone(store), _clone(store)
        self._failure: tuple[int, str] | None = None
        self._known = threading.Event()
        self._store_answers = True
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._start(self._listen)

    @property
    def failure(self) -> PeerFailed | None:
        """What every rank raises from now on, or None."""
        return None if self._failure is None else PeerFailed(*self._failure)

    def tell(self, culprit: int, reason: str) -> None:
        """Say which rank cannot go on and why, unless another did so first. Never raises."""

        def tell() -> None:
            self._publish(culprit, reason)
            self._call_all()

        if self._store_answers:
            with contextlib.suppress(RuntimeError):  # There may be no memory for a thread.
                self._start(tell).join(TELL_S)
                self._known.wait(TELL_S)  # So that this rank starts nothing more either.

    def lost(self, error: Exception) -> PeerFailed:
        """Return what to raise where a connection broke: the rank that does not answer."""
        what = f"rank {self._rank} lost a connection"

        def blame(answers: Answers) -> tuple[int, str]:
            absent = [rank for rank in range(self._world_size) if rank not in answers]
            if not absent:
                return self._rank, f"lost a connection, though all ranks answer: {error}"
            left = [rank for rank in absent if self._telling.check([f"left/{rank}"])]
            gone = [rank for rank in absent if rank not in left]
            if not gone:
                return left[0], f"closed its store or exited, and rank {self._rank} still needs it"
            names = ", ".join(map(str, gone))
            return gone[0], f"{ENDED}: {what}, and no answer came from rank {names}"

        return self._accuse(what, blame)

    def late(self, thread: str, timeout_s: float) -> PeerFailed:
        """Return what to raise where a thread waited too long: the rank that others wait for.

        That is one that does not answer, else one whose thread of that name does not wait,
        else the one that came last.
        """
        what = f"did not come to a collective of the {thread} thread within {timeout_s:g} s"

        def order(answers: Answers, rank: int) -> tuple[bool, float]:
            return rank in answers, answers.get(rank, {}).get(thread, 0.0)

        def blame(answers: Answers) -> tuple[int, str]:
            rank = min(range(self._world_size), key=lambda rank: order(answers, rank))
            return rank, what if rank in answers else f"{what}, and does not answer: {ENDED}"

        return self._accuse(what, blame)

    def close(self) -> None:
        """End all threads; a failure is first given a moment to reach the other ranks."""
        end = time.monotonic() + (CLOSE_S if self._store_answers else TELL_S)
        if self._store_answers:
            self._start(self._leave)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _listen(self) -> None:
        try:
            self._sleep_until(f"call/{self._rank}")
            if self._closing:
                return
            self._listening.set(f"here/{self._rank}", json.dumps(dict(self._waits())))
            self._listening.add("answers", 1)
            self._sleep_until("failure")
            rank, reason = json.loads(self._listening.get("failure"))
            self._learn(rank, reason)
            self._listening.set(f"heard/{self._rank}", "")
        except RuntimeError as error:
            self._learn_no_more(f"{KEY_VALUE_STORE} is gone: {error}")

    def _learn(self, rank: int, reason: str) -> None:
        if self._failure is None:
            self._failure = rank, reason
            self._known.set()

    def _learn_no_more(self, reason: str) -> None:
        self._store_answers = False
        self._learn(self._host, reason)

    def _sleep_until(self, key: str) -> None:
        while not self._listening.check([key]):
            # Time is over, or the store is gone: check() tells.
            with contextlib.suppress(RuntimeError):
                self._listening.wait([key], FOREVER)

    def _accuse(self, what: str, blame: Callable[[Answers], tuple[int, str]]) -> PeerFailed:
        def accuse() -> None:
            if self._telling.add("accusers", 1) == 1:  # The others wait for what it says.
                self._call_all()
                self._publish(*blame(self._roll_call()))

        if self._failure is None:
            self._start(accuse)
            if not self._known.wait(ACCUSE_S):
                reason = f"{what}, and {KEY_VALUE_STORE} does not answer within {ACCUSE_S:g} s"
                self._learn_no_more(reason)
        assert self._failure is not None
        return PeerFailed(*self._failure)

    def _roll_call(self) -> Answers:
        began = answered = time.monotonic()
        count = 0
        while count < self._world_size and not self._telling.check(["failure"]):
            now = time.monotonic()
            if now - answered > ANSWER_S or now - began > ROLL_CALL_S:
                break
            time.sleep(POLL_S)
            count_before, count = count, self._telling.add("answers", 0)
            if count > count_before:
                answered = now
        keys = {rank: f"here/{rank}" for rank in range(self._world_size)}
        answers = {
            rank: json.loads(self._telling.get(key))
            for rank, key in keys.items()
            if self._telling.check([key])
        }
        return {self._rank: dict(self._waits()), **answers}

    def _publish(self, rank: int, reason: str) -> None:
        self._telling.compare_set("failure", "", json.dumps([rank, reason]))

    def _call_all(self) -> None:
        if self._telling.add("calls", 1) == 1:
            for rank in range(self._world_size):
                self._telling.set(f"call/{rank}", "")

    def _leave(self) -> None:
        if self._failure is not None:
            # This process may serve the store. Who is blamed may be gone, and need not hear.
            others = [rank for rank in range(self._world_size) if rank != self._failure[0]]
            end = time.monotonic() + TELL_S
            while time.monotonic() < end:
                if self._telling.check([f"heard/{rank}" for rank in others]):
                    break
                time.sleep(POLL_S)
        else:
            self._telling.set(f"left/{self._rank}", "")
        self._closing = True
        self._telling.set(f"call/{self._rank}", "")

    def _start(self, act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            with contextlib.suppress(RuntimeError):  # The listener tells what is wrong with it.
                act()

        thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread


def _clone(store: Store) -> Store:
    # Stores written in Python may have no clone(), and torch's type marks have none.
    clone: Callable[[], Any] | None = getattr(store, "clone", None)
    return store if clone is None else clone()
