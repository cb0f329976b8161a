from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engine_suite import DirectStorageTests
from tests.support.held import Held
from tests.support.transfers import (
    aligned_buffer,
    create_with,
    random_bytes,
    read_bytes,
    write_bytes,
)
from tierstore.errors import StorageError
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES, Extent

try:
    from tierstore.storage import libaio
except (ImportError, OSError) as missing:
    pytest.skip(f"libaio cannot be loaded: {missing}", allow_module_level=True)
try:
    libaio.LibaioEngine(1, SECTOR_BYTES).close()
except OSError as refused:
    pytest.skip(f"the kernel refuses libaio: {refused}", allow_module_level=True)

from tierstore.storage.libaio import LibaioEngine, LibaioStorage, LibaioTicket
from tierstore.storage.request import RETRIES_MAX

Submit = Callable[[list[Any]], int]
_NO_FD = 1 << 20


class TestLibaioStorage(DirectStorageTests):
    def open_storage(self, directory: Path) -> Storage:
        return LibaioStorage(directory)

    def engine_type(self) -> tuple[Any, str]:
        return libaio, "LibaioEngine"


@pytest.fixture
def small_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A storage that moves one sector per request, with four requests in flight."""
    monkeypatch.setattr(libaio, "REQUEST_BYTES", SECTOR_BYTES)
    monkeypatch.setattr(libaio, "QUEUE_DEPTH", 4)
    with closing(LibaioStorage(tmp_path)) as storage:
        yield storage


def replace_submit(
    monkeypatch: pytest.MonkeyPatch, replacement: Callable[[Submit], Submit]
) -> None:
    """Replace the kernel's submit by what ``replacement`` makes of it."""
    real = libaio._Context.submit
    monkeypatch.setattr(
        libaio._Context,
        "submit",
        lambda self, blocks: replacement(lambda some: real(self, some))(blocks),
    )


