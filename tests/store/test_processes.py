"""Other processes: competing openers, forked children, users without rights, exits."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tierstore
import tierstore.run.opening
from tests.support import killed_processes, training
from tests.support.held import Held
from tests.support.toy import RANK, Spec, Toy, open_muon, resumed

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
BIG: list[list[Spec]] = [[("big", (1 << 20,), torch.float32, {"momentum": torch.float32}, True)]]


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that is not forked from this one, and a connection to it."""
    ours, theirs = killed_processes._processes.Pipe()
    child = killed_processes._processes.Process(target=target, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()


def forked(work: Callable[[], Any]) -> int:
    """Do some work in a forked child; return its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ------------------------------------------------------------------------- two at a time


def hold(connection: Connection, directory: Path) -> None:
    """Keep a directory open until told to close it."""
    toy = Toy(directory, resume=True)
    toy.store.restore()
    toy.step()
    connection.send(os.getpid())
    connection.recv()
    toy.store.close()


def test_a_directory_in_use_is_refused_after_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tierstore.run.opening.LOCK_TIMEOUT_S == 30
    monkeypatch.setattr(tierstore.run.opening, "LOCK_TIMEOUT_S", 0.3)
    with process(hold, tmp_path) as (child, connection):
        pid = connection.recv()
        holder = f"process {pid} on host {socket.gethostname()}"
        every: list[dict[str, Any]] = [{"resume": True}, {"overwrite": True}, {}]
        for options in every:
            started = time.monotonic()
            with pytest.raises(tierstore.RunLockedError, match=re.escape(holder)) as caught:
                Toy(tmp_path, **options)
            assert time.monotonic() - started >= 0.3
            assert "waited 0.3 s" in str(caught.value)
        connection.send("let go")
        child.join()
        assert child.exitcode == 0
    resumed(tmp_path, 1).store.close()


def test_a_waiting_opener_succeeds_when_the_first_closes(tmp_path: Path) -> None:
    with process(hold, tmp_path) as (_, first):
        first.recv()
        with process(hold, tmp_path) as (_, second):
            assert not second.poll(0.3)  # The process waits; an error would have ended it.
            started = time.monotonic()
            first.send("let go")
            second.recv()
            assert time.monotonic() - started < 15  # Long before the timeout.
            second.send("let go")
            with pytest.raises(EOFError):
                second.recv()
    resumed(tmp_path, 2).store.close()


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}, {}])
def test_a_second_store_in_the_same_process_is_refused_at_once(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Under any name of the directory; the first goes on, and after its close() another opens."""
    toy = Toy(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    started = time.monotonic()
    for name in ("run", "link"):
        with pytest.raises(tierstore.RunLockedError, match=r"already: run store\.close\(\)"):
            Toy(tmp_path / name, **options)
    assert time.monotonic() - started < 15  # Long before the timeout.
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 1).store.close()


def test_a_forked_child_waits_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has no store open."""
    monkeypatch.setattr(tierstore.run.opening, "LOCK_TIMEOUT_S", 0.1)
    toy = Toy(tmp_path)

    def open_again() -> None:
        with pytest.raises(tierstore.RunLockedError, match=f"in use by process {os.getppid()} "):
            Toy(tmp_path, resume=True)

    assert forked(open_again) == 0
    toy.store.close()


def test_a_directory_that_another_process_took_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed store is not to blame."""
    toy = Toy(tmp_path)
    toy.step()
    toy.store.close()
    monkeypatch.setattr(tierstore.run.opening, "LOCK_TIMEOUT_S", 0.1)
    with process(hold, tmp_path) as (_, connection):
        pid = connection.recv()
        with pytest.raises(tierstore.RunLockedError, match=f"in use by process {pid} "):
            Toy(tmp_path, resume=True)
        connection.send("let go")


def test_two_stores_on_two_directories(tmp_path: Path) -> None:
    runs = [open_muon(tmp_path / name) for name in ("one", "other")]
    for step in range(1, 5):
        for _, optimizer, parameters in runs:
            training.train(optimizer, parameters, range(step, step + 1))
    one, other = (training.snapshot(optimizer, parameters) for _, optimizer, parameters in runs)
    for store, _, _ in runs:
        store.close()
    training.assert_identical(one, other)
    store, optimizer, parameters = open_muon(tmp_path / "other", resume=True)
    assert optimizer.restore() == 4
    training.assert_identical(training.snapshot(optimizer, parameters), one)
    store.close()


# -------------------------------------------------------------------------------- children


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_of_a_data_loader(start_method: str, tmp_path: Path) -> None:
    """Workers that are started while the store is in use do not disturb it."""
    toy = Toy(tmp_path, BIG, page_bytes="1MiB")
    toy.step()
    loader = DataLoader(
        TensorDataset(torch.arange(6.0)), num_workers=2, multiprocessing_context=start_method
    )
    seen = []
    for (batch,) in loader:
        seen += batch.tolist()
        toy.step()
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    toy.store.close()
    toy = Toy(tmp_path, BIG, resume=True)
    assert toy.store.restore() == 7
    toy.assert_at(7)
    toy.store.close()


def train_with_workers(connection: Connection, directory: Path) -> None:
    """Open a store, start workers, and train without end."""
    toy = Toy(directory)
    loader = DataLoader(
        TensorDataset(torch.arange(100.0)), num_workers=2, multiprocessing_context="fork"
    )
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        toy.step()
    toy.store.synchronize()
    connection.send([worker.pid for worker in batches._workers])  # type: ignore[attr-defined]
    signal.pause()


def test_workers_that_outlive_a_killed_trainer_hold_no_lock(tmp_path: Path) -> None:
    with process(train_with_workers, tmp_path) as (child, connection):
        workers = connection.recv()
        for pid in workers:  # Stopped, they cannot notice that their parent is gone.
            os.kill(pid, signal.SIGSTOP)
        try:
            child.kill()
            child.join()
            started = time.monotonic()
            resumed(tmp_path, 2).store.close()
            assert time.monotonic() - started < 15  # A held lock is waited for, for 30 s.
            for pid in workers:
                os.kill(pid, 0)  # The workers are alive.
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)


