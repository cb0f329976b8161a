"""Limits of a real system, for all engines on a filesystem."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocked_write import BlockedWrite
from tests.support.held import Held
from tests.support.transfers import (
    aligned_buffer,
    create_with,
    exit_code_of_child,
    random_bytes,
    read_bytes,
    write_bytes,
)
from tierstore.errors import RunDirectoryError, RunLockedError, StorageError, StoreClosedError
from tierstore.storage import Extent, Storage, open_storage
from tierstore.units import SECTOR_BYTES

ENGINES = ["io_uring", "libaio", "aiofiles"]

WRITE_UNDER_A_LIMIT = """
import json, mmap, resource, sys
from pathlib import Path
from tierstore.errors import StorageError
from tierstore.storage import Extent, open_storage

storage = open_storage(Path(sys.argv[1]), sys.argv[2])
nbytes, limit = 4 << 20, int(sys.argv[3])
storage.put("page", b"")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
memory = mmap.mmap(-1, nbytes)
memory[:] = b"n" * nbytes
try:
    storage.write("page", Extent(0, nbytes), memoryview(memory)).wait()
    outcome = None
except StorageError as error:
    outcome = [error.errno, error.offset, error.nbytes, error.path]
storage.close()
print(json.dumps(outcome))
"""

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from tierstore.storage import open_storage

storage = open_storage(Path(sys.argv[1]), sys.argv[2])
storage.lock(0)
print("locked", flush=True)
sys.stdin.read()
"""


EXIT_WITH_AN_OPEN_STORAGE = """
import mmap, sys
from pathlib import Path
from tierstore.storage import Extent, open_storage

storage = open_storage(Path(sys.argv[1]), sys.argv[2])
storage.lock(0)
storage.create("page", 4 << 20)
transfer = storage.write("page", Extent(0, 4 << 20), memoryview(mmap.mmap(-1, 4 << 20)))
print(1)
"""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    try:
        open_storage(tmp_path / "try", name).close()
    except RunDirectoryError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture
def storage(tmp_path: Path, engine: str) -> Iterator[Storage]:
    with closing(open_storage(tmp_path / "run", engine)) as storage:
        yield storage


def run_script(script: str, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.quick(4)
@pytest.mark.parametrize("limit", [1 << 20, 8192, (1 << 20) + 100])
def test_file_size_limit_is_an_error(tmp_path: Path, engine: str, limit: int) -> None:
    outcome = run_script(WRITE_UNDER_A_LIMIT, tmp_path / "run", engine, limit)
    assert outcome is not None, "a write cut by the limit was reported as done"
    error, offset, nbytes, path = outcome
    assert error != 0
    assert (offset, nbytes) == (0, 4 << 20)
    assert path == str(tmp_path / "run" / "page")
    assert (tmp_path / "run" / "page").stat().st_size <= limit


def test_write_below_the_limit_succeeds(tmp_path: Path, engine: str) -> None:
    assert run_script(WRITE_UNDER_A_LIMIT, tmp_path / "run", engine, 1 << 30) is None
    assert (tmp_path / "run" / "page").read_bytes() == b"n" * (4 << 20)


def test_lock_of_a_killed_process_is_free(tmp_path: Path, engine: str) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path / "run"), engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder, closing(open_storage(tmp_path / "run", engine)) as storage:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunLockedError, match=f"process {holder.pid} on host .*Stop that"):
            storage.lock(0.05)
        holder.kill()
        storage.lock(60)


def test_parents_are_made_private(tmp_path: Path, engine: str) -> None:
    open_storage(tmp_path / "a" / "b" / "run", engine).close()
    for directory in ("a", "a/b", "a/b/run"):
        assert (tmp_path / directory).stat().st_mode & 0o777 == 0o700


def test_list_names_files_only(tmp_path: Path, engine: str) -> None:
    with closing(open_storage(tmp_path / "run", engine)) as storage:
        storage.put("file", b"")
        (tmp_path / "run" / "directory").mkdir()
        (tmp_path / "run" / "link").symlink_to("file")
        assert storage.list() == ["file"]


def _count_of_allowed(storage: Storage) -> int:
    """Return how often list() is allowed, before and after abandon(), in a forked child."""
    allowed = 0
    for _ in range(2):
        with suppress(StoreClosedError):
            storage.list()
            allowed += 1
        storage.abandon()
    storage.close()
    return allowed