@pytest.mark.parametrize("taken", [1, 3])
def test_partial_submissions_are_continued(
    small_requests: Storage, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    content = random_bytes(41 * SECTOR_BYTES)
    replace_submit(monkeypatch, lambda submit: lambda blocks: submit(blocks[:taken]))
    create_with(small_requests, "page", content)
    assert (Path(small_requests.location) / "page").read_bytes() == content
    assert read_bytes(small_requests, "page", 0, len(content)) == content


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_refused_submissions_are_retried(
    small_requests: Storage, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    calls = 0

    def refuse_every_other(submit: Submit) -> Submit:
        def refuse_or_submit(blocks: list[Any]) -> int:
            nonlocal calls
            calls += 1
            if calls % 2:
                raise OSError(error, os.strerror(error))
            return submit(blocks[:2])

        return refuse_or_submit

    content = random_bytes(41 * SECTOR_BYTES)
    replace_submit(monkeypatch, refuse_every_other)
    create_with(small_requests, "page", content)
    assert (Path(small_requests.location) / "page").read_bytes() == content
    assert calls > 20


def test_endless_refusals_are_an_error(
    small_requests: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def refuse(_: Submit) -> Submit:
        def refuse_all(blocks: list[Any]) -> int:
            nonlocal calls
            calls += 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        return refuse_all

    small_requests.create("page", 9 * SECTOR_BYTES)
    with monkeypatch.context() as patch:
        replace_submit(patch, refuse)
        with pytest.raises(StorageError) as caught:
            write_bytes(small_requests, "page", 0, b"n" * (9 * SECTOR_BYTES))
        assert caught.value.errno == errno.EAGAIN
        assert RETRIES_MAX < calls < 2 * RETRIES_MAX
    write_bytes(small_requests, "page", 0, b"n" * SECTOR_BYTES)  # The engine recovers.
    assert read_bytes(small_requests, "page", 0, SECTOR_BYTES) == b"n" * SECTOR_BYTES


@pytest.mark.parametrize("position", [0, 2])
def test_refused_request_fails_its_transfer_only(
    small_requests: Storage, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """io_submit itself refuses some requests, such as writes to a read-only descriptor."""
    content = random_bytes(9 * SECTOR_BYTES)
    for name in ("good", "bad"):
        small_requests.create(name, len(content))
    gate = threading.Event()
    replace_submit(
        monkeypatch, lambda submit: lambda blocks: submit(blocks) if gate.wait(60) else 0
    )
    real_open = os.open
    transfers = []
    for name in ["bad" if index == position else "good" for index in range(3)]:
        with monkeypatch.context() as patch:
            if name == "bad":
                patch.setattr(
                    os, "open", lambda path, flags, **named: real_open(path, os.O_RDONLY, **named)
                )
            extent = Extent(0, len(content))
            transfers.append((name, small_requests.write(name, extent, aligned_buffer(content))))
    gate.set()
    for name, transfer in transfers:
        if name == "bad":
            with pytest.raises(StorageError) as caught:
                transfer.wait()
            assert caught.value.errno == errno.EBADF
        else:
            transfer.wait()
    assert (Path(small_requests.location) / "good").read_bytes() == content
    assert (Path(small_requests.location) / "bad").read_bytes() == bytes(len(content))


def test_misaligned_memory_is_an_error(tmp_path: Path) -> None:
    """Submission succeeds; only the completion reports the error."""
    path = tmp_path / "page"
    path.write_bytes(b"o" * SECTOR_BYTES)
    memory = aligned_buffer(2 * SECTOR_BYTES)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    engine = LibaioEngine(4, SECTOR_BYTES)
    ticket = LibaioTicket()
    engine.submit(ticket, True, fd, address + 7, SECTOR_BYTES, 0)
    assert engine.wait(ticket) == (errno.EINVAL, 0)
    engine.close()
    os.close(fd)
    assert path.read_bytes() == b"o" * SECTOR_BYTES


def test_error_of_a_dead_thread_ends_all_transfers(
    small_requests: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(_: Submit) -> Submit:
        def raise_error(blocks: list[Any]) -> int:
            raise MemoryError

        return raise_error

    died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: died.set())
    small_requests.create("page", 9 * SECTOR_BYTES)
    replace_submit(monkeypatch, break_down)
    with pytest.raises(StorageError):
        write_bytes(small_requests, "page", 0, bytes(9 * SECTOR_BYTES))
    assert died.wait(60)
    small_requests.close()


class TestEngine:
    def test_ticket_that_was_never_submitted(self) -> None:
        engine = LibaioEngine(2, SECTOR_BYTES)
        with pytest.raises(ValueError, match="never submitted"):
            engine.wait(LibaioTicket())
        engine.close()

    def test_submission_interrupted_before_its_wake_up_still_ends(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = LibaioEngine(2, SECTOR_BYTES)
        ticket = LibaioTicket()
        with monkeypatch.context() as patch:

            def interrupt(*_: object) -> None:
                raise KeyboardInterrupt

            patch.setattr(os, "eventfd_write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.submit_sync(ticket, [_NO_FD])
        assert engine.wait(ticket) == (errno.EBADF, 0)
        engine.close()

    def test_closed_engine_takes_nothing_more(self) -> None:
        before = Held()
        engine = LibaioEngine(2, SECTOR_BYTES)
        engine.close()
        engine.close()
        before.assert_nothing_new()
        ticket = LibaioTicket()
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit_sync(ticket, [])
        assert engine.wait(ticket) == (errno.ECANCELED, 0)

    def test_descriptors_exhausted_is_an_os_error(self) -> None:
        before = Held()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                LibaioEngine(2, SECTOR_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.errno == errno.EMFILE
        before.assert_nothing_new()

    def test_forked_child_drops_the_engine_without_output(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        engine = LibaioEngine(2, SECTOR_BYTES)
        child = os.fork()
        if child == 0:
            engine.abandon()
            del engine
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert capfd.readouterr().err == ""
        ticket = LibaioTicket()
        engine.submit_sync(ticket, [_NO_FD])
        assert engine.wait(ticket) == (errno.EBADF, 0)
        engine.close()
