"""Every fault of a disk raises a typed error and leaves the last commit intact."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import killed_processes, training
from tests.support.faults import Fault, FaultyStorage
from tests.support.isolated_process import result_apart
from tierstore.storage.base import Transfer
from tierstore.storage.select import open_storage
from tierstore.units import Extent

BEFORE = 3  # Steps committed before a fault strikes.


class Run:
    """Training on a storage with faults, to be checked after it was closed."""

    def __init__(
        self, directory: Path, engine: str = "auto", storage: type[FaultyStorage] = FaultyStorage
    ) -> None:
        self.storage = storage(open_storage(directory / "rank-00000", engine), seed=3)
        self.store = tierstore.TierStore(self.storage, page_bytes=10000, buffers=3, resume=True)
        self.parameters = training.make_parameters(torch.bfloat16)
        self.optimizer = muon.Muon(training.make_groups(self.parameters), store=self.store)
        self.scheduler = training.make_scheduler(self.optimizer)
        self.position = {"step": 0}
        self.store.register(scheduler=self.scheduler, position=self.position)
        self.start = self.optimizer.restore()

    def train(self, steps: int) -> None:
        """Train for some steps, and synchronize after each."""

        def commit(step: int) -> None:
            self.position["step"] = step
            self.store.commit()
            self.store.synchronize()

        training.train(
            self.optimizer,
            self.parameters,
            range(self.store.step + 1, self.store.step + 1 + steps),
            scheduler=self.scheduler,
            after_step=commit,
        )


def check_last_commit(directory: Path, scratch: Path, steps: set[int]) -> None:
    step, state, position = killed_processes.look(directory, scratch)
    assert step in steps
    training.assert_identical(state, killed_processes.state_after((0,) * step))
    assert position["step"] == step


FAULTS = [
    *(Fault("error", "read", call=n, errno=errno.EIO) for n in (1, 2, 9)),
    *(Fault("short", "read", call=n) for n in (1, 7)),
    *(Fault("flipped_bit", "read", call=n) for n in (1, 2, 9)),
    *(Fault("error", "write", call=n, errno=errno.ENOSPC) for n in (1, 2, 9)),
    Fault("error", "write", call=3, errno=errno.EINTR),
    *(Fault("short", "write", call=n, errno=errno.EFBIG) for n in (1, 9)),
    Fault("error", "flush", call=1, errno=errno.EIO),
    Fault("error", "put", call=1, errno=errno.ENOSPC),
    Fault("error", "rename", call=1, errno=errno.EIO),
    *(Fault("error", "sync_directory", call=n, errno=errno.EIO) for n in (1,)),
    Fault("error", "unlink", call=1, errno=errno.EROFS),
    Fault("error", "list", call=1, errno=errno.EIO),
]


@pytest.mark.quick(6)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.operation}-{f.call}")
@pytest.mark.parametrize("engine", ["io_uring", "libaio", "aiofiles"])
def test_fault_in_a_step(fault: Fault, engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", engine)
    run.train(BEFORE)
    run.storage.arm(fault)
    with pytest.raises((tierstore.StorageError, tierstore.CorruptionError)) as caught:
        run.train(1)
    if isinstance(caught.value, tierstore.StorageError):
        assert caught.value.errno == fault.errno
        assert str(tmp_path) in str(caught.value)
    run.storage.disarm()
    # A fault after the manifest is durable comes too late to undo the commit. One of the
    # directory leaves open whether it is: then either is right.
    late = fault.operation in ("unlink", "list", "sync_directory")
    if fault.operation != "read":
        with pytest.raises(tierstore.StoreFailedError, match="restore"):
            run.optimizer.step()
    run.store.close()
    steps = {BEFORE, BEFORE + 1} if late else {BEFORE}
    check_last_commit(tmp_path / "run", tmp_path / "copy", steps)


@pytest.mark.quick(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.operation}-{f.call}")
def test_restore_after_a_fault(fault: Fault, tmp_path: Path) -> None:
    """The same store goes back and continues as if nothing happened."""
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.storage.arm(fault)
    with pytest.raises(tierstore.TierstoreError):
        run.train(1)
    run.storage.disarm()
    step = run.optimizer.restore()
    assert step in (BEFORE, BEFORE + 1)
    run.train(6 - step)
    run.store.close()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {6})


def test_a_read_that_fails_before_any_page_was_stepped_can_be_retried(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.storage.arm(Fault("error", "read", call=1))
    with pytest.raises(tierstore.StorageError):
        run.train(1)
    assert run.store.step == BEFORE
    run.train(2)
    run.store.close()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE + 2})


@pytest.mark.parametrize("kind", ["lost", "misdirected"])
def test_a_misdirected_write_is_detected_when_the_page_is_read(kind: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.storage.arm(Fault(kind, "write", call=2))
    run.train(1)  # The disk reported success.
    # The second page of a sweep: a page of AdamW comes before it.
    with pytest.raises(tierstore.CorruptionError, match=r"page-000000\.[ab]"):
        run.train(1)
    run.store.close()


def test_a_page_of_an_older_step_is_detected(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    rank = tmp_path / "run" / "rank-00000"
    old = {path: path.read_bytes() for path in rank.glob("page-000002.*")}
    run.train(2)
    run.store.close()
    for path, content in old.items():
        path.write_bytes(content)
    with pytest.raises(tierstore.CorruptionError, match="page-000002"):
        Run(tmp_path / "run")


@pytest.mark.parametrize("position", ["data", "framing", "padding"])
def test_every_flipped_bit_on_disk_is_detected(position: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.store.close()
    offset = {"data": 600, "framing": 3, "padding": -1}[position]
    for path in (tmp_path / "run" / "rank-00000").glob("page-*"):
        content = bytearray(path.read_bytes())
        content[offset] ^= 16
        path.write_bytes(content)
    with pytest.raises(tierstore.CorruptionError, match="page-"):
        Run(tmp_path / "run").train(1)


@pytest.mark.parametrize("damage", ["has", "is missing"])
def test_truncated_and_missing_files_are_detected(damage: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.store.close()
    for path in (tmp_path / "run" / "rank-00000").glob("page-000003.*"):
        if damage == "has":
            os.truncate(path, path.stat().st_size - 4096)
        else:
            path.unlink()
    with pytest.raises(tierstore.CorruptionError, match=rf"page-000003\.[ab] {damage}"):
        Run(tmp_path / "run")


def test_a_damaged_manifest_falls_back_to_the_commit_before(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.store.close()
    path = tmp_path / "run" / "rank-00000" / f"commit-{BEFORE:010d}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE - 1})


@pytest.mark.quick(3)
@pytest.mark.parametrize("error", [RuntimeError("model bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("page", [0, 3, -1])
def test_an_exception_in_mid_sweep(error: BaseException, page: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    training.set_gradients(run.parameters, BEFORE + 1)

    def sweep() -> None:
        with run.store.pages.sweep() as pages:
            for number, _ in enumerate(pages):
                if number == page:
                    raise error
            raise error

    with pytest.raises(type(error)):
        sweep()
    with pytest.raises(tierstore.StoreFailedError):
        run.store.commit()
    assert run.optimizer.restore() == BEFORE
    run.train(1)
    run.store.close()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE + 1})


def test_leaving_a_sweep_early_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    training.set_gradients(run.parameters, 1)
    with (
        pytest.raises(RuntimeError, match="before its last page"),
        run.store.pages.sweep() as pages,
    ):
        next(pages)
    run.store.close()


def test_ctrl_c_while_a_read_hangs(tmp_path: Path) -> None:
    """SIGINT while the sweep waits for a read that hangs."""
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    release = threading.Event()
    run.storage.arm(Fault("delayed", "read", call=4, release=release))
    released = threading.Timer(30, release.set)  # If the signal never arrives.
    released.start()

    def interrupt(operation: str, name: str, when: str) -> None:
        if operation == "read" and when == "before":
            reads.append(name)
            if len(reads) == 4:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                threading.Timer(0.5, release.set).start()

    reads: list[str] = []
    run.storage._on_operation = interrupt
    with pytest.raises(KeyboardInterrupt):
        run.train(1)
    released.cancel()
    run.storage._on_operation = None
    run.storage.disarm()
    run.store.close()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE})


class InterruptedStorage(FaultyStorage):
    """Raises KeyboardInterrupt just after the n-th transfer was started."""

    interrupt_at = 0

    def _interrupt(self) -> None:
        self.interrupt_at -= 1
        if self.interrupt_at == 0:
            raise KeyboardInterrupt

    def read(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        transfer = super().read(name, extent, buffer)
        self._interrupt()
        return transfer

    def write(self, name: str, extent: Extent, buffer: memoryview) -> Transfer:
        transfer = super().write(name, extent, buffer)
        self._interrupt()
        return transfer


@pytest.mark.quick(2)
@pytest.mark.parametrize("at", [1, 2, 3, 4, 7, 12])
def test_ctrl_c_between_a_transfer_and_its_record(at: int, tmp_path: Path) -> None:
    """The transfer continues, and its buffer must not be used until it has ended."""
    run = Run(tmp_path / "run", storage=InterruptedStorage)
    run.train(BEFORE)
    release = threading.Event()
    for operation in ("read", "write"):
        run.storage.arm(Fault("delayed", operation, probability=1, release=release))
    run.storage.interrupt_at = at  # type: ignore[attr-defined]
    timer = threading.Timer(0.2, release.set)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run.train(1)
    with pytest.raises(tierstore.StoreFailedError):
        run.optimizer.step()
    assert run.optimizer.restore() == BEFORE
    assert release.is_set()  # The transfer in flight was waited for.
    run.storage.disarm()
    run.train(2)
    run.store.close()
    timer.join()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE + 2})


def _limited(directory: Path, engine: str) -> int | None:
    run = Run(directory, engine)
    run.train(BEFORE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    with pytest.raises(tierstore.StorageError) as caught:
        run.train(1)
    run.store.close()
    return caught.value.errno


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "aiofiles"])
def test_a_real_file_size_limit(engine: str, tmp_path: Path) -> None:
    """Pages are larger than the file size limit: the kernel writes a part of them."""
    assert result_apart(_limited, tmp_path / "run", engine) == errno.EFBIG
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE})


@pytest.mark.parametrize("number", [1, 2, 11])
def test_a_full_disk_is_found_before_the_first_step(number: int, tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path / "rank-00000"))
    storage.arm(Fault("error", "create", call=number, errno=errno.ENOSPC))
    store = tierstore.TierStore(storage, page_bytes=10000)
    parameters = training.make_parameters()
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    training.set_gradients(parameters, 1)
    with pytest.raises(tierstore.StorageError) as caught:
        optimizer.step()
    assert "free that much" in caught.value.__notes__[0]
    assert not list((tmp_path / "rank-00000").glob("page-*"))
    # With free space, the same store continues.
    training.train(optimizer, parameters, range(1, 3))
    store.close()


def test_writes_that_end_out_of_order(tmp_path: Path) -> None:
    """The first write of a step ends last; buffers of later writes are used before."""
    release = threading.Event()

    def watch(operation: str, name: str, when: str) -> None:
        if operation == "write":
            events.append((name.partition(".")[0], when))
            if len([event for event in events if event[1] == "before"]) == 3:
                release.set()

    events: list[tuple[str, str]] = []
    run = Run(tmp_path / "run")
    run.train(BEFORE)
    run.storage._on_operation = watch
    run.storage.arm(Fault("delayed", "write", call=1, release=release))
    run.train(1)
    first, _, third = [name for name, when in events if when == "before"][:3]
    assert events.index((first, "after")) > events.index((third, "before"))
    run.store.close()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {BEFORE + 1})


def test_errors_of_the_disk_by_chance(tmp_path: Path) -> None:
    """After any random fault, restoring and continuing gives the same result."""
    run = Run(tmp_path / "run")
    faults: list[Callable[[], Fault]] = [
        lambda: Fault("error", "read", probability=0.02),
        lambda: Fault("short", "write", probability=0.02, errno=errno.ENOSPC),
        lambda: Fault("flipped_bit", "read", probability=0.01),
        lambda: Fault("error", "flush", probability=0.1),
        lambda: Fault("error", "put", probability=0.1),
    ]
    failures = 0
    run.train(1)  # A commit to go back to.
    while run.store.step < 12 or run.store.committed.step < 12:
        for make in faults:
            run.storage.arm(make())
        try:
            run.train(12 - run.store.step)
        except tierstore.TierstoreError:
            failures += 1
            run.storage.disarm()
            run.optimizer.restore()
    assert failures > 3
    run.storage.disarm()
    run.store.close()
    check_last_commit(tmp_path / "run", tmp_path / "copy", {12})
