"""Averages of weights equal torch.optim.swa_utils, at their steps alone, also after a kill."""

from __future__ import annotations

import copy
import random
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import swa_utils

import muon
import tierstore
from tests.support import killed_processes
from tests.support.faults import Fault, FaultyStorage
from tests.support.kernel import peak_of
from tests.support.killed_processes import KillAt
from tierstore.paging import buffers
from tierstore.storage.memory import MemoryStorage
from tierstore.storage.select import open_storage

DECAY = 0.9
STREAMED: dict[str, Any] = {"page_bytes": 4096, "buffers": 2}


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 33), nn.Linear(33, 70), nn.Linear(70, 5)).to(dtype)


@torch.no_grad()
def change(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter += torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def reference_of(model: nn.Module) -> swa_utils.AveragedModel:
    average = swa_utils.get_ema_multi_avg_fn(DECAY)
    dtype = wide(next(model.parameters()).dtype)
    return swa_utils.AveragedModel(copy.deepcopy(model).to(dtype), multi_avg_fn=average)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def assert_averages(averaged: tierstore.AveragedModel, expected: nn.Module) -> None:
    """Parameters of the averaged model, rounded, and the averages themselves."""
    states = averaged.store.pages.read_states()
    found = dict(averaged.module.named_parameters())
    for name, average in expected.named_parameters():
        assert torch.equal(found[name], average.to(found[name].dtype))
        assert torch.equal(states[name].get("master", found[name]), average)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("budget", [STREAMED, {"host_memory": "1MiB"}], ids=["nvme", "host"])
def test_the_averages_equal_torch(
    every: int, dtype: torch.dtype, budget: dict[str, Any], tmp_path: Path
) -> None:
    model = net(dtype)
    reference = reference_of(model)
    with tierstore.TierStore(tmp_path, **budget) as store:
        averaged = tierstore.AveragedModel(
            model, copy.deepcopy(model), store, decay=DECAY, every=every
        )
        for step in range(1, 8):
            change(model, step)
            moved = store.stats().bytes_read, store.stats().bytes_written
            averaged.update(step)
            if step % every == 0:
                reference.update_parameters(copy.deepcopy(model).to(wide(dtype)))
                assert_averages(averaged, reference.module)
                assert store.committed.step == store.step == step // every
            else:
                assert (store.stats().bytes_read, store.stats().bytes_written) == moved


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", 0)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_a_gpu_come_in_pieces_through_page_locked_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locked = []
    monkeypatch.setattr(
        buffers, "_lock_pages", lambda arena, address, nbytes, device: locked.append(device)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(32))).to(dtype)
    averaged_module, reference = copy.deepcopy(model), reference_of(model)
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(OnGpu))
    with tierstore.TierStore(tmp_path, page_bytes=65536, buffers=2) as store:
        averaged = tierstore.AveragedModel(model, averaged_module, store, decay=DECAY)
        for step in (1, 2, 3):
            with torch.no_grad():
                for layer in model:
                    layer.weight.add_(step)
            peak = peak_of(lambda step=step: averaged.update(step))  # type: ignore[misc]
            # Temporaries of a page in float32, and never all weights.
            assert peak < 4 * 65536 < sum(layer.weight.nbytes for layer in model)
            on_host = copy.deepcopy(averaged_module)
            for mine, layer in zip(on_host.parameters(), model, strict=True):
                mine.data = layer.weight.detach().as_subclass(torch.Tensor)
            reference.update_parameters(on_host.to(wide(dtype)))
            assert_averages(averaged, reference.module)
    assert set(locked) == {torch.device("cuda", 0)}


def test_averages_that_are_stepped_beside_weights_elsewhere_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    averaged_module = copy.deepcopy(model)
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(OnGpu))
    with (
        tierstore.TierStore(tmp_path, step_on="cuda") as store,
        pytest.raises(ValueError, match="leave step_on out of their store"),
    ):
        tierstore.AveragedModel(model, averaged_module, store)


