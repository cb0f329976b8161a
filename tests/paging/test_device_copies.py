"""Copies between host and device that end as late as possible give the same bits."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import muon
import tierstore
from tests.support import training
from tests.support.fake_cuda import fake_cuda
from tests.support.faults import Fault, FaultyStorage
from tierstore.paging.device import open_device
from tierstore.storage.memory import MemoryFiles, MemoryStorage

STEPS = 9
PAGE_BYTES = 10000

# Pages of this model take about 300 kB in all.
BUDGETS: dict[str, dict[str, Any]] = {
    "nvme": {"buffers": 2},
    "more buffers": {"buffers": 5},
    "some on the host": {"host_memory": 150_000},
    "host": {},
    "device": {"device_memory": "1MiB", "buffers": 2},
    "some of each": {"device_memory": 100_000, "host_memory": 150_000},
}
MOVABLE: dict[str, Any] = {"host_memory": "2MiB", "device_memory": "1MiB"}


class Trained:
    """A model in training, compared with a model whose state is in memory."""

    def __init__(self, directory: Any, **options: Any) -> None:
        self.store = tierstore.TierStore(directory, **{"page_bytes": PAGE_BYTES, **options})
        self.parameters = training.make_parameters(torch.bfloat16)
        self.optimizer = muon.Muon(training.make_groups(self.parameters), store=self.store)

    def step(self) -> None:
        step = self.store.step + 1
        training.train(self.optimizer, self.parameters, range(step, step + 1))

    def step_durably(self) -> None:
        self.step()
        self.store.synchronize()

    def assert_right(self) -> None:
        if not self.store.step:  # Before the first step the optimizer may have no states.
            return
        found = training.snapshot(self.optimizer, self.parameters)
        training.assert_identical(found, resident()[self.store.step])


@pytest.fixture(scope="module", autouse=True)
def _resident_on_the_cpu() -> None:
    resident()  # Before a test pretends that parameters are on a device.


@functools.cache
def resident() -> list[dict[str, torch.Tensor]]:
    """The expected state after each number of steps."""
    trained = Trained(None)
    moments = [training.snapshot(trained.optimizer, trained.parameters)]
    for _ in range(STEPS):
        trained.step()
        moments.append(training.snapshot(trained.optimizer, trained.parameters))
    return moments


@pytest.mark.quick(2)
@pytest.mark.parametrize("pace", [0, 0.3])
@pytest.mark.parametrize("commit_every", [1, 3, None])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_results_and_resumed_state_are_the_same_in_every_tier(
    budget: dict[str, Any], commit_every: int | None, pace: float, tmp_path: Path
) -> None:
    with fake_cuda(pace=pace):
        trained = Trained(tmp_path, commit_every=commit_every, **budget)
        for _ in range(STEPS):
            trained.step()
        trained.assert_right()
        assert trained.store.stats().device_bytes_peak > 0
        trained.store.close()
        for options in (budget, {"buffers": 2}):
            found = Trained(tmp_path, resume=True, **options)
            assert found.optimizer.restore() == STEPS
            found.assert_right()
            found.store.close()


@pytest.mark.parametrize("pace", [0, 0.3])
@pytest.mark.parametrize("options", [{"buffers": 2}, {}, {"directory": None}], ids=str)
def test_compute_on_the_host(options: dict[str, Any], pace: float, tmp_path: Path) -> None:
    with fake_cuda(pace=pace):
        options = {"directory": tmp_path, **options}
        trained = Trained(**options, step_on="cpu", free_gradients=True)
        for _ in range(STEPS):
            trained.step()
        trained.assert_right()
        assert trained.store.stats().device_bytes_peak == 0
        trained.store.close()


@pytest.mark.quick(2)
@pytest.mark.parametrize("pace", [0, 0.3])
@pytest.mark.parametrize("commit_every", [1, 3])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_parameters_on_the_host_are_stepped_on_a_gpu(
    budget: dict[str, Any], commit_every: int, pace: float, tmp_path: Path
) -> None:
    """They are whole when step() returns, and a restart has them."""
    budget = {"commit_every": commit_every, "step_on": "cuda", **budget}
    with fake_cuda(pace=pace, parameters="cpu") as cuda:
        trained = Trained(tmp_path, **budget)
        with pytest.raises(ValueError, match="'wide' is in pageable host memory"):
            trained.optimizer.restore()
        cuda.lock(*trained.parameters.values())
        grads: list[torch.Tensor] = []
        for step in range(1, STEPS + 1):
            training.set_gradients(trained.parameters, step)
            # Kept, so that no memory of the device has their addresses later.
            grads += [p.grad for p in trained.parameters.values() if p.grad is not None]
            cuda.lock(*grads)
            trained.optimizer.step()
            for name, parameter in trained.parameters.items():
                assert torch.equal(parameter, resident()[step][f"parameter {name}"])
        trained.assert_right()
        assert trained.store.stats().device_bytes_peak > 0
        trained.store.close()
        found = Trained(tmp_path, resume=True, **budget)
        cuda.lock(*found.parameters.values())
        assert found.optimizer.restore() == STEPS
        found.assert_right()
        found.store.close()


def test_parameters_on_the_host_are_whole_after_an_error() -> None:
    """Also those whose copies from the device were under way."""
    with fake_cuda(parameters="cpu") as cuda:
        parameters = training.make_parameters(torch.bfloat16)
        store = tierstore.TierStore(None, page_bytes=PAGE_BYTES, step_on="cuda")
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        cuda.lock(*parameters.values())
        training.set_gradients(parameters, 1)
        cuda.lock(*(p.grad for p in parameters.values() if p.grad is not None))
        optimizer.step()
        before = {name: parameter.clone() for name, parameter in parameters.items()}

        def leave_in_the_middle() -> None:
            with store.pages.sweep() as pages:
                next(pages), next(pages), next(pages)
                raise KeyError

        with pytest.raises(KeyError):
            leave_in_the_middle()
        assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
        store.close()


def test_a_gpu_is_found_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without an index is the current one: other threads have another."""
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    with tierstore.TierStore(None, step_on="cuda") as store:
        optimizer = muon.Muon([{"params": [weight], "algorithm": "adamw"}], store=store)
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="finds no GPU to step on"):
                optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    assert open_device(torch.device("cuda")).device == torch.device("cuda:3")
    assert open_device(torch.device("cuda:1")).device == torch.device("cuda:1")