def test_forked_child_may_not_use_the_storage(storage: Storage) -> None:
    create_with(storage, "page", b"x" * SECTOR_BYTES)
    storage.lock(0)
    assert exit_code_of_child(lambda: _count_of_allowed(storage)) == 0
    assert read_bytes(storage, "page", 0, SECTOR_BYTES) == b"x" * SECTOR_BYTES
    with (
        closing(open_storage(Path(storage.location), storage.engine)) as other,
        pytest.raises(RunLockedError),
    ):
        other.lock(0)


def test_links_are_not_followed(storage: Storage, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"t" * SECTOR_BYTES)
    (Path(storage.location) / "link").symlink_to(target)
    operations: list[Callable[[], object]] = [
        lambda: storage.get("link"),
        lambda: read_bytes(storage, "link", 0, SECTOR_BYTES),
        lambda: write_bytes(storage, "link", 0, bytes(SECTOR_BYTES)),
        lambda: storage.flush(["link"]),
    ]
    for operate in operations:
        with pytest.raises(StorageError) as caught:
            operate()
        assert caught.value.errno == errno.ELOOP
    for replace in (
        lambda: storage.create("link", SECTOR_BYTES),
        lambda: storage.put("link", b"new"),
    ):
        replace()  # The link itself.
        assert target.read_bytes() == b"t" * SECTOR_BYTES
        assert storage.list() == ["link"]
        storage.unlink("link")
        (Path(storage.location) / "link").symlink_to(target)


def test_transfers_close_their_descriptors(storage: Storage) -> None:
    create_with(storage, "page", bytes(SECTOR_BYTES))
    before = Held()
    for _ in range(20):
        read_bytes(storage, "page", 0, SECTOR_BYTES)
        with pytest.raises(StorageError):
            read_bytes(storage, "page", SECTOR_BYTES, SECTOR_BYTES)
        storage.flush(["page"])
    before.assert_nothing_new()


def test_forked_child_abandons_transfers_in_flight(storage: Storage) -> None:
    content = random_bytes(4096 * SECTOR_BYTES)
    storage.create("page", len(content))
    transfer = storage.write("page", Extent(0, len(content)), aligned_buffer(content))
    storage.lock(0)

    def open_files_after_abandon() -> int:
        storage.abandon()
        opened = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        return sum(path.startswith(storage.location) for path in opened)

    open_files = exit_code_of_child(open_files_after_abandon)
    transfer.wait()
    assert open_files == 0
    assert (Path(storage.location) / "page").read_bytes() == content


@pytest.fixture
def blocked(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockedWrite]:
    write = BlockedWrite(storage, monkeypatch)
    yield write
    write.release()


def test_interrupt_ends_a_wait_but_not_the_transfer(
    storage: Storage, blocked: BlockedWrite
) -> None:
    with blocked.interrupted():
        blocked.transfer.wait()
    with blocked.interrupted():
        storage.drain()
    assert not blocked.transfer.done()
    blocked.release()
    storage.drain()
    assert blocked.transfer.done()


def test_interrupted_close_keeps_the_lock_until_transfers_have_ended(
    storage: Storage, blocked: BlockedWrite
) -> None:
    storage.lock(0)
    with closing(type(storage)(Path(storage.location))) as other:
        for _ in range(2):  # The second close() continues to wait.
            with blocked.interrupted():
                storage.close()
            with pytest.raises(RunLockedError):
                other.lock(0)
        with pytest.raises(StoreClosedError):
            storage.list()
        assert not blocked.transfer.done()
        blocked.release()
        storage.close()
        assert blocked.transfer.done()
        other.lock(0)


def test_storage_dropped_unclosed_releases_everything(tmp_path: Path, engine: str) -> None:
    content = random_bytes(4096 * SECTOR_BYTES)
    before = Held()
    storage = open_storage(tmp_path, engine)
    storage.lock(0)
    storage.create("page", len(content))
    storage.write("page", Extent(0, len(content)), aligned_buffer(content))
    del storage
    gc.collect()
    assert (tmp_path / "page").read_bytes() == content
    before.assert_nothing_new()
    with closing(open_storage(tmp_path, engine)) as storage:
        storage.lock(0)


def test_process_ends_with_a_storage_open(tmp_path: Path, engine: str) -> None:
    assert run_script(EXIT_WITH_AN_OPEN_STORAGE, tmp_path, engine) == 1
