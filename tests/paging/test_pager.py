"""Pages that stay in memory: the same results, fewer bytes, the same commits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.fake_cuda import fake_cuda
from tests.support.faults import Fault, FaultyStorage
from tests.support.toy import FIRST, SECOND, THIRD, Toy, resumed, train_and_die
from tierstore.paging import pager
from tierstore.paging.buffers import BufferPool
from tierstore.storage.memory import MemoryStorage

STEPS = 12
PAGE_BYTES = 10000

# From nothing in memory to everything; pages of this model take about 300 kB in all.
BUDGETS: dict[str, dict[str, Any]] = {
    "some on the host": {"host_memory": 150_000},
    "all on the host": {},
    "some on the device": {"device_memory": 100_000, "buffers": 2},
    "all on the device": {"device_memory": "1MiB", "buffers": 2},
    "some of each": {"device_memory": 100_000, "host_memory": 150_000},
}


def run(store: tierstore.TierStore, **options: Any) -> dict[str, torch.Tensor]:
    parameters = training.make_parameters(torch.bfloat16)
    optimizer = muon.Muon(training.make_groups(parameters), store=store, **options)
    training.train(optimizer, parameters, range(1, STEPS + 1))
    return training.snapshot(optimizer, parameters)


def oracle() -> dict[str, torch.Tensor]:
    return run(tierstore.TierStore(None, page_bytes=PAGE_BYTES))


@pytest.mark.quick(3)
@pytest.mark.parametrize("commit_every", [1, 5, None])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_results_and_resumed_state_are_the_same_in_every_tier(
    budget: dict[str, Any], commit_every: int | None, tmp_path: Path
) -> None:
    options = {"page_bytes": PAGE_BYTES, "commit_every": commit_every, **budget}
    expected = oracle()
    with tierstore.TierStore(tmp_path, **options) as store:
        training.assert_identical(run(store), expected)
        tiers = store.stats().pages_in
    assert set(tiers) & {"host", "device"}
    # It also resumes with all pages in files.
    with tierstore.TierStore(tmp_path, resume=True, buffers=2) as store:
        parameters = training.make_parameters(torch.bfloat16)
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        assert optimizer.restore() == STEPS
        training.assert_identical(training.snapshot(optimizer, parameters), expected)


def test_bytes_shrink_with_what_rests_in_memory(tmp_path: Path) -> None:
    """A fraction c in memory saves c of the reads, and c (1 - 1/N) of the writes.

    Of bfloat16 parameters: the values of float32 parameters are written for commits from all pages.
    """
    every = 4
    parameters = [torch.nn.Parameter(torch.randn(64, 256).bfloat16()) for _ in range(12)]
    counts = {}
    for name, host_memory in {"none": 0, "half": 9 * 2**17, "all": 2**24}.items():
        buffers = {"buffers": 2} if not host_memory else {"host_memory": host_memory}
        options = {"page_bytes": 2**17, "commit_every": every, **buffers}
        with tierstore.TierStore(tmp_path / name, **options) as store:
            optimizer = muon.Muon(parameters, store=store, ns_dtype=torch.float32)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            store.synchronize()
            before = store.stats()
            for _ in range(4 * every):
                optimizer.step()
            store.synchronize()
            after = store.stats()
        share = after.pages_in.get("host", 0) / after.pages
        counts[name] = (
            share,
            after.bytes_read - before.bytes_read,
            after.bytes_written - before.bytes_written,
        )
    _, all_read, all_written = counts["none"]
    assert 0.3 < counts["half"][0] < 0.7
    assert counts["all"][0] == 1
    for share, read, written in counts.values():
        assert read == pytest.approx(all_read * (1 - share), rel=0.01)
        assert written == pytest.approx(all_written * (1 - share * (1 - 1 / every)), rel=0.01)


@pytest.mark.parametrize("commit_every", [1, 3, None])
def test_killed_with_pages_in_memory(commit_every: int | None, tmp_path: Path) -> None:
    options = {"commit_every": commit_every, "buffers": None}
    train_and_die(tmp_path, ["step", "step", "synchronize", "step"], **options)
    toy = resumed(tmp_path, 2, **options)
    toy.step()
    toy.store.close()
    resumed(tmp_path, 3, **options).store.close()


def test_memory_newer_than_files_is_read_and_published(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "run", commit_every=None, buffers=None)
    toy.step()
    toy.store.synchronize()
    toy.step()
    assert torch.equal(toy.store.pages.read_states()["second"]["average"], torch.full((9,), 2.0))
    toy.store.checkpoint(tmp_path / "published")
    toy.step()
    toy.store.close()
    resumed(tmp_path / "run", 3).store.close()
    begun = Toy(tmp_path / "begun")
    assert begun.store.restore(checkpoint=tmp_path / "published") == 2
    begun.assert_at(2)
    begun.store.close()


MOVES = [
    ["host", "nvme", "host"],
    ["nvme", "device", "host", "device", "nvme"],
    ["device", "nvme", "nvme", "host"],
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("commit_every", [1, None])
@pytest.mark.parametrize("moves", MOVES, ids="-".join)
def test_moving_between_steps(moves: list[str], commit_every: int | None, tmp_path: Path) -> None:
    expected = oracle()
    parameters = training.make_parameters(torch.bfloat16)
    with tierstore.TierStore(
        tmp_path, page_bytes=PAGE_BYTES, device_memory="1MiB", commit_every=commit_every
    ) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        for step in range(1, STEPS + 1):
            training.train(optimizer, parameters, range(step, step + 1))
            if step % 2:
                tier = moves[step // 2 % len(moves)]
                store.move(tier)
                stats = store.stats()
                assert stats.pages_in == {tier: stats.pages}
        training.assert_identical(training.snapshot(optimizer, parameters), expected)
    with tierstore.TierStore(tmp_path, resume=True) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        assert optimizer.restore() == STEPS
        training.assert_identical(training.snapshot(optimizer, parameters), expected)


def test_after_a_move_nothing_is_read_that_is_in_memory(tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    toy.step()
    toy.store.move("nvme")
    toy.step()
    toy.store.move("host")
    before = toy.store.stats().bytes_read
    toy.step()
    assert toy.store.stats().bytes_read == before
    toy.store.move("nvme")
    toy.step()
    assert toy.store.stats().bytes_read > before
    toy.store.close()
    resumed(tmp_path, 4).store.close()


def test_a_move_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [[FIRST], [SECOND], [THIRD]], buffers=2, host_memory="16KiB")
    toy.step()
    before = toy.store.stats().pages_in
    for tier in ("device", "host"):
        with pytest.raises(tierstore.BudgetError, match=f"{tier}_memory="):
            toy.store.move(tier)
    with pytest.raises(ValueError, match="'device', 'host', 'nvme'"):
        toy.store.move("gpu")
    assert toy.store.stats().pages_in == before
    toy.step()
    toy.assert_at(2)
    toy.store.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, tierstore.BudgetError])
@pytest.mark.parametrize(
    ("start", "tier"),
    [("nvme", "host"), ("host", "nvme"), ("device", "host"), ("host", "device")],
)
def test_restore_after_a_move_that_failed_half_way(
    start: str,
    tier: str,
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever allocation fails, restore() goes back to the commit."""
    allocations = 0

    class Scarce(BufferPool):
        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal allocations
            allocations += 1
            if allocations == failing:
                raise error("no memory")
            super().__init__(*args, **options)

    monkeypatch.setattr(pager, "BufferPool", Scarce)
    for failing in range(1, 20):
        allocations = 100
        toy = Toy(tmp_path / str(failing), buffers=None, device_memory="1MiB")
        toy.store.move(start)
        toy.step()
        toy.store.synchronize()
        toy.step()
        allocations, failed = 0, False
        try:
            toy.store.move(tier)
        except error:
            failed = True
            with pytest.raises(tierstore.StoreFailedError):
                toy.step()
            assert toy.store.restore() >= 1
        allocations = 100
        toy.assert_at(toy.store.step)
        step = toy.store.step
        toy.step()
        toy.assert_at(step + 1)
        toy.store.close()
        if not failed:
            break
    assert failing > 1


