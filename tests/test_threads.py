"""Threads that the system refuses."""

from __future__ import annotations

import pickle
import threading

import pytest

import tierstore
from tierstore.threads import start_thread, started_pool


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_pool_has_all_its_threads_and_works() -> None:
    before = threading.active_count()
    with started_pool(3, "test") as pool:
        assert threading.active_count() == before + 3
        assert list(pool.map(str, range(5))) == ["0", "1", "2", "3", "4"]
    assert threading.active_count() == before


@pytest.mark.parametrize("started", [0, 1, 2])
def test_a_pool_that_lacks_a_thread_is_refused(
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
        started_pool(3, "test")
    for thread in begun:
        thread.join()


def test_a_thread_error_names_the_limits_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(tierstore.ThreadError) as caught:
        start_thread(threading.Thread())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
