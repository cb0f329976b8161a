"""restore() of an optimizer: the scheduler and the learning rates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import muon
import tierstore
from tests.support.twins import parameter

Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)


def one_after_another(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return lr_scheduler.SequentialLR(optimizer, [warm_up(optimizer), decay], milestones=[2])


def decay_on_plateaus(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    plateau.step(1.0)
    plateau.step(1.0)  # lr is now a tenth of what it was.
    return plateau


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=20, cycle_momentum=False)


def open_run(
    directory: Path, **options: Any
) -> tuple[tierstore.TierStore, muon.Muon, nn.Parameter]:
    weight = parameter()
    store = tierstore.TierStore(directory, **{"resume": True, **options})
    return store, muon.Muon([("weight", weight)], store=store, lr=1.0), weight


def train(
    optimizer: muon.Muon, weight: nn.Parameter, scheduler: lr_scheduler.LRScheduler, steps: int
) -> list[float]:
    """Do some steps; return the lr of each, and the lr that comes next."""
    optimizer.store.register(scheduler=scheduler)
    rates = []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.full_like(weight, rates[-1])
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(step))
        else:
            scheduler.step()
        optimizer.store.commit()
    return [*rates, optimizer.param_groups[0]["lr"]]


def make_run(directory: Path, schedule: Schedule = warm_up) -> float:
    """Leave a run of three steps behind; return the lr that comes next."""
    store, optimizer, weight = open_run(directory)
    with store:
        return train(optimizer, weight, schedule(optimizer), 3)[-1]


@pytest.mark.parametrize("schedule", [warm_up, one_after_another, one_cycle, decay_on_plateaus])
def test_restore_brings_a_scheduler_back(schedule: Schedule, tmp_path: Path) -> None:
    """The rates and results equal an uninterrupted run."""
    store, optimizer, expected = open_run(tmp_path / "expected")
    with store:
        expected_rates = train(optimizer, expected, schedule(optimizer), 6)
    lr = make_run(tmp_path / "run", schedule)
    assert lr == expected_rates[3]
    store, optimizer, weight = open_run(tmp_path / "run")
    with store, warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedule(optimizer)
        store.register(scheduler=scheduler)
        assert optimizer.restore() == 3
        assert optimizer.param_groups[0]["lr"] == lr
        rates = train(optimizer, weight, scheduler, 3)
    assert rates == expected_rates[3:]
    assert torch.equal(weight, expected)


def test_a_scheduler_gets_a_copy_of_its_state(tmp_path: Path) -> None:
    make_run(tmp_path)
    store, optimizer, weight = open_run(tmp_path)
    with store:
        scheduler = warm_up(optimizer)
        store.register(scheduler=scheduler)
        optimizer.restore()
        committed = store.committed
        train(optimizer, weight, scheduler, 1)
        assert committed.states["scheduler"]["last_epoch"] == 3


class _Eager(lr_scheduler.LinearLR):
    """A scheduler that sets the lr of its optimizer when it is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.optimizer.param_groups[0]["lr"] = 7.0


def test_the_committed_lr_prevails_over_a_scheduler(tmp_path: Path) -> None:
    lr = make_run(tmp_path)
    store, optimizer, _ = open_run(tmp_path)
    with store:
        store.register(scheduler=_Eager(optimizer))
        optimizer.restore()
        assert optimizer.param_groups[0]["lr"] == lr


def test_a_new_run_leaves_the_scheduler_as_it_is(tmp_path: Path) -> None:
    store, optimizer, _ = open_run(tmp_path)
    with store:
        scheduler = warm_up(optimizer)
        before = scheduler.state_dict()
        store.register(scheduler=scheduler)
        assert optimizer.restore() == 0
        assert scheduler.state_dict() == before
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_run_that_begins_from_a_checkpoint_brings_a_scheduler_back(tmp_path: Path) -> None:
    store, optimizer, weight = open_run(tmp_path / "old")
    with store:
        lr = train(optimizer, weight, warm_up(optimizer), 3)[-1]
        store.checkpoint(tmp_path / "checkpoint")
    store, optimizer, weight = open_run(tmp_path / "new")
    with store:
        scheduler = warm_up(optimizer)
        store.register(scheduler=scheduler)
        assert optimizer.restore(tmp_path / "checkpoint") == 3
        assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (lr, 3)


def test_lr_that_a_late_scheduler_sets_back_warns_once(tmp_path: Path) -> None:
    lr = make_run(tmp_path)
    store, optimizer, weight = open_run(tmp_path)
    with store:
        store.register(scheduler=None)
        state = store.committed.states["scheduler"]
        optimizer.restore()
        scheduler = warm_up(optimizer)
        scheduler.load_state_dict(state)
        weight.grad = torch.ones_like(weight)
        found = optimizer.param_groups[0]["lr"]
        assert found != lr
        with pytest.warns(UserWarning, match=r"lr of group 0 .*register\(scheduler=") as caught:
            optimizer.step()
        assert f"{found}" in str(caught[0].message)
        assert f"{lr}" in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


def test_values_that_the_program_changed_are_named_at_a_resume(tmp_path: Path) -> None:
    store, optimizer, weight = open_run(tmp_path)
    with store:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    for keeps in (False, True):
        weight = parameter()
        store = tierstore.TierStore(tmp_path, resume=True)
        optimizer = muon.Muon(
            [("weight", weight)], store=store, lr=0.5, weight_decay=0.0, nesterov=True
        )
        with store:
            if keeps:
                assert optimizer.restore(keep_hyperparameters=True) == 1
                assert (optimizer.defaults["lr"], optimizer.param_groups[0]["lr"]) == (0.5, 0.5)
                assert optimizer.param_groups[0]["weight_decay"] == 0.0
                continue
            text = (
                r"lr of group 0 is 1\.0, given 0\.5; weight_decay of group 0 is 0\.1, given 0\.0\. "
            )
            with pytest.warns(UserWarning, match=text):
                assert optimizer.restore() == 1
            assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("schedule", [warm_up, one_cycle, decay_on_plateaus])
def test_values_that_are_kept_leave_a_schedule_as_it_was(
    schedule: Schedule, tmp_path: Path
) -> None:
    lr = make_run(tmp_path, schedule)
    weight = parameter()
    store = tierstore.TierStore(tmp_path, resume=True)
    optimizer = muon.Muon([("weight", weight)], store=store, lr=1.0, weight_decay=0.25)
    with store:
        store.register(scheduler=schedule(optimizer))
        assert optimizer.restore(keep_hyperparameters=True) == 3
        assert optimizer.param_groups[0]["lr"] == lr
        assert optimizer.param_groups[0]["weight_decay"] == 0.25
