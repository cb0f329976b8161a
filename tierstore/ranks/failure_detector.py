"""Failure detection: the first failure of any rank is published to all ranks.

Ranks communicate through the job's key-value store. Each rank has a listener thread that sleeps
in the store until it is called. Callers never block on a store that does not answer.

| key | content |
|---|---|
| call/<rank> | wakes the listener of that rank |
| here/<rank> | the answer of that rank: how long each of its threads has waited for other ranks |
| failure | the rank that failed and the reason; written once |
| heard/<rank> | that rank knows the failure |
| left/<rank> | that rank closed its store and knew of no failure |
| calls, accusers, answers | counters; the first call and the first accuser act for all ranks |

Example: rank 2 of 3 is killed while all ranks are in a collective.

1. gloo breaks the connections of ranks 0 and 1. Both call connection_lost() and add 1 to
   "accusers". Rank 0 gets 1 back, so it investigates; rank 1 waits for the key "failure".
2. Rank 0 sets "call/0" to "call/2". The listeners of ranks 0 and 1 answer under "here/0" and
   "here/1" with the waiting times of their threads.
3. ANSWER_S after the last answer, "here/2" is still absent: rank 0 writes [2, "its process ended
   or is stopped: ..."] to "failure".
4. Every listener sees "failure" and sets "heard/<rank>". Ranks 0 and 1 raise PeerFailed(2, ...).
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
from tierstore.threads import Latch, start_thread

THREAD_NAME = "tierstore-failures"

# A rank is absent if it has not answered ANSWER_S after the last answer of another rank, or
# ROLL_CALL_S after the call.
ANSWER_S = 1.0
ROLL_CALL_S = 3.0
# Callers wait at most this long for the key-value store.
TELL_S = 1.0
ACCUSE_S = ROLL_CALL_S + TELL_S
# If a thread returns from a call into torch while the interpreter exits, the process aborts.
# close() therefore waits for the threads.
CLOSE_S = 10.0
POLL_S = 0.02
# Close to the longest timeout of poll(): it counts milliseconds in an int.
FOREVER = timedelta(days=20)

KEY_VALUE_STORE = "the job's key-value store, which global rank 0 serves unless a launcher does,"

ENDED = "its process ended or is stopped"

# Rank that answered -> name of a waiting thread -> seconds that it has waited.
Answers = dict[int, dict[str, float]]


class FailureDetector:
    """The failure detector of one rank. Any thread may use it.

    Args:
        store: a key-value store that only the detectors of this job use.
        rank: this rank.
        world_size: number of ranks.
        host: the rank whose process serves the store. It is blamed if the store is gone.
        waits: returns thread name -> seconds that the thread has waited for other ranks.
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
        # Two connections: the listener sleeps in a call while another thread publishes.
        self._publishing, self._listening = clone(store), clone(store)
        self._failure: tuple[int, str] | None = None
        self._known = Latch()
        self._store_answers = True
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._start(self._listen)

    @property
    def failure(self) -> PeerFailed | None:
        """The error that every rank raises from now on, or None."""
        return None if self._failure is None else PeerFailed(*self._failure)

    def report(self, culprit: int, reason: str) -> None:
        """Publish the failure of a rank and its reason, unless a failure was published before.

        Never raises. Returns within 2 * TELL_S.
        """

        def publish() -> None:
            self._publish(culprit, reason)
            self._call_all()

        if self._store_answers:
            with contextlib.suppress(RuntimeError):  # There may be no memory for a thread.
                self._start(publish).join(TELL_S)
                self._known.wait(TELL_S)  # This rank must not start another collective.

    def connection_lost(self, error: Exception) -> PeerFailed:
        """Return the error to raise after a connection broke. It blames a rank without answer."""
        what = f"rank {self._rank} lost a connection"

        def blame(answers: Answers) -> tuple[int, str]:
            absent = [rank for rank in range(self._world_size) if rank not in answers]
            if not absent:
                return self._rank, f"lost a connection, although all ranks answer: {error}"
            left = [rank for rank in absent if self._publishing.check([f"left/{rank}"])]
            gone = [rank for rank in absent if rank not in left]
            if not gone:
                return left[0], f"closed its store or exited, and rank {self._rank} still needs it"
            names = ", ".join(map(str, gone))
            return gone[0], f"{ENDED}: {what}, and no answer came from rank {names}"

        return self._accuse(what, blame)

    def timed_out(self, thread: str, timeout_s: float) -> PeerFailed:
        """Return the error to raise after a thread waited too long in a collective.

        It blames a rank that does not answer; else a rank whose thread of that name is not waiting;
        else the rank whose thread has waited for the shortest time.
        """
        what = f"did not come to a collective of the {thread} thread within {timeout_s:g} s"

        def blame(answers: Answers) -> tuple[int, str]:
            waits = {rank: answer.get(thread, 0.0) for rank, answer in answers.items()}
            rank = min(range(self._world_size), key=lambda rank: waits.get(rank, -1.0))
            return rank, what if rank in answers else f"{what}, and does not answer: {ENDED}"

        return self._accuse(what, blame)

    def close(self) -> None:
        """End all threads. Before, wait a moment for a failure to reach the other ranks."""
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
            self._set_failure(rank, reason)
            self._listening.set(f"heard/{self._rank}", "")
        except RuntimeError as error:
            self._lose_store(f"{KEY_VALUE_STORE} is gone: {error}")

    def _set_failure(self, rank: int, reason: str) -> None:
        if self._failure is None:
            self._failure = rank, reason
            self._known.set()

    def _lose_store(self, reason: str) -> None:
        self._store_answers = False
        self._set_failure(self._host, reason)

    def _sleep_until(self, key: str) -> None:
        while not self._listening.check([key]):
            # Timed out or disconnected; check() distinguishes the two.
            with contextlib.suppress(RuntimeError):
                self._listening.wait([key], FOREVER)

    def _accuse(self, what: str, blame: Callable[[Answers], tuple[int, str]]) -> PeerFailed:
        """Publish the rank that ``blame`` finds; return the failure that was published first."""

        def accuse() -> None:
            if self._publishing.add("accusers", 1) == 1:  # Other accusers wait for its result.
                self._call_all()
                self._publish(*blame(self._roll_call()))

        if self._failure is None:
            self._start(accuse)
            if not self._known.wait(ACCUSE_S):
                reason = f"{what}, and {KEY_VALUE_STORE} does not answer within {ACCUSE_S:g} s"
                self._lose_store(reason)
        assert self._failure is not None
        return PeerFailed(*self._failure)

    def _roll_call(self) -> Answers:
        """Return the answers of all ranks that answer in time, and of this rank."""
        began = answered = time.monotonic()
        count = 0
        while count < self._world_size and not self._publishing.check(["failure"]):
            now = time.monotonic()
            if now - answered > ANSWER_S or now - began > ROLL_CALL_S:
                break
            time.sleep(POLL_S)
            count_before, count = count, self._publishing.add("answers", 0)
            answered = now if count > count_before else answered
        answers = {self._rank: dict(self._waits())}
        for rank in range(self._world_size):
            if self._publishing.check([f"here/{rank}"]):
                answers[rank] = json.loads(self._publishing.get(f"here/{rank}"))
        return answers

    def _publish(self, rank: int, reason: str) -> None:
        self._publishing.compare_set("failure", "", json.dumps([rank, reason]))

    def _call_all(self) -> None:
        if self._publishing.add("calls", 1) == 1:
            for rank in range(self._world_size):
                self._publishing.set(f"call/{rank}", "")

    def _leave(self) -> None:
        if self._failure is not None:
            # This process may serve the store. The blamed rank may be gone.
            blamed, _ = self._failure
            heard = [f"heard/{rank}" for rank in range(self._world_size) if rank != blamed]
            end = time.monotonic() + TELL_S
            while time.monotonic() < end and not self._publishing.check(heard):
                time.sleep(POLL_S)
        else:
            self._publishing.set(f"left/{self._rank}", "")
        self._closing = True
        self._publishing.set(f"call/{self._rank}", "")

    def _start(self, act: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            with contextlib.suppress(RuntimeError):  # The listener reports a broken store.
                act()

        thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        start_thread(thread)
        self._threads.append(thread)
        return thread


def clone(store: Store) -> Store:
    """Return the store with a separate connection, if it has connections."""
    # Stores written in Python, and torch's type hints, may lack clone().
    clone: Callable[[], Any] | None = getattr(store, "clone", None)
    return store if clone is None else clone()
