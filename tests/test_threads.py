"""Threads that the system refuses, and calls on threads."""

from __future__ import annotations

import contextlib
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

import tierstore
from tierstore.threads import Latch, Threads, at_once, start_thread


def those_named(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_calls_are_made_by_all_threads() -> None:
    with Threads(3, "test") as threads:
        running = those_named("test_")
        assert len(running) == 3
        met = threading.Barrier(3)  # No thread makes two of these calls.
        for call in [threads.submit(met.wait, 60) for _ in range(3)]:
            call.result()
        calls = [threads.submit(int, text) for text in ("1", "one", "3")]
    assert [call.result() for call in calls[::2]] == [1, 3]
    with pytest.raises(ValueError, match="'one'"):
        calls[1].result()
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(int)
    for thread in running:
        thread.join()


def test_an_error_keeps_nothing_alive() -> None:
    class Kept:
        def fail(self) -> None:
            raise ValueError("failed")

    kept = Kept()
    dropped = weakref.ref(kept)
    gc.disable()
    try:
        with Threads(1, "test") as threads:
            call = threads.submit(kept.fail)
            with pytest.raises(ValueError, match="failed"):
                call.result()
        del call, kept
        assert dropped() is None
    finally:
        gc.enable()


def test_threads_that_are_dropped_end_after_their_calls() -> None:
    may_end = Latch()
    call = Threads(2, "test").submit(may_end.wait)
    gc.collect()
    running = those_named("test_")
    may_end.set()
    assert call.result()
    for thread in running:
        thread.join()


def test_calls_that_have_not_begun_are_dropped() -> None:
    begun, may_end, made = Latch(), Latch(), list[int]()

    def block() -> None:
        begun.set()
        may_end.wait()

    threads = Threads(1, "test")
    threads.submit(block)
    threads.submit(made.append, 1)
    begun.wait()
    closing = threading.Thread(target=partial(threads.close, cancel=True))
    closing.start()
    with contextlib.suppress(RuntimeError):  # Raised once the calls were dropped.
        while True:
            threads.submit(made.append, 2)
    may_end.set()
    closing.join()
    assert not made


def test_a_latch() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    waiting = [threading.Thread(target=latch.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    latch.set()
    latch.set()
    for thread in waiting:
        thread.join()
    assert latch.is_set
    assert latch.wait(0.01)


def test_calls_at_once_end_before_the_first_error_is_raised() -> None:
    ended = []

    def fail(text: str) -> None:
        ended.append(text)
        raise ValueError(text)

    with pytest.raises(ValueError, match="first"):
        at_once([partial(fail, "first"), partial(fail, "second")], "test")
    assert sorted(ended) == ["first", "second"]


@pytest.mark.parametrize("started", [0, 1, 2])
def test_the_system_refuses_one_of_some_threads(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(begun) == started:
            refuse(thread)
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(tierstore.ThreadError, match=r"can't start new thread.*ulimit -u"):
        Threads(3, "test")
    for thread in begun:
        thread.join()


def test_a_thread_error_names_the_limits_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(tierstore.ThreadError) as caught:
        start_thread(threading.Thread())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_process_that_ends_waits_for_the_last_threads_first(is_dropped: bool) -> None:
    """Calls of later threads may need the earlier ones, as commits need an engine."""
    program = f"""
import threading
from tierstore.threads import Latch, Threads

first = [Threads(1, "first") for _ in range(20)]
last = Threads(1, "last")
ends = Latch()
threading._register_atexit(ends.set)  # Called before the hook that ends the threads.

def need() -> None:
    ends.wait()
    print(sum(threads.submit(int, "1").result() for threads in first))

last.submit(need)
if {is_dropped}:
    del last
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("20\n", "")
