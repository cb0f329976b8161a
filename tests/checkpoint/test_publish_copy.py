"""checkpoint() to another filesystem: copied in the background, from the published step."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import tierstore
from tests.support import killed_processes
from tests.support.faults import Fault, FaultyStorage
from tests.support.held import Held
from tests.support.published import (
    assert_holds_toy,
    assert_nothing_left,
    digests,
    inodes,
    names_in,
    pages_of,
    run_pages,
)
from tests.support.toy import RANK, Toy, resumed, verified
from tierstore.storage.select import open_storage
from tierstore.threads import Threads
from tierstore.tools.inspect.verify import verify

SHARED_MEMORY = Path("/dev/shm")


class Elsewhere:
    """A toy run after two steps; its folder of checkpoints seems to be another filesystem.

    The copying waits for ``gate`` before each block that it reads.
    """

    def __init__(self, directory: Path, *, open_gate: bool = False) -> None:
        self.run = directory / "run"
        self.folder = directory / "checkpoints"
        self.gate = threading.Semaphore(1000 if open_gate else 0)
        self.waits = threading.Semaphore(0)
        self.watch: Callable[[str], object] = lambda operation: None
        self.storage = FaultyStorage(open_storage(self.run / RANK), on_operation=self._hold)
        self.toy = Toy(self.storage)
        self.store = self.toy.store
        self.toy.step()
        self.toy.step()
        self.separate()

    def separate(self) -> None:
        self.storage.disarm()
        self.storage.arm(Fault("error", "folder_link", probability=1.0, errno=errno.EXDEV))

    def let(self, blocks: int) -> None:
        """Let so many further blocks be copied."""
        for _ in range(blocks):
            self.gate.release()

    def until_it_waits(self) -> None:
        self.waits.acquire()

    def _hold(self, operation: str, name: str, when: str) -> None:
        if when == "before":
            self.watch(operation)
        if operation == "read" and ".copying-" in name and when == "before":
            self.waits.release()
            self.gate.acquire()


def test_training_continues_during_the_copy(tmp_path: Path) -> None:
    here = Elsewhere(tmp_path)
    publication = here.store.checkpoint(here.folder / "2")
    assert (publication.step, publication.bytes_copied) == (2, 0)
    assert publication.bytes_total == here.store.stats().state_bytes
    here.until_it_waits()
    for step in range(3, 8):
        here.toy.step()
        here.store.synchronize()
        assert here.store.committed.step == step
    assert not publication.done()
    assert not (here.folder / "2").exists()
    copied = [publication.bytes_copied]
    for _ in range(3):
        here.let(1)
        here.until_it_waits()
        copied.append(publication.bytes_copied)
    assert copied == sorted(set(copied))
    assert copied[0] == 0
    here.let(1000)
    publication.wait()
    assert publication.done()
    assert publication.bytes_copied == publication.bytes_total
    assert_holds_toy(here.folder / "2", 2)
    here.toy.step()
    here.toy.assert_at(8)
    here.store.close()
    assert_nothing_left(here.run, here.folder, ["2"])
    resumed(here.run, 8).store.close()


def test_a_copy_equals_a_checkpoint_of_links(tmp_path: Path) -> None:
    """Only the name in the marker and the inodes differ."""
    here = Elsewhere(tmp_path, open_gate=True)
    here.store.checkpoint(here.folder / "copied").wait()
    here.storage.disarm()
    here.store.checkpoint(here.folder / "linked")
    verified(here.store)
    copied, linked = digests(here.folder / "copied"), digests(here.folder / "linked")
    assert copied.pop("tierstore.json") != linked.pop("tierstore.json")
    assert copied == linked
    pages = pages_of(here.folder / "copied")
    assert not inodes(pages) & inodes(run_pages(here.run))
    assert all(page.stat().st_nlink == 1 for page in pages)
    here.store.close()


def test_a_copy_to_shared_memory(tmp_path: Path) -> None:
    """Shared memory is another filesystem than the disk."""
    if not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not a filesystem of its own")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="tierstore-test-") as other:
        toy = Toy(tmp_path / "run")
        for step in (1, 2, 3):
            toy.step()
            toy.store.checkpoint(Path(other) / str(step), keep_last=2)
        toy.step()
        toy.store.close()
        assert_holds_toy(Path(other) / "2", 2)
        assert_holds_toy(Path(other) / "3", 3)
        assert_nothing_left(tmp_path / "run", Path(other), ["2", "3"])
        fresh = Toy(tmp_path / "fresh")
        assert fresh.store.restore(checkpoint=Path(other) / "3") == 3
        fresh.assert_at(3)
        fresh.store.close()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_filesystems_without_links(number: int, tmp_path: Path) -> None:
    """The pages cannot be linked meanwhile, so checkpoint() returns after the copy."""
    here = Elsewhere(tmp_path)
    here.storage.disarm()
    for operation in ("link", "folder_link"):
        here.storage.arm(Fault("error", operation, probability=1.0, errno=number))  # type: ignore[arg-type]
    for step in (2, 3, 4):
        publication = here.store.checkpoint(here.folder / str(step), keep_last=2)
        assert publication.done()
        assert publication.bytes_copied == publication.bytes_total
        here.toy.step()
    here.toy.assert_at(5)
    here.store.close()
    for step in (3, 4):
        assert_holds_toy(here.folder / str(step), step)
    assert_nothing_left(here.run, here.folder, ["3", "4"])
    resumed(here.run, 5).store.close()


@pytest.mark.parametrize("operation", ["link", "folder_link"])
def test_a_file_with_the_maximal_number_of_links(operation: str, tmp_path: Path) -> None:
    """The second page fails; no link to the first page is left."""
    watched = Elsewhere(tmp_path, open_gate=True)
    if operation == "folder_link":
        watched.storage.disarm()
    watched.store.synchronize()
    watched.storage.arm(Fault("error", operation, call=2, errno=errno.EMLINK))  # type: ignore[arg-type]
    publication = watched.store.checkpoint(watched.folder / "2")
    publication.wait()
    assert publication.bytes_copied == publication.bytes_total
    assert_holds_toy(watched.folder / "2", 2)
    assert_nothing_left(watched.run, watched.folder, ["2"])
    watched.store.close()


@pytest.mark.parametrize("ending", ["close", "with", "next"])
def test_close_and_the_next_checkpoint_wait_for_the_copy(ending: str, tmp_path: Path) -> None:
    """By close(), at the end of a with block, and by the next checkpoint."""
    here = Elsewhere(tmp_path)
    publication = here.store.checkpoint(here.folder / "2")
    here.until_it_waits()
    here.toy.step()
    # Once the main thread is on its way, nothing else lets the copying go on.
    threading.Thread(target=here.let, args=(1000,)).start()
    if ending == "close":
        here.store.close()
    elif ending == "with":
        with here.store:
            pass
    else:
        here.store.checkpoint(here.folder / "3").wait()
    assert publication.done()
    publication.wait()
    here.store.close()
    assert_holds_toy(here.folder / "2", 2)
    published = ["2", "3"] if ending == "next" else ["2"]
    assert_nothing_left(here.run, here.folder, published)
    resumed(here.run, 3).store.close()


def test_restore_waits_for_the_copy(tmp_path: Path) -> None:
    """Recovery would remove the temporary links of the pages to copy."""
    here = Elsewhere(tmp_path)
    publication = here.store.checkpoint(here.folder / "2")
    here.until_it_waits()
    with pytest.raises(tierstore.SweepError), here.store.pages.sweep() as pages:
        next(pages)
    threading.Thread(target=here.let, args=(1000,)).start()
    assert here.store.restore() == 2
    assert publication.done()
    here.toy.assert_at(2)
    here.store.close()
    assert_holds_toy(here.folder / "2", 2)


FAILURES = [
    ("folder_append", errno.ENOSPC),
    ("folder_flush", errno.EIO),
    ("folder_put", errno.ENOSPC),
    ("folder_sync", errno.EIO),
    ("folder_rename", errno.EIO),
    ("read", errno.EIO),
    ("unlink", errno.EIO),
]


def await_it(here: Elsewhere, publication: tierstore.Publication, ending: str) -> None:
    if ending == "close":
        here.store.close()
    elif ending == "next":
        here.store.checkpoint(here.folder / "3")
    else:
        publication.wait()


@pytest.mark.quick(8)
@pytest.mark.parametrize("ending", ["close", "next", "wait"])
@pytest.mark.parametrize(("operation", "number"), FAILURES)
def test_a_failure_is_reported_once_to_each_caller(
    operation: str, number: int, ending: str, tmp_path: Path
) -> None:
    here = Elsewhere(tmp_path)
    publication = here.store.checkpoint(here.folder / "2")
    here.until_it_waits()
    fault = Fault("error", operation, probability=1.0, errno=number)  # type: ignore[arg-type]
    here.storage.arm(fault)
    here.let(1000)
    with pytest.raises(tierstore.StorageError) as caught:
        await_it(here, publication, ending)
    assert caught.value.errno == number
    assert publication.done()
    here.separate()
    assert names_in(here.folder) == []
    if ending != "close":
        if ending == "wait":  # Told once to who waited, and to the next call for itself.
            with pytest.raises(tierstore.StorageError):
                here.store.checkpoint(here.folder / "3")
        here.toy.step()
        here.store.checkpoint(here.folder / "3").wait()
        here.store.close()
        assert_holds_toy(here.folder / "3", 3)
        resumed(here.run, 3).store.close()
    else:
        resumed(here.run, 2).store.close()


def test_a_failure_does_not_hide_the_exception_of_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = Elsewhere(tmp_path)
    here.storage.arm(Fault("error", "folder_flush", call=2, errno=errno.ENOSPC))

    def train() -> None:
        with here.store:
            here.store.checkpoint(here.folder / "2")
            here.let(1000)
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train()
    assert "checkpoints/2 was not published: folder_flush failed" in caplog.text
    assert_nothing_left(here.run, here.folder)
    resumed(here.run, 2).store.close()


def started(monkeypatch: pytest.MonkeyPatch, start: Callable[[Callable[[], None]], None]) -> None:
    """Replace Thread.start() of the copying thread by ``start``, which gets the original."""
    real = threading.Thread.start

    def replaced(thread: threading.Thread) -> None:
        if thread.name.startswith("tierstore-publish"):
            start(lambda: real(thread))
        else:
            real(thread)

    monkeypatch.setattr(threading.Thread, "start", replaced)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_a_copy_whose_thread_does_not_start(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Elsewhere(tmp_path, open_gate=True)

    def start(really: Callable[[], None]) -> None:
        raise error

    with monkeypatch.context() as patch:
        started(patch, start)
        with pytest.raises(type(error)):
            here.store.checkpoint(here.folder / "2")
    assert_nothing_left(here.run, here.folder)
    here.toy.step()
    here.store.checkpoint(here.folder / "3").wait()
    here.store.close()
    assert_holds_toy(here.folder / "3", 3)


@pytest.mark.parametrize("given_up", [True, False])
def test_an_interrupt_as_the_copy_begins(
    given_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the copy never begins, or it continues and close() waits for it."""
    here = Elsewhere(tmp_path)
    threads: list[Callable[[], object]] = []

    submit = Threads.submit

    def interrupted(pool: Threads, act: Callable[..., object], *arguments: object) -> object:
        really = partial(submit, pool, act, *arguments)
        if "finish_alone" not in act.__qualname__:
            return really()
        if given_up:  # The thread takes its time.
            threads.append(really)
        else:
            really()
            here.until_it_waits()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            here.store.checkpoint(here.folder / "2")
    for really in threads:
        really()
    here.toy.step()
    here.let(1000)
    here.store.close()
    assert_nothing_left(here.run, here.folder, [] if given_up else ["2"])
    if not given_up:
        assert_holds_toy(here.folder / "2", 2)
    resumed(here.run, 3).store.close()