@pytest.mark.quick(8)
@pytest.mark.parametrize("commit_every", [1, 3, None])
@pytest.mark.parametrize("start", ["device", "host", "nvme"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_moving_between_steps(
    start: str, tier: str, commit_every: int | None, tmp_path: Path
) -> None:
    with fake_cuda():
        trained = Trained(tmp_path, commit_every=commit_every, **MOVABLE)
        trained.store.move(start)
        trained.step()
        trained.step()
        trained.store.move(tier)
        trained.assert_right()
        trained.step()
        trained.store.move(start)
        trained.step()
        trained.assert_right()
        trained.store.close()


@pytest.mark.parametrize("tier", ["device", "host", None])
def test_without_a_directory(tier: str | None) -> None:
    with fake_cuda():
        trained = Trained(None)
        if tier is not None:
            trained.store.move(tier)
        for _ in range(3):
            trained.step()
        trained.assert_right()
        pages_in = trained.store.stats().pages_in
        assert pages_in.keys() == {tier or "device"}  # Where steps are computed.
        trained.step()
        trained.store.close()  # While copies of the last pages are in flight; fake_cuda() checks.


@pytest.mark.quick(7)
@pytest.mark.parametrize("real_thread", [True, False])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("call", range(1, 4))
def test_a_late_write_that_fails(budget: dict[str, Any], call: int, real_thread: bool) -> None:
    """Other writes still wait for their copies: none starts after restore()."""
    files = MemoryFiles()
    storage = FaultyStorage(MemoryStorage(files))
    with fake_cuda(real_thread=real_thread) as cuda:
        trained = Trained(storage, **budget)
        trained.step_durably()
        storage.arm(Fault("error", "write", call=call))
        with pytest.raises(tierstore.StorageError):
            trained.step_durably()
        storage.disarm()
        assert trained.optimizer.restore() == 1
        before = {name: bytes(content) for name, content in files.contents.items()}
        cuda.run_late()
        assert {name: bytes(content) for name, content in files.contents.items()} == before
        trained.assert_right()
        trained.step_durably()
        trained.assert_right()
        trained.store.close()
        found = Trained(MemoryStorage(files), resume=True)
        assert found.optimizer.restore() == 2
        found.assert_right()
        found.store.close()


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_restore_after_a_step_that_was_left(budget: dict[str, Any]) -> None:
    """Its computation may still be running on the device when restore() begins."""
    with fake_cuda() as cuda:
        trained = Trained(MemoryStorage(), **budget)
        trained.step_durably()
        training.set_gradients(trained.parameters, 2)
        sweep = trained.store.pages.sweep()
        for shard in next(sweep.__enter__()).shards:
            for chunk in shard.chunks:
                chunk.master.zero_()
                cuda.computes_in(chunk.master)
        with pytest.raises(tierstore.SweepError):
            sweep.__exit__(None, None, None)
        assert trained.optimizer.restore() == 1
        trained.assert_right()
        trained.step()
        trained.assert_right()
        trained.store.close()


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_closing_in_the_middle_of_a_step(budget: dict[str, Any]) -> None:
    with fake_cuda():
        trained = Trained(MemoryStorage(), **budget)
        trained.step()
        trained.step()
        training.set_gradients(trained.parameters, 3)
        sweep = trained.store.pages.sweep()
        next(sweep.__enter__())
        trained.store.close()
        with pytest.raises(tierstore.SweepError):
            sweep.__exit__(None, None, None)


@pytest.mark.quick(2)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_one_warning_for_a_parameter_that_was_changed(budget: dict[str, Any]) -> None:
    """One warning, and the masters follow the parameter as on the CPU."""
    found = []
    for on_device in (False, True):
        told = 3 if on_device else 2  # On a device the next step warns.
        with fake_cuda() if on_device else contextlib.nullcontext():
            trained = Trained(MemoryStorage(), **budget)
            for step in range(1, 5):
                if step == 2:
                    trained.parameters["embedding"].data.add_(0.25)
                if step == 3:
                    trained.parameters["slow"].data.mul_(-1)
                with warnings.catch_warnings(action="always", record=True) as caught:
                    trained.step()
                assert len(caught) == (step == told)
                for warning in caught:
                    assert str(warning.message).startswith("parameter 'embedding' was changed")
                    assert warning.filename == training.__file__
            found.append(training.snapshot(trained.optimizer, trained.parameters))
            trained.store.close()
    training.assert_identical(*found)


# ------------------------------------------------------------------------------ any history


@dataclass(frozen=True)
class History:
    """The options of a run, and the calls that follow."""

    seed: int
    pace: float
    options: dict[str, Any]
    commit_every: int | None
    slow_storage: bool
    calls: list[str]


BUDGETED = {name: budget for name, budget in BUDGETS.items() if name != "host"}
OPTIONS = [
    {"step_on": step_on, "free_gradients": free, **budget}
    for budget in (*BUDGETED.values(), MOVABLE)
    for step_on in (None, "cpu")
    for free in (False, True)
    if step_on is None or "device_memory" not in budget
] + [{"step_on": "cpu", "host_memory": "2MiB"}]
CALLS = ["step", "step", "prefetch", "commit", "synchronize", "read", "write", "restore", "reopen"]
CALLS += ["device", "host", "nvme", "fail"]

histories = st.builds(
    History,
    seed=st.integers(0, 2**32),
    pace=st.sampled_from([0, 0.1, 0.5]),
    options=st.sampled_from(OPTIONS),
    commit_every=st.sampled_from([1, 2, 3, None]),
    slow_storage=st.booleans(),
    calls=st.lists(st.sampled_from(CALLS), min_size=3, max_size=20),
)


class Played:
    """Plays a history until it ends or cannot continue."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.files = MemoryFiles()
        self.open()

    def open(self) -> None:
        self.storage = FaultyStorage(MemoryStorage(self.files))
        if self.history.slow_storage:
            self.make_slow()
        self.trained = Trained(
            self.storage,
            resume=True,
            commit_every=self.history.commit_every,
            **self.history.options,
        )
        self.trained.optimizer.restore()

    def make_slow(self) -> None:
        """Let transfers move their bytes when they are waited for."""
        released = threading.Event()
        released.set()
        for operation in ("read", "write"):
            self.storage.arm(Fault("delayed", operation, probability=1, release=released))

    def play(self) -> None:
        for call in self.history.calls:
            store = self.trained.store
            try:
                self.call(call)
            except tierstore.BudgetError:
                assert call in ("device", "host", "nvme")
            except tierstore.StorageError:
                self.storage.disarm()
                if not store.committed.step or self.history.commit_every is None:
                    break
                if call == "reopen":  # The store is closed in any case.
                    self.open()
                else:
                    self.trained.optimizer.restore()
                self.trained.assert_right()
        self.storage.disarm()
        try:
            self.trained.store.close()
        except tierstore.StorageError:  # From a write that a fault hits.
            return

    def call(self, call: str) -> None:
        trained, store = self.trained, self.trained.store
        if call == "step":
            if store.step < STEPS:
                trained.step()
        elif call == "read":
            trained.assert_right()
        elif call == "write":
            store.pages.write_states(store.pages.read_states())
        elif call == "restore":
            if self.history.commit_every is None:  # The last commit may be overwritten.
                store.synchronize()
            if store.committed.step:
                trained.optimizer.restore()
                trained.assert_right()
        elif call == "reopen":
            store.close()
            self.open()
            self.trained.assert_right()
        elif call == "fail":
            self.storage.disarm()  # One fault at a time.
            self.storage.arm(Fault("error", "write", call=1))
        elif call in ("device", "host", "nvme"):
            store.move(call)
        else:
            getattr(store.pages if call == "prefetch" else store, call)()


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_any_history(history: History) -> None:
    with fake_cuda(history.seed, history.pace):
        Played(history).play()