def test_a_forked_child_may_not_use_the_store(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()

    def try_everything() -> None:
        calls: list[Callable[[], Any]] = [toy.step, toy.store.pages.read_states, toy.store.commit]
        calls += [toy.store.synchronize, toy.store.restore]
        calls += [lambda: toy.store.pages.write_states({}), lambda: toy.attach([])]
        for call in calls:
            with pytest.raises(tierstore.StoreClosedError, match="fork of the process that opened"):
                call()
        toy.store.close()  # Does nothing: with-blocks also end in children.

    assert forked(try_everything) == 0
    toy.step()
    toy.store.close()
    resumed(tmp_path, 2).store.close()


@pytest.mark.parametrize("engine", ["io_uring", "aiofiles", "none"])
def test_a_forked_child_trains_with_a_store_of_its_own(engine: str, tmp_path: Path) -> None:
    """Also after it has dropped the inherited store, whose memory it does not have."""

    def train(name: str) -> Toy:
        if engine == "none":
            toy = Toy(None, BIG, buffers=None)
        else:
            toy = Toy(tmp_path / name, BIG, page_bytes="1MiB", engine=engine)
        toy.step()
        return toy

    inherited = [train("parent")]

    def train_in_the_child() -> None:
        own = train("child")
        inherited.clear()
        gc.collect()
        own.step()
        own.assert_at(2)
        own.store.close()

    assert forked(train_in_the_child) == 0
    (toy,) = inherited
    toy.step()
    toy.assert_at(2)
    toy.store.close()


def test_a_fork_in_mid_sweep_does_not_disturb_transfers(
    tmp_path: Path,
) -> None:
    """Reads and writes are in flight when the child is forked and when it ends."""
    toy = Toy(tmp_path, BIG, page_bytes="512KiB", buffers=4)
    toy.step()
    toy.parameters["big"].grad = torch.ones(1 << 20)
    with toy.store.pages.sweep() as pages:
        for number, page in enumerate(pages):
            if number % 5 == 1:
                assert forked(gc.collect) == 0
                assert forked(toy.store.close) == 0
            for shard in page.shards:
                for chunk in shard.chunks:
                    chunk.master.sub_(0.25)
                    chunk.states["momentum"].add_(1)
    assert number > 5
    toy.assert_at(2)
    toy.store.close()
    toy = Toy(tmp_path, BIG, resume=True)
    assert toy.store.restore() == 2
    toy.assert_at(2)
    toy.store.close()


def mapping_flags(address: int) -> list[str]:
    """The flags of this process's mapping at an address; see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_page_buffers_are_not_copied_into_children(tmp_path: Path) -> None:
    toy = Toy(tmp_path, BIG, page_bytes="1MiB")
    toy.parameters["big"].grad = torch.ones(1 << 20)
    with toy.store.pages.sweep() as pages:
        chunks = (page.shards[0].chunks[0] for page in pages)
        flags = [mapping_flags(chunk.states["momentum"].data_ptr()) for chunk in chunks]
    assert len(flags) > 5
    assert all("dc" in of_one for of_one in flags)  # Do not copy on fork.
    assert "dc" not in mapping_flags(toy.parameters["big"].data_ptr())
    toy.store.close()


# ------------------------------------------------------------------------------ few rights


def train_as_nobody(connection: Connection, directory: Path, engine: str) -> None:
    """Train as another user, if this process may change users, with little lockable memory."""
    torch.set_num_threads(1)
    if os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    os.chdir(directory)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    # The directories above may be closed to that user: this path does not lead through them.
    store, optimizer, parameters = open_muon(Path("/proc/self/cwd/run"), engine=engine)
    training.train(optimizer, parameters, range(1, 4), scheduler=training.make_scheduler(optimizer))
    connection.send((os.geteuid(), store.stats().engine))
    store.close()
    store, optimizer, parameters = open_muon(Path("/proc/self/cwd/run"), engine=engine, resume=True)
    step = optimizer.restore()
    snapshot = training.snapshot(optimizer, parameters)
    connection.send((step, {name: tensor.tolist() for name, tensor in snapshot.items()}))
    store.close()


@pytest.mark.parametrize("engine", ["auto", "io_uring", "aiofiles"])
def test_a_user_without_rights_trains_with_little_lockable_memory(
    engine: str, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    with process(train_as_nobody, tmp_path / "home", engine) as (child, connection):
        user, used = connection.recv()
        step, snapshot = connection.recv()
        child.join()
    assert user == (os.geteuid() or NOBODY)
    assert used == ("io_uring" if engine == "auto" else engine)
    assert step == 3
    expected = training.resident_run(3, torch.bfloat16, page_bytes=10000)
    assert snapshot == {name: tensor.tolist() for name, tensor in expected.items()}


def open_closed_directory(connection: Connection, directory: Path) -> None:
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        tierstore.TierStore(directory)
    except tierstore.RunDirectoryError as error:
        connection.send(str(error))


@pytest.mark.parametrize("name", ["closed", "closed/run", "closed/some/run"])
def test_a_directory_that_may_not_be_entered_is_refused(name: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "run").mkdir(parents=True)
    closed.chmod(0)
    try:
        with process(open_closed_directory, tmp_path / name) as (_, connection):
            message = connection.recv()
    finally:
        closed.chmod(0o700)
    assert str(tmp_path / name) in message
    assert "Permission denied" in message


# -------------------------------------------------------------------------- leaving things


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "aiofiles"])
def test_a_closed_store_leaves_no_thread_and_no_descriptor(engine: str, tmp_path: Path) -> None:
    def cycle(number: int) -> None:
        toy = Toy(tmp_path, resume=True, engine=engine)
        toy.store.restore()
        toy.step()
        toy.store.commit()
        toy.store.close()

    cycle(0)  # Allocates everything that is made once per process.
    before, all_threads = Held(), len(os.listdir("/proc/self/task"))
    for number in range(20):
        cycle(number)
    before.assert_nothing_new()
    # The native engine has its own threads. The last ones may still be ending.
    assert len(os.listdir("/proc/self/task")) < all_threads + 5
    assert len(list((tmp_path / RANK).glob("commit-*"))) == 2
    resumed(tmp_path, 21).store.close()


EXITS = {
    "a step under way": """
toy.parameters["first"].grad = torch.ones(5, 7, dtype=torch.bfloat16)
sweep = toy.store.pages.sweep()
pages = sweep.__enter__()
next(pages)
""",
    "a child that ends first": """
if os.fork() == 0:
    sys.exit()
ended = os.waitstatus_to_exitcode(os.wait()[1])
""",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("engine", "how"), [("io_uring", ""), ("aiofiles", ""), *(("auto", how) for how in EXITS)]
)
def test_an_interpreter_exits_without_close(engine: str, how: str, tmp_path: Path) -> None:
    program = f"""
import os, sys, torch
from tests.support.toy import Toy
ended = 0
toy = Toy({str(tmp_path)!r}, engine={engine!r})
for step in range(3):
    toy.step()
    toy.store.commit()
{EXITS.get(how, "")}
sys.exit(ended)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    toy = Toy(tmp_path, resume=True)
    step = toy.store.restore()
    assert step in (2, 3)  # The last commit was not waited for.
    toy.assert_at(step)
    toy.store.close()


# ------------------------------------------------------------------------- several ranks
