from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.blocked_write import BlockedWrite
from tests.support.engine_suite import DirectStorageTests
from tests.support.held import Held
from tests.support.transfers import aligned_buffer, create_with, random_bytes, read_bytes
from tierstore.storage.base import Storage
from tierstore.units import SECTOR_BYTES, Extent

native = pytest.importorskip("tierstore.storage._native", reason="installed without liburing")
try:
    native.UringEngine(1, SECTOR_BYTES)
except OSError as refused:
    pytest.skip(f"the kernel refuses io_uring: {refused}", allow_module_level=True)

from tierstore.storage import uring  # noqa: E402
from tierstore.storage.uring import UringStorage  # noqa: E402

# Keeps the GIL in C while it waits for a transfer to reach a pipe. Tickets are dropped at
# once, so that the ring's thread has the last reference to them.
TRANSFER_WITHOUT_THE_GIL = """
import ctypes, mmap, os, sys
from tierstore.storage import _native

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


MOVE_UNDER_A_MEMLOCK_LIMIT = """
import logging, mmap, os, resource, sys
from pathlib import Path
from tierstore.storage import Extent, open_storage, uring

resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))
if os.geteuid() == 0:  # The limit does not apply to root.
    os.setresuid(65534, 65534, 65534)
logging.basicConfig(format="%(levelname)s %(message)s")
# This user may lack access to the parents of the directory.
storage = open_storage(Path("/proc/self/cwd"), "io_uring")
memory = memoryview(mmap.mmap(-1, 16 << 20))
for _ in range(2):
    storage.register(memory)
memory[:] = os.urandom(1 << 20) * 16
content = bytes(memory)
storage.create("page", len(memory))
storage.write("page", Extent(0, len(memory)), memory).wait()
with open("page", "rb") as file:
    assert file.read() == content
memory[:] = bytes(len(memory))
storage.read("page", Extent(0, len(memory)), memory).wait()
assert memory == content
storage.close()
print(os.geteuid())
"""


def locked_bytes() -> int:
    """Return how much memory of this process the kernel has locked."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmPin"))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with closing(UringStorage(tmp_path)) as storage:
        yield storage


class TestRegister:
    def test_memory_stays_locked_until_it_is_replaced(self, storage: Storage) -> None:
        before = locked_bytes()
        for sectors in (64, 16, 0, 32):
            storage.register(aligned_buffer(sectors * SECTOR_BYTES) if sectors else memoryview(b""))
            assert locked_bytes() - before == sectors * SECTOR_BYTES
        storage.close()
        assert locked_bytes() == before

    def test_memory_is_kept_alive_until_it_is_replaced(self, storage: Storage) -> None:
        memory = mmap.mmap(-1, SECTOR_BYTES)
        storage.register(memoryview(memory))
        with pytest.raises(BufferError):
            memory.close()
        storage.register(memoryview(b""))
        memory.close()

    def test_memory_is_kept_alive_until_close(self, storage: Storage) -> None:
        memory = mmap.mmap(-1, SECTOR_BYTES)
        storage.register(memoryview(memory))
        storage.close()
        memory.close()

    @pytest.mark.parametrize("memory", ["gone", "read-only"])
    def test_refused_registration_is_logged_once(
        self, storage: Storage, caplog: pytest.LogCaptureFixture, memory: str
    ) -> None:
        mapping = mmap.mmap(-1, 4 * SECTOR_BYTES, prot=mmap.PROT_READ)
        mapped = memoryview(mapping)
        array = np.frombuffer(mapped, np.uint8)
        if memory == "gone":
            # Inaccessible, as after munmap().
            libc = ctypes.CDLL(None)
            libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            assert libc.mprotect(array.ctypes.data, mapped.nbytes, 0) == 0
        content = random_bytes(4 * SECTOR_BYTES)
        with caplog.at_level(logging.WARNING, "tierstore"):
            for _ in range(2):
                storage.register(mapped)
        (record,) = caplog.records
        assert f"errno {errno.EFAULT}" in record.message
        create_with(storage, "page", content)
        assert read_bytes(storage, "page", 0, len(content)) == content

    def test_limit_of_locked_memory_is_logged_and_pages_move(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", MOVE_UNDER_A_MEMLOCK_LIMIT],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) != 0
        (line,) = done.stderr.splitlines()
        assert line.startswith("WARNING")
        assert f"errno {errno.ENOMEM}" in line
        assert "8.0 KiB" in line
        assert "ulimit -l" in line

    def test_registration_waits_for_requests_in_flight_and_may_be_interrupted(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        blocked = BlockedWrite(storage, monkeypatch)
        before = locked_bytes()
        memory = mmap.mmap(-1, 8 * SECTOR_BYTES)
        with blocked.interrupted():
            storage.register(memoryview(memory))
        with pytest.raises(BufferError):
            memory.close()  # It may still be registered.
        blocked.release()
        storage.drain()
        assert locked_bytes() - before == 8 * SECTOR_BYTES
        storage.register(memoryview(b""))
        memory.close()

    def test_threads_register_and_move(self, storage: Storage) -> None:
        content = random_bytes(256 * SECTOR_BYTES)
        memory = [aligned_buffer(len(content)) for _ in range(4)]

        def work(index: int) -> bool:
            name = f"page-{index}"
            create_with(storage, name, content)
            for _ in range(20):
                storage.register(memory[index])
                memory[index][:] = bytes(len(content))
                storage.read(name, Extent(0, len(content)), memory[index]).wait()
                if memory[index] != content:
                    return False
            return True

        with ThreadPoolExecutor(4) as executor:
            assert all(executor.map(work, range(4)))

    @pytest.mark.long
    def test_more_than_one_registered_piece(self, storage: Storage) -> None:
        piece_bytes = 1 << 30
        memory = aligned_buffer(piece_bytes + (64 << 20))
        before = locked_bytes()
        storage.register(memory)
        assert locked_bytes() - before == len(memory)
        content = random_bytes(1 << 20) * 48
        # In the first piece, across both, and in the second.
        for start in (0, piece_bytes - 20 * (1 << 20) - SECTOR_BYTES, piece_bytes + SECTOR_BYTES):
            part = memory[start : start + len(content)]
            part[:] = content
            storage.create("page", len(content))
            storage.write("page", Extent(0, len(content)), part).wait()
            part[:] = bytes(len(content))
            storage.read("page", Extent(0, len(content)), part).wait()
            assert part == content
            assert (Path(storage.location) / "page").read_bytes() == content


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
        before = Held()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            with pytest.raises(OSError) as caught:
                native.UringEngine(2, SECTOR_BYTES)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.errno == errno.EMFILE
        before.assert_nothing_new()

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