def test_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    averaged_module = copy.deepcopy(model)
    frozen = model[0].weight.clone()
    with tierstore.TierStore(tmp_path / "run", **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, averaged_module, store)
        for step in (1, 2):
            change(model, step)
            averaged.update(step)
        assert torch.equal(averaged_module[0].weight, frozen)
        store.checkpoint(tmp_path / "checkpoint", model=averaged_module)
        values = {name: value.clone() for name, value in averaged_module.state_dict().items()}
    state = {"model": net().state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
    assert state["model"].keys() == values.keys()
    assert all(torch.equal(state["model"][name], value) for name, value in values.items())


def train(
    directory: Path, steps: int, every: int, commit_every: int, kill_at: int = 0
) -> dict[str, torch.Tensor]:
    """Go on to a step, unless the process is killed at an operation of either store."""
    torch.set_num_threads(1)
    kill = KillAt(kill_at)
    model = net()
    run, averages = (
        tierstore.TierStore(
            FaultyStorage(open_storage(directory / name / "rank-00000"), on_operation=kill),
            resume=True,
            commit_every=commit_every if name == "run" else 1,
            **STREAMED,
        )
        for name in ("run", "averages")
    )
    with run, averages:
        optimizer = muon.Muon(
            [{"params": model.named_parameters(), "algorithm": "adamw"}], lr=0.1, store=run
        )
        averaged = tierstore.AveragedModel(
            model, copy.deepcopy(model), averages, decay=DECAY, every=every
        )
        start = optimizer.restore()
        averaged.restore(start)
        for step in range(start + 1, steps + 1):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
            averaged.update(run.step)
            run.commit()
        found = {f"model.{name}": value for name, value in model.state_dict().items()}
        states = averages.pages.read_states()
        return found | {name: tensors["master"] for name, tensors in states.items()}


STEPS = 5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the averages are of step")
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("commit_every", [1, 4])
def test_killed_and_resumed(every: int, commit_every: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", STEPS, every, commit_every)
    generator = random.Random(10 * every + commit_every)
    killed = 0
    for attempt in range(6):
        directory = tmp_path / str(attempt)
        arguments = (directory, STEPS, every, commit_every, generator.randint(1, 70))
        child = killed_processes._processes.Process(target=train, args=arguments)
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        killed += child.exitcode != 0
        resumed = train(directory, STEPS, every, commit_every)
        assert resumed.keys() == whole.keys()
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert killed > 2


def test_a_failed_update_goes_back_to_the_averages_before(tmp_path: Path) -> None:
    model = net()
    reference = reference_of(model)
    storage = FaultyStorage(open_storage(tmp_path / "rank-00000"))
    with tierstore.TierStore(storage, **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store, decay=DECAY)
        for step in (1, 2, 3):
            change(model, step)
            if step == 2:
                storage.arm(Fault("error", "write", probability=1.0))
                with pytest.raises(tierstore.StorageError):
                    averaged.update(step)
                with pytest.raises(tierstore.StoreFailedError):
                    averaged.update(step)
                storage.disarm()
                averaged.restore(1)
            averaged.update(step)
            reference.update_parameters(copy.deepcopy(model).float())
            assert_averages(averaged, reference.module)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interrupted_update_is_made_once(goes_on: bool, tmp_path: Path) -> None:
    model = net()
    reference = reference_of(model)
    with tierstore.TierStore(tmp_path, **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store, decay=DECAY)
        for step in (1, 2, 3):
            change(model, step)
            reference.update_parameters(copy.deepcopy(model).float())
            if step == 2:
                with (
                    mock.patch.object(store, "synchronize", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    averaged.update(step)
                assert store.committed.step == 1
                if not goes_on:
                    break
            averaged.update(step)
            assert store.committed.step == step
        assert_averages(averaged, reference.module)
    model = net()
    with tierstore.TierStore(tmp_path, resume=True, **STREAMED) as store:  # close() committed.
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store, decay=DECAY)
        averaged.restore(step)
        assert_averages(averaged, reference.module)


def test_buffers_come_from_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    reference = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    with tierstore.TierStore(tmp_path, **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store, decay=DECAY)
        for step in (1, 2, 3):
            model(torch.randn(8, 5))
            change(model, step)
            averaged.update(step)
            reference.update_parameters(model)
            expected = reference.module.state_dict()
            found = averaged.module.state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_restored_averages_have_the_buffers_of_the_model(tmp_path: Path) -> None:
    """Not of the copy that the program has just made, until the next update."""
    model = nn.Sequential(nn.Linear(33, 5), nn.BatchNorm1d(5))
    for restart in (False, True):
        averaged_copy = copy.deepcopy(model)
        with torch.no_grad():
            model[1].running_mean.fill_(7.0)  # As the program loads it.
        with tierstore.TierStore(tmp_path / "averages", resume=True, **STREAMED) as store:
            averaged = tierstore.AveragedModel(model, averaged_copy, store, decay=DECAY)
            averaged.restore(int(restart))
            assert torch.equal(averaged.module[1].running_mean, model[1].running_mean)
            averaged.update(1)
            model[1].running_mean.zero_()


def test_the_run_goes_back_or_trains_others(tmp_path: Path) -> None:
    model = net()
    with tierstore.TierStore(tmp_path, **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store)
        averaged.update(1)
        averaged.update(2)
        with pytest.raises(ValueError, match="for step 2, and now for step 1: after restore"):
            averaged.update(1)
        with pytest.warns(UserWarning, match="of step 2, and the run is at step 1"):
            averaged.restore(1)
        averaged.update(1)
        model[0].requires_grad_(False)
        with pytest.raises(ValueError, match=r"'0\.weight' was frozen or unfrozen"):
            averaged.update(3)
        assert store.step == 2


def test_other_states_are_not_averages(tmp_path: Path) -> None:
    model = net()
    with tierstore.TierStore(tmp_path / "run", **STREAMED) as store:
        optimizer = muon.Muon(
            [{"params": model.named_parameters(), "algorithm": "adamw"}], store=store
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        store.checkpoint(tmp_path / "of-run")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "weights")
    with tierstore.TierStore(tmp_path / "averages", **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store)
        for name in ("of-run", "weights"):
            with pytest.raises(ValueError, match=f"{name} holds no averages"):
                averaged.restore(1, tmp_path / name)


def test_names_of_wrappers(tmp_path: Path) -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    with tierstore.TierStore(tmp_path, **STREAMED) as store:
        averaged = tierstore.AveragedModel(compiled, copy.deepcopy(model), store)
        averaged.update(1)
        assert store.pages.read_states().keys() == dict(model.named_parameters()).keys()


def test_averages_that_do_not_fit_the_run(tmp_path: Path) -> None:
    def begin(store: tierstore.TierStore, every: int = 5) -> tierstore.AveragedModel:
        model = net()
        return tierstore.AveragedModel(model, copy.deepcopy(model), store, every=every)

    with tierstore.TierStore(tmp_path, **STREAMED) as store:
        averaged = begin(store)
        averaged.restore(0)
        averaged.update(10)
        averaged.update(15)
        with pytest.raises(ValueError, match=r"of step 15, and this is step 25: call update\(\)"):
            averaged.update(25)
    for step in (15, 19):
        with tierstore.TierStore(tmp_path, resume=True, **STREAMED) as store:
            begin(store).restore(step)
    with (
        tierstore.TierStore(tmp_path, resume=True, **STREAMED) as store,
        pytest.raises(ValueError, match="of step 15, the run is at step 20"),
    ):
        begin(store).restore(20)
    with (
        tierstore.TierStore(tmp_path, resume=True, **STREAMED) as store,
        pytest.raises(ValueError, match="every 5 steps: pass every=5 instead of 3"),
    ):
        begin(store, every=3).restore(15)
    with tierstore.TierStore(tmp_path, resume=True, **STREAMED) as store:
        averaged = begin(store)
        with pytest.warns(UserWarning, match="of step 15, and the run is at step 3"):
            averaged.restore(3)
        averaged.update(5)
        averaged.update(15)
        assert store.step == 2
        averaged.update(20)
        assert store.step == 3


def test_rewound_with_the_run(tmp_path: Path) -> None:
    model = net()
    reference = reference_of(model)
    with tierstore.TierStore(tmp_path / "averages", **STREAMED) as store:
        averaged = tierstore.AveragedModel(model, copy.deepcopy(model), store, decay=DECAY, every=2)
        for step in (1, 2, 3, 4, 5, 6):
            change(model, step)
            averaged.update(step)
            if step == 2:
                store.checkpoint(tmp_path / "checkpoint")
                reference.update_parameters(copy.deepcopy(model).float())
        averaged.restore(3, tmp_path / "checkpoint", rewind=True)
        assert_averages(averaged, reference.module)
        averaged.update(4)
        reference.update_parameters(copy.deepcopy(model).float())
        assert_averages(averaged, reference.module)
        assert store.step == 2


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"decay": 1.5}, "decay must be from 0 to 1"),
        (None, {"every": 0}, "every must be a whole number above 0"),
        (None, {"every": 2.0}, "every must be a whole number above 0"),
        ("dtype", {}, "'0.weight' is torch.bfloat16 .* in the model and torch.float32 .* in the"),
        ("shape", {}, "'2.weight' is .*70], .* in the model and .*71]"),
        ("missing", {}, "'2.weight' is .* in the model and absent in the averaged model"),
        ("more", {}, r"'3.weight' is absent in the model and torch.float32 \[2, 2\]"),
        ("memory", {}, "'0.weight' has the same memory in both models"),
        ("buffer", {}, r"buffer '2.seen' has shape None in the model and \[3\] in the averaged"),
        ("same", {}, "'0.weight' has the same memory in both models: pass a deepcopy"),
    ],
)
def test_refusals(change: str | None, options: dict[str, Any], message: str) -> None:
    model = net()
    averaged: nn.Module = copy.deepcopy(model)
    if change == "dtype":
        averaged.float()
    elif change == "shape":
        averaged[2] = nn.Linear(71, 5).bfloat16()
    elif change == "missing":
        averaged[2] = nn.Identity()
    elif change == "more":
        averaged.append(nn.Linear(2, 2, bias=False))
    elif change == "memory":
        averaged.load_state_dict(model.state_dict(), assign=True)
    elif change == "buffer":
        averaged[2].register_buffer("seen", torch.zeros(3))
    elif change == "same":
        averaged = model
    storage = MemoryStorage()
    with tierstore.TierStore(storage) as store, pytest.raises(ValueError, match=message):
        tierstore.AveragedModel(model, averaged, store, **options)


def test_a_store_without_a_directory_is_refused() -> None:
    with pytest.raises(ValueError, match="need a store with a directory"):
        tierstore.AveragedModel(net(), net(), tierstore.TierStore(None))
