"""checkpoint() on a failing disk: a typed error, nothing left, training continues."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tierstore
from tests.support import killed_processes
from tests.support.faults import Fault, FaultyStorage
from tests.support.published import assert_holds_toy, assert_nothing_left, names_in
from tests.support.toy import RANK, Toy, resumed, unchanged, verified
from tierstore.storage.select import open_storage
from tierstore.tools.inspect.verify import verify
from tierstore.units import format_bytes

Operation = tuple[str, int]


class Watched:
    """A toy run after three steps, two of them published, on a storage with injected faults."""

    def __init__(
        self, directory: Path, watch: Callable[[str, str], None] = lambda operation, name: None
    ) -> None:
        self.run = directory / "run"
        self.folder = directory / "checkpoints"
        self.storage = FaultyStorage(
            open_storage(self.run / RANK),
            on_operation=lambda operation, name, when: (
                when == "before"
                and threading.current_thread() is threading.main_thread()
                and self.watch(operation, name)
            ),
        )
        self.watch: Callable[[str, str], object] = watch
        self.toy = Toy(self.storage)
        for step in (1, 2):
            self.toy.step()
            self.toy.store.checkpoint(self.folder / str(step))
        self.toy.step()
        self.toy.store.synchronize()
        verified(self.toy.store)  # So that only the calls of a test use the storage.

    def operations(self, call: Callable[[], object]) -> list[Operation]:
        """Return what a call does to the storage: each operation, and the how manieth it is."""
        found: list[str] = []
        self.watch = lambda operation, name: found.append(operation)
        call()
        self.watch = lambda operation, name: None
        return [(operation, found[: i + 1].count(operation)) for i, operation in enumerate(found)]


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[Operation]:
    """The operations of the third checkpoint of a run, which removes the first."""
    watched = Watched(tmp_path_factory.mktemp("operations"))
    found = watched.operations(
        lambda: watched.toy.store.checkpoint(watched.folder / "3", keep_last=1)
    )
    watched.toy.store.close()
    return found


def test_the_recorded_operations_are_complete(operations: list[Operation]) -> None:
    """Else the tests below could pass without failing an operation."""
    names = [operation for operation, _ in operations]
    pages = 2
    assert names.count("folder_link") == names.count("create") == pages
    assert {"folder_make", "folder_put", "folder_append", "folder_flush"} < set(names)
    assert {"folder_sync", "folder_rename", "folder_sync_children", "folder_remove"} < set(names)
    published = names.index("folder_rename")
    assert published > max(i for i, name in enumerate(names) if name == "folder_put")
    assert published > names.index("folder_sync")


# One third of the operations in `make test`, all of them in `make test-all`.
THIRDS = [0, *(pytest.param(first, marks=pytest.mark.long) for first in (1, 2))]


@pytest.mark.parametrize("first", THIRDS)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(errno.ENOSPC, id="ENOSPC"),
        pytest.param(errno.EIO, id="EIO", marks=pytest.mark.long),
    ],
)
def test_any_operation_may_fail(
    number: int, first: int, operations: list[Operation], tmp_path: Path
) -> None:
    """After the checkpoint is published, only the removal of the one before can fail.

    A mark that cannot be read does not count, and is not an error. A checkpoint whose folder cannot
    be opened for the verification is not marked as whole.
    """
    published = operations.index(("folder_rename", 1)) + 1
    assert operations[published] == ("folder_sync_children", 1)
    listed = operations.index(("folder_children", 2))
    named = max(i for i, (name, _) in enumerate(operations) if name == "folder_put")
    assert {name for name, _ in operations[listed + 1 : named]} == {"folder_files", "folder_get"}
    assert operations[-1] == ("folder", 2)  # Of the verification.
    for index in range(first, len(operations), 3):
        operation, call = operations[index]
        fails = index <= published and not listed < index < named
        watched = Watched(tmp_path / str(index))
        store = watched.toy.store
        watched.storage.arm(Fault("error", operation, call=call, errno=number))
        if fails:
            with pytest.raises(tierstore.StorageError) as caught:
                store.checkpoint(watched.folder / "3", keep_last=1)
            assert caught.value.errno == number
            assert_nothing_left(watched.run, watched.folder, ["1", "2"])
            assert_holds_toy(watched.folder / "1", 1)
        else:
            store.checkpoint(watched.folder / "3", keep_last=1)
            assert_holds_toy(watched.folder / "3", 3)
        watched.storage.disarm()
        # As if nothing had been.
        watched.toy.step()
        store.checkpoint(watched.folder / "4", keep_last=1)
        watched.toy.step()
        watched.toy.assert_at(5)
        store.close()
        assert_holds_toy(watched.folder / "4", 4)
        before = "2" if fails or index == len(operations) - 1 else "3"
        assert_nothing_left(watched.run, watched.folder, [before, "4"])
        resumed(watched.run, 5).store.close()


@pytest.mark.parametrize("operation", ["folder_unlink", "folder_remove"])
def test_leftovers_of_a_failed_removal_are_removed_later(operation: str, tmp_path: Path) -> None:
    """The operation that failed first raises the error."""
    watched = Watched(tmp_path)
    store = watched.toy.store
    watched.storage.arm(Fault("error", "folder_sync", call=1, errno=errno.ENOSPC))
    watched.storage.arm(Fault("error", operation, probability=1.0, errno=errno.EIO))
    with pytest.raises(tierstore.StorageError, match="folder_sync") as caught:
        store.checkpoint(watched.folder / "3")
    assert caught.value.errno == errno.ENOSPC
    watched.storage.disarm()
    left = [name for name in names_in(watched.folder) if name not in ("1", "2")]
    assert len(left) == 1
    assert left[0].startswith(".3.tmp-")
    store.checkpoint(watched.folder / "again")
    assert_holds_toy(watched.folder / "again", 3)
    assert names_in(watched.folder) == ["1", "2", "again"]
    store.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT])
def test_other_refusals_of_the_filesystem(number: int, tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.storage.arm(Fault("error", "folder_make", call=1, errno=number))
    with pytest.raises(tierstore.StorageError) as caught:
        watched.toy.store.checkpoint(watched.folder / "3")
    assert caught.value.errno == number
    assert_nothing_left(watched.run, watched.folder, ["1", "2"])
    watched.toy.step()
    watched.toy.assert_at(4)
    watched.toy.store.close()


def raise_before(watched: Watched, number: int, error: BaseException) -> None:
    """Make the n-th operation from now on raise an exception that no storage raises."""
    left = [number]

    def count(operation: str, name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error

    watched.watch = count


@pytest.mark.parametrize("error", [MemoryError(), KeyError("step")])
def test_any_exception_of_a_removal_is_logged(
    error: Exception,
    operations: list[Operation],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched(tmp_path)
    raise_before(watched, operations.index(("folder_remove", 1)) + 1, error)
    watched.toy.store.checkpoint(watched.folder / "3", keep_last=1)
    assert f"older checkpoints beside 3 stay: {error!r}" in caplog.text
    assert_holds_toy(watched.folder / "3", 3)
    watched.toy.store.close()


@pytest.mark.parametrize("first", THIRDS)
def test_an_interrupt_at_any_operation(
    first: int, operations: list[Operation], tmp_path: Path
) -> None:
    """Ctrl-C leaves the new checkpoint once its name is durable, else the old one."""
    published = operations.index(("folder_sync_children", 1))
    for index in range(first, len(operations), 3):
        watched = Watched(tmp_path / str(index))
        store = watched.toy.store
        raise_before(watched, index + 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            store.checkpoint(watched.folder / "3", keep_last=1)
        found = [name for name in names_in(watched.folder) if not name.startswith(".")]
        assert found in ([["1", "2"]] if index <= published else [["1", "2", "3"], ["2", "3"]])
        for name in found:
            assert_holds_toy(watched.folder / name, int(name))
        watched.toy.step()
        store.checkpoint(watched.folder / "4", keep_last=1)
        watched.toy.assert_at(4)
        store.close()
        assert_nothing_left(watched.run, watched.folder, ["2", "4"])


@pytest.mark.parametrize("operation", ["flush", "put", "rename", "sync_directory"])
def test_a_commit_that_fails_is_not_published(operation: str, tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.toy.step()
    watched.storage.arm(Fault("error", operation, call=1))
    with pytest.raises(tierstore.StorageError):
        watched.toy.store.checkpoint(watched.folder / "4")
    watched.storage.disarm()
    assert names_in(watched.folder) == ["1", "2"]
    assert watched.toy.store.restore() == 3
    watched.toy.assert_at(3)
    watched.toy.step()
    watched.toy.store.checkpoint(watched.folder / "4")
    watched.toy.store.close()
    assert_holds_toy(watched.folder / "4", 4)
    assert_nothing_left(watched.run, watched.folder, ["1", "2", "4"])


def test_a_full_disk_shows_before_anything_is_linked(tmp_path: Path) -> None:
    """The space for the replaced pages is allocated first."""
    watched = Watched(tmp_path)
    watched.storage.arm(Fault("error", "create", call=2, errno=errno.ENOSPC))
    done: list[str] = []
    watched.watch = lambda operation, name: done.append(operation)
    with pytest.raises(tierstore.StorageError) as caught:
        watched.toy.store.checkpoint(watched.folder / "3")
    (note,) = caught.value.__notes__
    assert note.startswith(f"step {watched.toy.store.step} is committed and intact. The call needs")
    alone = {  # Files that no page file of the run, and no other checkpoint, has as well.
        name: sum(
            512 * path.stat().st_blocks
            for path in (watched.folder / name).iterdir()
            if path.stat().st_nlink == 1
        )
        for name in names_in(watched.folder)
    }
    for name, nbytes in alone.items():
        assert f"{watched.folder / name}: {format_bytes(nbytes)}" in note
    assert "folder_link" not in done
    assert not list((watched.run / RANK).glob("page-*.a.next"))
    watched.toy.store.close()


def test_an_interrupt_leaves_no_allocated_space(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    created: list[str] = []

    def interrupt(operation: str, name: str) -> None:
        if operation == "create":
            created.append(name)
            if len(created) == 2:
                raise KeyboardInterrupt

    watched.watch = interrupt
    with pytest.raises(KeyboardInterrupt):
        watched.toy.store.checkpoint(watched.folder / "3")
    assert len(created) == 2
    assert not list((watched.run / RANK).glob("page-*.a.next"))
    watched.toy.store.close()


# --------------------------------------------------------------------------------- crashes


def publish_and_die(directory: Path, step: int, number: int) -> None:
    """Do a step, publish it, and kill this process before the n-th operation."""
    left = [number]
    armed = []

    def count(operation: str, name: str, when: str) -> None:
        if armed and when == "before":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    storage = FaultyStorage(open_storage(directory / "run" / RANK), on_operation=count)
    toy = Toy(storage, resume=True)
    toy.store.restore()
    toy.step()
    toy.store.synchronize()
    armed.append(True)
    toy.store.checkpoint(directory / "checkpoints" / str(step), keep_last=1)
    os.kill(os.getpid(), signal.SIGKILL)


def crash_cuts(count: int) -> list[object]:
    """Return all cuts; five of six are marked long."""
    return [
        pytest.param(cut, marks=[] if cut % 6 == 1 else pytest.mark.long)
        for cut in range(1, count + 1)
    ]


@pytest.mark.quick(5)
@pytest.mark.parametrize("cut", crash_cuts(60))
def test_killed_at_any_operation(cut: int, tmp_path: Path) -> None:
    """All checkpoints are whole, and the next one removes the leftovers."""
    folder = tmp_path / "checkpoints"
    toy = Toy(tmp_path / "run")
    for step in (1, 2):
        toy.step()
        toy.store.checkpoint(folder / str(step))
    toy.store.close()
    child = killed_processes._processes.Process(target=publish_and_die, args=(tmp_path, 3, cut))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    found = [name for name in names_in(folder) if not name.startswith(".")]
    assert found in (["1", "2"], ["1", "2", "3"], ["2", "3"])
    for name in found:
        assert_holds_toy(folder / name, int(name))
    last_is_whole = verify(folder / found[-1]).marked_whole
    toy = resumed(tmp_path / "run", 3)
    toy.step()
    toy.store.checkpoint(folder / "4", keep_last=2)
    toy.store.close()
    kept = [found[-1], "4"] if last_is_whole else ["2", found[-1], "4"]
    assert_nothing_left(tmp_path / "run", folder, kept)
    assert_holds_toy(folder / "4", 4)


def test_a_refusal_leaves_the_run_unchanged(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with unchanged(tmp_path), pytest.raises(tierstore.CheckpointError):
        watched.toy.store.checkpoint(watched.folder / "1")
    watched.toy.store.close()
