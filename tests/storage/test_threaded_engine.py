"""Threads and syncs of both engines in Python."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.support.held import Held
from tierstore.errors import ThreadError
from tierstore.storage.aiofile import AiofilesEngine, AiofilesTicket
from tierstore.units import SECTOR_BYTES

_NO_FD = 1 << 20


def _aiofiles() -> tuple[Any, Any]:
    return AiofilesEngine, AiofilesTicket


def _libaio() -> tuple[Any, Any]:
    try:
        from tierstore.storage import libaio

        libaio.LibaioEngine(1, SECTOR_BYTES).close()
    except (ImportError, OSError) as error:
        pytest.skip(f"libaio does not work here: {error}")
    return lambda: libaio.LibaioEngine(2, SECTOR_BYTES), libaio.LibaioTicket


@pytest.fixture(params=[_aiofiles, _libaio])
def kind(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    made: tuple[Any, Any] = request.param()
    return made


@pytest.fixture
def new_engine(kind: tuple[Any, Any]) -> Any:
    return kind[0]


@pytest.fixture
def new_ticket(kind: tuple[Any, Any]) -> Any:
    return kind[1]


@pytest.fixture
def engine(new_engine: Any) -> Iterator[Any]:
    with closing(new_engine()) as engine:
        yield engine


def test_sync_reports_the_first_descriptor_that_failed(
    engine: Any, new_ticket: Any, tmp_path: Any
) -> None:
    with (tmp_path / "file").open("wb") as file:
        fds = [file.fileno()] * 20
        good, bad, empty = new_ticket(), new_ticket(), new_ticket()
        engine.submit_sync(good, fds)
        engine.submit_sync(bad, [*fds[:13], _NO_FD, *fds, _NO_FD])
        engine.submit_sync(empty, [])
        assert engine.wait(good) == (0, 0)
        assert engine.wait(bad) == (errno.EBADF, 13)
        assert engine.wait(empty) == (0, 0)


@pytest.mark.parametrize("count", [1, 3, 9, 100])
def test_a_file_is_synced_once(
    engine: Any, new_ticket: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports an error of writing back once: a second sync would succeed."""
    synced = Counter[int]()

    def sync(fd: int) -> None:
        synced[fd] += 1
        if fd in (count // 2, count - 1) and synced[fd] == 1:
            raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fdatasync", sync)
    ticket = new_ticket()
    engine.submit_sync(ticket, list(range(count)))
    assert engine.wait(ticket) == (errno.EIO, count // 2)
    assert synced == Counter(range(count))


def test_an_unexpected_error_ends_a_sync(
    engine: Any, new_ticket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(fd: int) -> None:
        if fd == 2:
            raise MemoryError

    monkeypatch.setattr(os, "fdatasync", run_out_of_memory)
    ticket, next_ticket = new_ticket(), new_ticket()
    engine.submit_sync(ticket, [0, 1, 2, 3])
    assert engine.wait(ticket) == (errno.EIO, 2)
    engine.submit_sync(next_ticket, [1])
    assert engine.wait(next_ticket) == (0, 0)


@pytest.mark.parametrize("started", [0, 1, 3, 8])
def test_an_engine_without_threads_is_refused_and_leaves_nothing(
    new_engine: Any, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, before, begun = threading.Thread.start, Held(), []

    def limited(thread: threading.Thread) -> None:
        if len(begun) == started:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(ThreadError, match="ulimit -u"):
            new_engine()
    before.assert_nothing_new()


@pytest.mark.parametrize("started", [0, 1, 8])
def test_an_interrupt_as_threads_start_leaves_nothing(
    new_engine: Any, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, before, begun = threading.Thread.start, Held(), []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)  # The thread runs when the interrupt comes.
        begun.append(thread)
        if len(begun) > started:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            new_engine()
    before.assert_nothing_new()


def test_closing_waits_for_a_sync(
    new_engine: Any, new_ticket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def sync(_: int) -> None:
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(os, "fdatasync", sync)
    before, engine, ticket = Held(), new_engine(), new_ticket()
    engine.submit_sync(ticket, [_NO_FD])
    assert begun.wait(60)
    closing_thread = threading.Thread(target=engine.close)
    closing_thread.start()
    assert not ticket.ended
    go_on.set()
    closing_thread.join()
    assert ticket.ended
    assert engine.wait(ticket) == (0, 0)
    before.assert_nothing_new()
