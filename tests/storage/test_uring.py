from __future__ import annotations

import errno
import mmap
import os
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import StorageError
from tierstore.storage.base import Storage
from tierstore.testing.storage_tests import FileStorageTests
from tierstore.testing.transfers import (
    aligned_buffer,
    create_with,
    random_bytes,
    read_bytes,
)
from tierstore.units import SECTOR_BYTES, Extent

native = pytest.importorskip("tierstore._native", reason="installed without liburing")
try:
    native.UringEngine(1, SECTOR_BYTES)
except OSError as refused:
    pytest.skip(f"the kernel refuses io_uring: {refused}", allow_module_level=True)

from tierstore._native import UringEngine  # noqa: E402
from tierstore.storage import uring  # noqa: E402
from tierstore.storage.uring import QUEUE_DEPTH, REQUEST_BYTES, UringStorage  # noqa: E402

# Holds the GIL in C while it waits for a transfer to reach a pipe. Tickets are dropped at
# once, so that the ring's thread holds the last reference to each of them.
TRANSFER_WITHOUT_THE_GIL = """
import ctypes, mmap, os, sys
from tierstore import _native

sys.setswitchinterval(1000)
read_holding_the_gil = ctypes.PyDLL(None).read
engine = _native.UringEngine(2, 4096)
memory = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
received = ctypes.create_string_buffer(4096)
reader, writer = os.pipe()
for _ in range(5):
    engine.submit(_native.Ticket(), True, writer, address, 4096, 0)
    assert read_holding_the_gil(reader, received, 4096) == 4096
"""


class TestUringStorage(FileStorageTests):
    def open_storage(self, directory: Path) -> Storage:
        return UringStorage(directory)

    @pytest.mark.parametrize("extra", [-SECTOR_BYTES, 0, SECTOR_BYTES])
    def test_round_trip_of_more_requests_than_fit_the_ring(
        self, storage: Storage, extra: int
    ) -> None:
        nbytes = (QUEUE_DEPTH + 1) * REQUEST_BYTES + extra
        content = random_bytes(1 << 20) * (nbytes >> 20) + random_bytes(nbytes % (1 << 20), seed=1)
        create_with(storage, "page", content)
        assert self.raw_bytes(storage, "page") == content
        assert read_bytes(storage, "page", 0, nbytes) == content

    def test_data_is_on_the_medium_past_the_page_cache(self, storage: Storage) -> None:
        content = random_bytes(33 * SECTOR_BYTES)
        create_with(storage, "page", content)
        memory = mmap.mmap(-1, len(content))
        fd = os.open(Path(storage.location) / "page", os.O_RDONLY | os.O_DIRECT)
        try:
            assert os.preadv(fd, [memory], 0) == len(content)
        finally:
            os.close(fd)
        assert memory[:] == content

    def test_error_names_where_a_read_stopped(self, storage: Storage) -> None:
        nbytes = 3 * REQUEST_BYTES
        storage.create("page", nbytes)
        os.truncate(Path(storage.location) / "page", REQUEST_BYTES + 5 * SECTOR_BYTES)
        extent = Extent(SECTOR_BYTES, nbytes - SECTOR_BYTES)
        with pytest.raises(StorageError, match="stopped at byte") as caught:
            storage.read("page", extent, aligned_buffer(extent.nbytes)).wait()
        stopped_at = int(str(caught.value).split("stopped at byte ")[1].split(")")[0])
        assert REQUEST_BYTES + 5 * SECTOR_BYTES <= stopped_at < nbytes
        assert caught.value.errno == errno.EIO

    @pytest.mark.long
    def test_transfer_of_more_than_two_gib(self, storage: Storage) -> None:
        nbytes = (2 << 30) + SECTOR_BYTES
        path = Path(storage.location) / "page"
        path.touch()
        os.truncate(path, nbytes)
        with path.open("r+b") as file:
            file.seek(nbytes - SECTOR_BYTES)
            file.write(b"e" * SECTOR_BYTES)
        buffer = aligned_buffer(nbytes)
        buffer[:SECTOR_BYTES] = b"x" * SECTOR_BYTES
        storage.read("page", Extent(0, nbytes), buffer).wait()
        assert bytes(buffer[:SECTOR_BYTES]) == bytes(SECTOR_BYTES)
        assert bytes(buffer[-SECTOR_BYTES:]) == b"e" * SECTOR_BYTES


@pytest.mark.parametrize("submitted", [False, True])
def test_interrupt_around_a_submission_hides_nothing_from_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: bool
) -> None:
    class InterruptedEngine(UringEngine):
        def submit(self, *arguments: Any) -> None:
            if submitted:
                super().submit(*arguments)
            raise KeyboardInterrupt

    content = random_bytes(2 * REQUEST_BYTES)
    monkeypatch.setattr(uring, "UringEngine", InterruptedEngine)
    with closing(UringStorage(tmp_path)) as storage:
        storage.create("page", len(content))
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(KeyboardInterrupt):
            storage.write("page", Extent(0, len(content)), aligned_buffer(content))
        storage.drain()
        assert (tmp_path / "page").read_bytes() == (content if submitted else bytes(len(content)))
        assert len(os.listdir("/proc/self/fd")) == opened


class TestEngine:
    @pytest.mark.parametrize(("depth", "nbytes"), [(0, 4096), (8, 0), (8, 4097), (8, 1 << 31)])
    def test_bad_geometry_is_refused(self, depth: int, nbytes: int) -> None:
        with pytest.raises(ValueError, match="must"):
            native.UringEngine(depth, nbytes)

    def test_sync_reports_the_descriptor_that_failed(self, tmp_path: Path) -> None:
        engine = native.UringEngine(2, SECTOR_BYTES)
        with (tmp_path / "file").open("wb") as file:
            fds = [file.fileno()] * 5
            good, bad = native.Ticket(), native.Ticket()
            engine.submit_sync(good, fds)
            engine.submit_sync(bad, [*fds[:3], -1, *fds])
            assert engine.wait(good) == (0, 0)
            assert engine.wait(bad) == (errno.EBADF, 3)

    def test_ticket_serves_once(self) -> None:
        engine = native.UringEngine(2, SECTOR_BYTES)
        ticket = native.Ticket()
        with pytest.raises(ValueError, match="never submitted"):
            engine.wait(ticket)
        engine.submit_sync(ticket, [])
        assert engine.wait(ticket) == (0, 0)
        assert ticket.ended
        with pytest.raises(ValueError, match="one transfer only"):
            engine.submit_sync(ticket, [])

    def test_closed_engine_takes_nothing_more(self) -> None:
        engine = native.UringEngine(2, SECTOR_BYTES)
        engine.close()
        engine.close()
        ticket = native.Ticket()
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit_sync(ticket, [])
        assert ticket.ended
        assert engine.wait(ticket) == (errno.ECANCELED, 0)

    def test_descriptors_exhausted_is_an_os_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                native.UringEngine(2, SECTOR_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.errno == errno.EMFILE
        assert len(os.listdir("/proc/self/fd")) == opened

    def test_thread_of_the_ring_never_takes_the_gil(self) -> None:
        script = [sys.executable, "-c", TRANSFER_WITHOUT_THE_GIL]
        subprocess.run(script, check=True, timeout=60)

    def test_forked_child_destroys_the_engine_without_waiting(self) -> None:
        engine = native.UringEngine(2, SECTOR_BYTES)
        child = os.fork()
        if child == 0:
            try:
                engine.wait(native.Ticket())
            except RuntimeError:
                del engine
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ticket = native.Ticket()
        engine.submit_sync(ticket, [])
        assert engine.wait(ticket) == (0, 0)
