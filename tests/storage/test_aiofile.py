from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_suite import EngineStorageTests
from tests.support.held import Held
from tests.support.transfers import write_bytes
from tierstore.errors import RunDirectoryError, StorageError
from tierstore.storage import aiofile
from tierstore.storage.aiofile import AiofilesEngine, AiofilesStorage, AiofilesTicket
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES

_NO_FD = 1 << 20


class TestAiofilesStorage(EngineStorageTests):
    def open_storage(self, directory: Path) -> Storage:
        return AiofilesStorage(directory)

    def engine_type(self) -> tuple[Any, str]:
        return aiofile, "AiofilesEngine"


def test_unusable_directory_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = Held()
    with pytest.raises(RunDirectoryError):
        AiofilesStorage(tmp_path / "file")
    before.assert_nothing_new()


def test_unexpected_error_ends_the_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(_: int) -> None:
        raise MemoryError

    with closing(AiofilesStorage(tmp_path)) as storage:
        storage.create("page", SECTOR_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", run_out_of_memory)
            for move in (
                lambda: write_bytes(storage, "page", 0, bytes(SECTOR_BYTES)),
                lambda: storage.flush(["page"]),
            ):
                with pytest.raises(StorageError) as caught:
                    move()
                assert caught.value.errno == errno.EIO
        storage.flush(["page"])


class TestEngine:
    @pytest.fixture
    def engine(self) -> Iterator[AiofilesEngine]:
        with closing(AiofilesEngine()) as engine:
            yield engine

    def test_ticket_that_was_never_submitted(self, engine: AiofilesEngine) -> None:
        with pytest.raises(ValueError, match="never submitted"):
            engine.wait(AiofilesTicket())

    @pytest.mark.parametrize("told", [False, True])
    @pytest.mark.parametrize("finish", ["wait", "close"])
    def test_submission_interrupted_around_its_wake_up_still_ends(
        self,
        engine: AiofilesEngine,
        monkeypatch: pytest.MonkeyPatch,
        finish: str,
        told: bool,
    ) -> None:
        real = asyncio.SelectorEventLoop.call_soon_threadsafe

        def interrupt(loop: Any, callback: Callable[..., object], *rest: Any) -> None:
            # The loop and its pool also call this, where a signal never raises an exception.
            interrupted = threading.current_thread() is threading.main_thread()
            if told or not interrupted:
                real(loop, callback, *rest)
            if interrupted:
                raise KeyboardInterrupt

        ticket = AiofilesTicket()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.SelectorEventLoop, "call_soon_threadsafe", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.submit_sync(ticket, [_NO_FD])
        if finish == "close":
            engine.close()
            assert ticket.ended
        assert engine.wait(ticket) == (errno.EBADF, 0)

    def test_closed_engine_takes_nothing_more(self) -> None:
        before = Held()
        engine = AiofilesEngine()
        engine.close()
        engine.close()
        before.assert_nothing_new()
        ticket = AiofilesTicket()
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit_sync(ticket, [])
        assert engine.wait(ticket) == (errno.ECANCELED, 0)
