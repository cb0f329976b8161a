from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.storage.direct_tests import DirectStorageTests
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES

native = pytest.importorskip("tierstore._native", reason="installed without liburing")
try:
    native.UringEngine(1, SECTOR_BYTES)
except OSError as refused:
    pytest.skip(f"the kernel refuses io_uring: {refused}", allow_module_level=True)

from tierstore.storage import uring  # noqa: E402
from tierstore.storage.uring import UringStorage  # noqa: E402

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


class TestUringStorage(DirectStorageTests):
    def open_storage(self, directory: Path) -> Storage:
        return UringStorage(directory)

    def engine_type(self) -> tuple[Any, str]:
        return uring, "UringEngine"


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
