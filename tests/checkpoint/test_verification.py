"""Published checkpoints are read in the background: what verification finds, and its end."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tierstore
from tests.support import kernel
from tests.support.faults import Fault, FaultyStorage
from tests.support.held import Held
from tests.support.isolated_process import result_apart
from tests.support.originals import flip
from tests.support.published import ROOT, assert_holds_toy, names_in, pages_of
from tests.support.published_by_toy import (
    damage_first_page,
    faulty_toy,
    marked_ones,
    publish,
    publish_steps,
    step_durably,
    whole_ones,
)
from tests.support.thread_ranks import ThreadJob
from tests.support.toy import RANK, Toy, verified
from tierstore.checkpoint.verification import Verifier
from tierstore.errors import StorageError
from tierstore.ranks.peers import Ranks
from tierstore.storage.folder import LocalFolder
from tierstore.storage.select import open_storage

# ---------------------------------------------------------------- what verification finds

CALLS: dict[str, Callable[[Toy, Path], object]] = {
    "step": lambda toy, folder: toy.step(),
    "commit": lambda toy, folder: toy.store.commit(),
    "synchronize": lambda toy, folder: toy.store.synchronize(),
    "checkpoint": lambda toy, folder: toy.store.checkpoint(folder / "b"),
    "close": lambda toy, folder: toy.store.close(),
}


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def one_bit(path: Path) -> None:
    flip(path, -1)


@contextlib.contextmanager
def damaged_before_it_is_read(
    directory: Path, name: str, damage: Callable[[Path], None]
) -> Iterator[tuple[Toy, Path]]:
    """A run with a whole checkpoint "a", and "b" with damage in a file."""
    folder = directory / "folder"
    begun = []

    def watch(operation: str, file: str, when: str) -> None:
        if operation == "folder_get" and (folder / "b").exists() and not begun:
            begun.append(damage(folder / "b" / name))

    with faulty_toy(directory / "run", on_operation=watch) as (toy, _):
        publish_steps(toy, folder, "a", "b")
        verified(toy.store)
        yield toy, folder


@pytest.mark.parametrize(
    "name", ["unpaged", ".metadata", "tierstore.json", "rank-00000.commit", "rank-00000.layout"]
)
def test_damage_in_a_file_that_the_run_does_not_have_leaves_the_run_alone(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with damaged_before_it_is_read(tmp_path, name, one_bit) as (toy, folder):
        assert f"the checkpoint {folder}/b is damaged, but the run is not" in caplog.text
        assert f"{folder}/b/{name}" in caplog.text
        publish_steps(toy, folder, "c", keep_last=1)
        toy.store.close()
    # The run does not know a checkpoint without its tierstore.json.
    assert names_in(folder) == (["a", "b", "c"] if name == "tierstore.json" else ["a", "c"])
    assert marked_ones(folder) == whole_ones(folder) == {"a", "c"}


@pytest.mark.parametrize("damage", [longer, truncated])
def test_a_page_file_of_another_length_is_damage(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    page = "rank-00000.page-000001"
    with (
        damaged_before_it_is_read(tmp_path, page, damage) as (toy, folder),
        pytest.raises(tierstore.CorruptionError, match=rf"b/{page}: "),
    ):
        toy.step()
    assert marked_ones(folder) == {"a"}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.ESTALE])
def test_an_error_that_says_nothing_of_the_data_leaves_the_run_alone(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    with faulty_toy(tmp_path / "run") as (toy, storage):
        storage.arm(Fault("error", "folder_read", call=1, errno=number))
        publish_steps(toy, folder, "a")
        verified(toy.store)
        publish_steps(toy, folder, "b")
        toy.store.close()
    assert marked_ones(folder) == {"b"}
    assert f"the checkpoint {folder}/a " in caplog.text


def test_damage_in_a_page_that_the_run_has_written_anew_leaves_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    stepped = threading.Event()

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "folder_read" and when == "before":
            stepped.wait()

    with faulty_toy(tmp_path / "run", on_operation=watch) as (toy, _):
        publish_steps(toy, folder, "a")
        step_durably(toy)
        step_durably(toy)
        one_bit(pages_of(folder / "a")[0])
        stepped.set()
        verified(toy.store)
        assert f"the checkpoint {folder}/a is damaged, but the run is not" in caplog.text
        publish_steps(toy, folder, "b")
        toy.store.close()
    assert marked_ones(folder) == whole_ones(folder) == {"b"}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fault", ["read error", "damage"])
def test_the_next_call_raises_what_was_found(name: str, fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with faulty_toy(tmp_path / "run") as (toy, storage):
        toy.step()
        toy.store.synchronize()
        if fault == "damage":
            damage_first_page(tmp_path / "run", 1)
        else:
            storage.arm(Fault("error", "folder_read", call=2))
        publish(toy, folder / "a")
        verified(toy.store)
        kind = tierstore.CorruptionError if fault == "damage" else tierstore.StorageError
        with pytest.raises(kind) as caught:
            CALLS[name](toy, folder)
        assert name == "close" or toy.store._session.usability.failure is caught.value
        if fault == "damage":
            assert f"{folder}/a/rank-00000.page-000000: the " in str(caught.value)
            assert "are not those written in step 1" in str(caught.value)
            assert "restore(checkpoint=PATH)" in str(caught.value)
        else:
            assert caught.value.errno == errno.EIO
        if name != "close":
            with pytest.raises(tierstore.StoreFailedError):
                toy.step()
        toy.store.close()  # It has raised its error.
    assert names_in(folder) == ["a"]
    assert marked_ones(folder) == set()


def test_a_store_that_failed_by_it_goes_back_to_the_commit(tmp_path: Path) -> None:
    with faulty_toy(tmp_path / "run") as (toy, storage):
        storage.arm(Fault("error", "folder_read", call=1))
        publish_steps(toy, tmp_path / "folder", "a")
        verified(toy.store)
        with pytest.raises(tierstore.StorageError):
            toy.step()
        assert toy.store.restore() == 1
        publish_steps(toy, tmp_path / "folder", "b")
        toy.store.close()
    assert marked_ones(tmp_path / "folder") == {"b"}
    assert_holds_toy(tmp_path / "folder/b", 2)


def test_what_close_finds_is_raised_after_everything_was_released(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run")
    step_durably(toy)
    damage_first_page(tmp_path / "run", 1)
    publish(toy, tmp_path / "a")
    with pytest.raises(tierstore.CorruptionError):
        toy.store.close()
    again = Toy(tmp_path / "run", resume=True)
    assert again.store.restore() == 1
    again.store.close()


# --------------------------------------------------------------------- threads and memory


@contextlib.contextmanager
def telling_when_cancelled() -> Iterator[threading.Event]:
    """Set the event when a verification of a store that is opened here is cancelled."""
    cancelled, cancel = threading.Event(), Verifier.cancel

    def cancel_and_tell(verifier: Verifier) -> None:
        cancel(verifier)
        cancelled.set()

    with mock.patch.object(Verifier, "cancel", cancel_and_tell):
        yield cancelled


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_leaving_by_an_exception_stops_verification(
    error: type[BaseException], tmp_path: Path
) -> None:
    before = Held()
    begun = threading.Event()
    reads = []

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "folder_read" and when == "before":
            reads.append(name)
            begun.set()
            cancelled.wait()

    def publish_and_raise() -> None:
        with toy.store:
            publish_steps(toy, tmp_path / "folder", "a")
            begun.wait()
            raise error

    with telling_when_cancelled() as cancelled:
        toy = Toy(FaultyStorage(open_storage(tmp_path / "run" / RANK), on_operation=watch))
        with pytest.raises(error):
            publish_and_raise()
    assert len(reads) == 1
    assert len(pages_of(tmp_path / "folder/a")) > 1
    assert marked_ones(tmp_path / "folder") == set()
    before.assert_nothing_new()
    assert_holds_toy(tmp_path / "folder/a", 1)


def leave_without_close(directory: Path) -> None:
    """Fail while a checkpoint is read, which takes until it is given up."""
    begun = threading.Event()

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "folder_read" and when == "before":
            begun.set()
            cancelled.wait()

    with telling_when_cancelled() as cancelled:
        storage = FaultyStorage(open_storage(directory / "run" / RANK), on_operation=watch)
        toy = Toy(storage, commit_every=10)
        publish_steps(toy, directory / "folder", "a")
        begun.wait()
        toy.step()
        raise RuntimeError("the program failed")


@pytest.mark.long
def test_a_process_that_fails_without_close_does_not_wait_for_verification(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from tests.checkpoint.test_verification import leave_without_close\n"
        "leave_without_close(pathlib.Path(sys.argv[1]))"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "the program failed" in done.stderr
    assert marked_ones(tmp_path / "folder") == set()


def growth_by_verification(directory: Path) -> tuple[int, int]:
    """Return the bytes of all pages, and the growth of memory while a checkpoint is read."""
    torch.set_num_threads(1)
    groups = [
        [(f"table {n}", (2**21,), torch.float32, {"average": torch.float32}, False)]
        for n in range(4)
    ]
    toy = Toy(directory / "run", groups, buffers=2, host_memory="64MiB", page_bytes="16MiB")
    toy.step()
    publish(toy, directory / "first")
    verified(toy.store)
    kernel.reset_peak()
    before = kernel.anonymous_peak()
    publish(toy, directory / "second")
    verified(toy.store)
    grown = kernel.anonymous_peak() - before
    toy.store.close()
    return sum(page.stat().st_size for page in pages_of(directory / "second")), grown


def test_verification_takes_no_memory(tmp_path: Path) -> None:
    state_bytes, grown = result_apart(growth_by_verification, tmp_path)
    assert state_bytes >= 64 * 2**20
    assert grown <= 4 * 2**20


def test_a_copy_on_another_filesystem_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def link(*arguments: Any) -> None:
        raise StorageError("link", path="/disk/file", errno=errno.EXDEV)

    monkeypatch.setattr(LocalFolder, "link", link)
    flush = LocalFolder.flush

    def damage(self: LocalFolder, child: str, name: str) -> None:
        flush(self, child, name)
        if ".b.tmp-" in child and name == "rank-00000.page-000001":
            flip(Path(self.location) / child / name, -1)

    monkeypatch.setattr(LocalFolder, "flush", damage)
    folder = tmp_path / "folder"
    toy = Toy(tmp_path / "run")
    publish_steps(toy, folder, "a", "b")
    toy.store.close()
    assert f"the checkpoint {folder}/b is damaged, but the run is not" in caplog.text
    assert f"{folder}/b/rank-00000.page-000001: the " in caplog.text
    assert marked_ones(folder) == whole_ones(folder) == {"a"}


# ------------------------------------------------------------------------- several ranks


def test_ranks_wait_for_a_slow_disk_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the wait would be limited by the time that a rank may take to a collective."""
    monkeypatch.setattr("tierstore.checkpoint.checkpoints._VERIFYING_TURN_S", 0.01)
    meetings = [0]
    waited = threading.Event()

    def count(rank: int, meeting: str) -> None:
        meetings[0] += rank == 0 and slow.is_set()
        if meetings[0] > 50:
            waited.set()

    slow = threading.Event()

    def act(ranks: Ranks) -> set[str]:
        def watch(operation: str, name: str, when: str) -> None:
            if operation == "folder_read" and ranks.rank == 1:
                slow.set()
                waited.wait()

        name = f"rank-{ranks.rank:05}"
        storage = FaultyStorage(open_storage(tmp_path / "run" / name), on_operation=watch)
        toy = Toy(storage, process_group=ranks)
        publish_steps(toy, tmp_path / "folder", "a", "b")
        toy.store.close()
        return {path.name for path in (tmp_path / "folder").glob("*/*.whole")}

    marks = {"rank-00000.whole", "rank-00001.whole"}
    assert ThreadJob(2, count).run(act)[1] == marks
    assert waited.is_set()


def test_an_interrupt_of_a_rank_that_waits_is_told_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(ranks: Ranks) -> str:
        toy = Toy(tmp_path / "run", process_group=ranks)
        publish_steps(toy, tmp_path / "folder", "a")
        toy.step()
        if ranks.rank == 0:
            verifier = toy.store._checkpoints._verifier
            monkeypatch.setattr(verifier, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        try:
            publish(toy, tmp_path / "folder/b")
        except BaseException as error:
            toy.store.__exit__(type(error), error)
            return repr(error)
        return ""

    first, second = ThreadJob(2).run(act)
    assert first == "KeyboardInterrupt()"
    assert second.startswith("PeerFailed")
    assert "did not come" not in second