def test_moving_without_a_directory() -> None:
    toy = Toy(None)  # type: ignore[arg-type]
    toy.step()
    with pytest.raises(tierstore.RunDirectoryError, match="needs a store with a directory"):
        toy.store.move("nvme")
    toy.store.move("device")
    toy.step()
    assert toy.store.stats().pages_in == {"device": 2}
    toy.assert_at(2)


# --------------------------------------------------------------------- computing on the host


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"buffers": 2}, {}, {"directory": None}], ids=str)
def test_compute_on_the_host_equals_resident_training(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Gradients are not changed, and are freed with free_gradients=True."""
    parameters = training.make_parameters(dtype)
    expected = training.resident_run(STEPS, dtype)
    options = {"directory": tmp_path, "page_bytes": PAGE_BYTES, **options}
    with (
        fake_cuda(),
        tierstore.TierStore(**options, step_on="cpu", free_gradients=True) as store,
    ):
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        scheduler = training.make_scheduler(optimizer)
        for step in range(1, STEPS + 1):
            training.set_gradients(parameters, step)
            gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
            kept = {name: gradient.clone() for name, gradient in gradients.items()}
            optimizer.step()
            scheduler.step()
            assert {n for n, p in parameters.items() if p.grad is not None} <= {"empty"}
            assert all(torch.equal(gradients[name], kept[name]) for name in kept)
        training.assert_identical(training.snapshot(optimizer, parameters), expected)


def test_host_steps_stay_within_the_budget(tmp_path: Path) -> None:
    with fake_cuda():
        step_within_the_budget(tmp_path)


def step_within_the_budget(tmp_path: Path) -> None:
    toy = Toy(tmp_path, buffers=2, host_memory="1MiB", step_on="cpu")
    toy.step()
    toy.store.close()
    with pytest.raises(tierstore.BudgetError, match=r"host_memory=(\d+)") as caught:
        Toy(tmp_path / "small", buffers=2, host_memory="40KiB", step_on="cpu")
    smallest = int(str(caught.value).split("pass host_memory=")[1].split()[0])
    with pytest.raises(tierstore.BudgetError):
        Toy(tmp_path / "smaller", buffers=2, host_memory=smallest - 1, step_on="cpu")
    toy = Toy(tmp_path / "enough", buffers=2, host_memory=smallest, step_on="cpu")
    toy.step()
    assert toy.store.stats().host_bytes_peak <= smallest
    toy.store.close()


def test_device_memory_is_refused_with_steps_on_the_host(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device_memory must be 0"):
        tierstore.TierStore(tmp_path, step_on="cpu", device_memory="1GiB")


# ----------------------------------------------------------------------------- prefetching


def begun_run(
    on_operation: Callable[[str, str, str], None] | None = None, **options: Any
) -> tuple[Toy, FaultyStorage]:
    storage = FaultyStorage(MemoryStorage(), on_operation=on_operation)
    toy = Toy(storage, **options)
    toy.step()
    toy.store.synchronize()
    return toy, storage


def test_prefetched_pages_are_not_read_again() -> None:
    toy, _ = begun_run(buffers=2)
    before = toy.store.stats().bytes_read
    toy.store.pages.prefetch()
    early = toy.store.stats().bytes_read - before
    assert early > 0
    toy.store.pages.prefetch()
    assert toy.store.stats().bytes_read == before + early
    toy.step()
    first = toy.store.stats().bytes_read - before
    toy.step()
    assert toy.store.stats().bytes_read - before == 2 * first
    toy.assert_at(3)
    toy.store.close()


def test_a_commit_keeps_pages_that_were_prefetched() -> None:
    toy, _ = begun_run(buffers=2)
    read = []
    for _ in range(4):
        before = toy.store.stats().bytes_read
        toy.store.pages.prefetch()
        toy.step()  # Begins to commit the step before.
        read.append(toy.store.stats().bytes_read - before)
    toy.store.close()
    assert len(set(read)) == 1


@pytest.mark.parametrize("call", ["read_states", "write_states", "restore", "move", "other step"])
def test_every_call_after_a_prefetch(call: str) -> None:
    toy, _ = begun_run(buffers=2)
    toy.store.pages.prefetch()
    if call == "read_states":
        assert torch.equal(toy.store.pages.read_states()["second"]["average"], torch.ones(9))
    elif call == "write_states":
        toy.store.pages.write_states(toy.store.pages.read_states())
    elif call == "restore":
        assert toy.store.restore() == 1
    elif call == "move":
        toy.store.move("host")
    if call == "other step":
        toy.step(["third"])
        assert torch.equal(toy.parameters["first"], torch.full((5, 7), 0.75, dtype=torch.bfloat16))
        assert torch.equal(toy.parameters["third"], torch.full((3, 4), 0.5, dtype=torch.float16))
    else:
        toy.step()
        toy.assert_at(2)
    toy.store.close()


def test_pages_are_read_in_their_order_after_a_prefetch_in_the_order_of_a_sweep(
    tmp_path: Path,
) -> None:
    """A sweep interleaves whole and elementwise pages: early reads have all buffers."""
    tensors = {str(n): torch.nn.Parameter(torch.full((64, 16), float(n))) for n in range(8)}
    parameters = [
        tierstore.pages.PagedParameter(
            name=name, tensor=tensor, states={"s": torch.float32}, elementwise=int(name) >= 4
        )
        for name, tensor in tensors.items()
    ]
    with tierstore.TierStore(tmp_path, page_bytes=4096, buffers=2) as store:
        group = tierstore.pages.PagedGroup(parameters=parameters, hyperparameters={})
        store.pages.attach([group])
        for tensor in tensors.values():
            tensor.grad = torch.ones_like(tensor)
        for _ in range(2):
            with store.pages.sweep() as pages:
                for page in pages:
                    for chunk in (chunk for shard in page.shards for chunk in shard.chunks):
                        chunk.states["s"].add_(1)
        store.synchronize()
        store.pages.prefetch()
        states = store.pages.read_states()
        assert all(torch.equal(of["s"], torch.full((64, 16), 2.0)) for of in states.values())


def test_a_failed_prefetch_raises_in_the_step_and_the_step_can_be_retried() -> None:
    toy, storage = begun_run(buffers=2)
    storage.arm(Fault("error", "read", call=1))
    toy.store.pages.prefetch()
    with pytest.raises(tierstore.StorageError):
        toy.step()
    toy.step()
    toy.assert_at(2)
    toy.store.close()


def test_a_prefetch_that_cannot_begin_can_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, storage = begun_run(buffers=2)

    def refuse(*args: Any) -> None:
        raise tierstore.StorageError("no descriptor", path="page", errno=24)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read", refuse)
        toy.store.pages.prefetch()
        with pytest.raises(tierstore.StorageError, match="no descriptor"):
            toy.step()
    toy.store.pages.prefetch()
    toy.step()
    toy.assert_at(2)
    toy.store.close()


def test_the_first_gradient_prefetches(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    model[1].requires_grad_(False)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    reads = []
    for is_paged in (False, True):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), expected, strict=True):
                parameter.copy_(value)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim == 2], "algorithm": "muon"},
            {"params": [p for p in trained if p.ndim == 1], "algorithm": "adamw"},
        ]
        with tierstore.TierStore(tmp_path / "run", page_bytes=4096, buffers=2) as store:
            optimizer = muon.Muon(groups, store=store if is_paged else None)
            for _ in range(3):
                optimizer.zero_grad()
                before = store.stats().bytes_read
                model(torch.ones(2, 16)).square().mean().backward()
                reads.append(store.stats().bytes_read > before)
                optimizer.step()
                if is_paged:
                    store.synchronize()  # Pages that are being written are not prefetched.
        if not is_paged:
            plain = [parameter.detach().clone() for parameter in model.parameters()]
    assert reads == [False, False, False, False, True, True]
    for parameter, value in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter, value)
    model(torch.ones(2, 16)).sum().backward()  # The hook of a closed store does nothing.


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_failed_transfer_raises_in_the_step_and_not_in_backward(operation: str) -> None:
    model = torch.nn.Linear(16, 16, bias=False)  # One page, so that a step waits for no write.
    storage = FaultyStorage(MemoryStorage())
    with tierstore.TierStore(storage, page_bytes=4096, buffers=2) as store:
        optimizer = muon.Muon([{"params": model.parameters(), "algorithm": "adamw"}], store=store)

        def backward() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()

        backward()
        optimizer.step()
        store.synchronize()
        backward()
        if operation == "write":
            storage.arm(Fault("error", "write", probability=1.0))
            optimizer.step()  # Returns with writes in flight.
        else:
            optimizer.step()
            storage.arm(Fault("error", "read", probability=1.0))
        backward()
        with pytest.raises(tierstore.StorageError):
            optimizer.step()
        storage.disarm()
        assert optimizer.restore() in (1, 2)
        backward()
        optimizer.step()


def test_a_failed_write_raises_in_the_next_step_and_is_not_committed() -> None:
    begun = threading.Event()

    def note(operation: str, *_: str) -> None:
        if operation == "write":
            begun.set()

    toy, storage = begun_run(note, buffers=2)
    begun.clear()
    storage.arm(Fault("error", "write", call=1))
    toy.step()  # Returns with writes in flight, which threads begin.
    assert begun.wait(60)
    for _ in range(1000):  # The first may come before the write has ended.
        toy.store.pages.prefetch()
    with pytest.raises(tierstore.StorageError):
        toy.step()
    with pytest.raises(tierstore.StoreFailedError):
        toy.step()
    storage.disarm()
    assert toy.store.restore() == 1
    toy.assert_at(1)
    toy.store.close()