def test_an_interrupt_before_any_operation(tmp_path: Path) -> None:
    """Before the copy begins, nothing is left of the checkpoint, in its folder or in the run."""
    done: list[str] = []
    here = Elsewhere(tmp_path / "all", open_gate=True)
    here.store.synchronize()
    here.watch = done.append
    here.store.checkpoint(here.folder / "2").wait()
    here.store.close()
    begun = done.index("read")
    assert "link" in done[:begun]
    for number in range(begun):
        here = Elsewhere(tmp_path / str(number), open_gate=True)
        here.store.synchronize()
        left = [number]

        def interrupt(operation: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

        here.watch = interrupt
        with pytest.raises(KeyboardInterrupt):
            here.store.checkpoint(here.folder / "2")
        assert_nothing_left(here.run, here.folder)
        here.store.close()


def test_a_failure_does_not_disturb_training(tmp_path: Path) -> None:
    """No temporary link is left in the run."""
    here = Elsewhere(tmp_path)
    here.storage.arm(Fault("error", "folder_flush", call=2, errno=errno.ENOSPC))
    here.let(1000)
    publication = here.store.checkpoint(here.folder / "2")
    with pytest.raises(tierstore.StorageError, match="folder_flush"):
        publication.wait()
    assert_nothing_left(here.run, here.folder)
    for _ in range(3):
        here.toy.step()
    here.toy.assert_at(5)
    with pytest.raises(tierstore.StorageError, match="folder_flush"):
        here.store.close()
    assert_nothing_left(here.run, here.folder)
    resumed(here.run, 5).store.close()


@pytest.mark.parametrize("operation", ["link", "create", "folder_append", "folder_put"])
def test_a_failure_before_the_copy_begins(operation: str, tmp_path: Path) -> None:
    here = Elsewhere(tmp_path, open_gate=True)
    fault = Fault("error", operation, call=2, errno=errno.ENOSPC)  # type: ignore[arg-type]
    here.store.synchronize()
    here.storage.arm(fault)
    with pytest.raises(tierstore.StorageError) as caught:
        here.store.checkpoint(here.folder / "2")
    assert caught.value.errno == errno.ENOSPC
    assert_nothing_left(here.run, here.folder)
    here.separate()
    here.toy.step()
    here.store.checkpoint(here.folder / "3").wait()
    here.store.close()
    assert_holds_toy(here.folder / "3", 3)


def test_a_flipped_bit_is_found_during_the_copy(tmp_path: Path) -> None:
    """The checksums of the commit show it."""
    here = Elsewhere(tmp_path, open_gate=True)
    here.storage.arm(Fault("flipped_bit", "read", call=2))
    publication = here.store.checkpoint(here.folder / "2")
    with pytest.raises(tierstore.CorruptionError, match=r"page-00000\d\.b.*nothing was published"):
        publication.wait()
    assert_nothing_left(here.run, here.folder)
    with pytest.raises(tierstore.CorruptionError):
        here.store.close()


def test_a_page_damaged_on_the_disk_is_not_copied(tmp_path: Path) -> None:
    here = Elsewhere(tmp_path, open_gate=True)
    here.store.synchronize()
    page = run_pages(here.run)[1]
    assert page.name == "page-000000.b"
    with page.open("r+b") as file:
        file.seek(600)
        byte = file.read(1)
        file.seek(600)
        file.write(bytes([byte[0] ^ 16]))
    publication = here.store.checkpoint(here.folder / "2")
    with pytest.raises(tierstore.CorruptionError, match=r"page-000000\.b"):
        publication.wait()
    assert names_in(here.folder) == []
    with pytest.raises(tierstore.CorruptionError):
        here.store.close()


def test_pages_to_copy_are_linked_within_the_run(tmp_path: Path) -> None:
    """The links keep the pages from being overwritten, and are removed afterwards."""
    here = Elsewhere(tmp_path)
    here.store.synchronize()
    before = inodes(run_pages(here.run))
    publication = here.store.checkpoint(here.folder / "2")
    held = list((here.run / RANK).glob("page-*.copying-*"))
    assert len(held) == here.store.stats().pages
    here.until_it_waits()
    for _ in range(2):
        here.toy.step()
    here.store.synchronize()
    assert inodes(held) <= before
    assert not inodes(held) & inodes(run_pages(here.run))
    here.let(1000)
    publication.wait()
    assert not list((here.run / RANK).glob("page-*.copying-*"))
    here.store.close()


def publish_and_die(directory: Path, blocks: int) -> None:
    """Kill this process during the copy, or after it."""
    copied = [0]

    def count(operation: str, name: str, when: str) -> None:
        if operation == "folder_append" and ".page-" in name and when == "after":
            copied[0] += 1
            if copied[0] == blocks:
                os.kill(os.getpid(), signal.SIGKILL)

    storage = FaultyStorage(open_storage(directory / "run" / RANK), on_operation=count)
    storage.arm(Fault("error", "folder_link", probability=1.0, errno=errno.EXDEV))
    toy = Toy(storage)
    for _ in range(2):
        toy.step()
    toy.store.checkpoint(directory / "checkpoints/2").wait()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_killed_during_the_copy(blocks: int, tmp_path: Path) -> None:
    child = killed_processes._processes.Process(target=publish_and_die, args=(tmp_path, blocks))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    whole = blocks == 100
    found = [name for name in names_in(tmp_path / "checkpoints") if not name.startswith(".")]
    assert found == (["2"] if whole else [])
    toy = resumed(tmp_path / "run", 2)
    assert not list((tmp_path / "run" / RANK).glob("page-*.copying-*"))
    toy.step()
    toy.store.checkpoint(tmp_path / "checkpoints/3")
    toy.store.close()
    assert_nothing_left(tmp_path / "run", tmp_path / "checkpoints", [*found, "3"])
    for name in found:
        assert verify(tmp_path / "checkpoints" / name).good


def test_without_a_thread_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Elsewhere(tmp_path, open_gate=True)
    start = threading.Thread.start

    def refuse_to_publish(thread: threading.Thread) -> None:
        if thread.name.startswith("tierstore-publish"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_publish)
        with pytest.raises(tierstore.ThreadError, match="ulimit -u"):
            elsewhere.store.checkpoint(elsewhere.folder / "refused")
    assert_nothing_left(elsewhere.run, elsewhere.folder)
    elsewhere.store.checkpoint(elsewhere.folder / "published")
    elsewhere.store.close()
    assert_holds_toy(elsewhere.folder / "published", 2)


def test_a_folder_that_is_moved_during_the_copy_gets_the_checkpoint(tmp_path: Path) -> None:
    here = Elsewhere(tmp_path)
    publication = here.store.checkpoint(here.folder / "2")
    here.until_it_waits()
    moved = here.folder.rename(tmp_path / "moved")
    (here.folder / "2").mkdir(parents=True)
    (here.folder / "2/kept").write_bytes(b"of another program")
    here.let(1000)
    publication.wait()
    here.store.close()
    assert_holds_toy(moved / "2", 2)
    assert_nothing_left(here.run, moved, ["2"])
    assert [path.name for path in here.folder.rglob("*")] == ["2", "kept"]


@pytest.mark.parametrize("fault", ["", "folder_make", "folder_append", "folder_flush", "read"])
def test_the_descriptor_of_the_folder_is_closed_at_the_end(fault: str, tmp_path: Path) -> None:
    here = Elsewhere(tmp_path, open_gate=True)

    def open_in_folder() -> list[str]:
        paths = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        found = [os.readlink(path) for path in paths if os.path.lexists(path)]
        return [path for path in found if path.startswith(str(here.folder))]

    if fault:
        here.storage.arm(Fault("error", fault, call=2 if fault == "folder_flush" else 1))
        with pytest.raises(tierstore.StorageError):
            here.store.checkpoint(here.folder / "2").wait()
        assert_nothing_left(here.run, here.folder, [])
    else:
        here.store.checkpoint(here.folder / "2").wait()
    verified(here.store)
    assert open_in_folder() == []
    with contextlib.suppress(tierstore.StorageError):  # A failed copy is raised again.
        here.store.close()


def test_a_refused_checkpoint_leaves_no_descriptor(tmp_path: Path) -> None:
    here = Elsewhere(tmp_path, open_gate=True)
    here.store.checkpoint(here.folder / "first")  # Starts the thread that verifies.
    verified(here.store)
    before = Held()
    errors = []  # Their tracebacks keep what is half made.
    for name in (here.run, here.folder / "rank-", tmp_path / "run" / RANK / "lock" / "below"):
        with pytest.raises(tierstore.CheckpointError) as caught:
            here.store.checkpoint(name)
        errors.append(caught)
        before.assert_nothing_new()
    here.store.close()


def test_an_error_of_closing_the_folder_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is published."""
    here = Elsewhere(tmp_path, open_gate=True)
    here.storage.arm(Fault("error", "folder_close", call=1))
    here.store.checkpoint(here.folder / "2").wait()
    assert_holds_toy(here.folder / "2", 2)
    assert "folder_close failed" in caplog.text
    here.store.close()
