"""Schedulers that cycle momentum: the momentum of Muon groups, and the betas of AdamW groups."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import muon
import tierstore
from tests.support.references import Pair
from tests.support.twins import Twins, parameter

Scheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)


def cyclic(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3)


SCHEDULERS = pytest.mark.parametrize("make_scheduler", [one_cycle, cyclic])


@SCHEDULERS
def test_schedulers_cycle_betas(make_scheduler: Scheduler) -> None:
    twins = Twins(algorithm="adamw")
    schedulers = [make_scheduler(optimizer) for optimizer, _ in twins.both]
    for _ in range(4):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    mine, other = (optimizer.param_groups[0]["betas"] for optimizer, _ in twins.both)
    assert mine == other
    twins.assert_identical()


@SCHEDULERS
@pytest.mark.parametrize("groups", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2), (1, 3)])
def test_momentum_and_betas_are_cycled_together(
    groups: Sequence[int], make_scheduler: Scheduler
) -> None:
    pair = Pair(groups)
    schedulers = [make_scheduler(optimizer) for optimizer in pair.optimizers]
    found = set()
    for step in range(1, 11):
        pair.step(step)
        for mine, other in pair.groups:
            key = "momentum" if mine["algorithm"] == "muon" else "betas"
            assert mine[key] == other[key]
            found.add((key, mine[key]))
        for scheduler in schedulers:
            scheduler.step()
    assert len(found) > 2 * len({key for key, _ in found})
    pair.assert_identical()


def mixed(store: tierstore.TierStore | None = None) -> tuple[muon.Muon, list[torch.Tensor]]:
    matrix, vector = parameter(), parameter(1, [4])
    groups: list[dict[str, Any]] = [
        {"params": [("matrix", matrix)]},
        {"params": [("vector", vector)], "algorithm": "adamw"},
    ]
    return muon.Muon(groups, store=store), [matrix, vector]


def step(optimizer: muon.Muon, seed: int) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = parameter(seed, each.shape).detach()
    optimizer.step()


@pytest.mark.parametrize("commits", [True, False])
def test_cycled_betas_are_resumed(commits: bool, tmp_path: Path) -> None:
    """The scheduler of a resumed program sets its first momentum before restore()."""
    reference, expected = mixed()
    scheduler = one_cycle(reference)
    for number in range(6):
        step(reference, number)
        scheduler.step()
    for first in (0, 3):
        with tierstore.TierStore(tmp_path, resume=True) as store:
            optimizer, parameters = mixed(store)
            scheduler = one_cycle(optimizer)
            store.register(scheduler=scheduler)
            assert optimizer.restore() == first
            if not commits:
                store.register(scheduler=None)
            for number in range(first, first + 3):
                step(optimizer, number)
                scheduler.step()
                if commits or number == 2:
                    store.register(scheduler=scheduler)
                    store.commit()
    assert all(map(torch.equal, parameters, expected))


def test_a_state_dict_has_the_cycled_betas() -> None:
    optimizer, _ = mixed()
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, max_momentum=0.875)
    saved = optimizer.state_dict()["param_groups"]
    assert saved[0]["momentum"] == 0.875
    assert saved[1]["betas"] == (0.875, 0.999)
    assert "momentum" not in saved[1]
    other, _ = mixed()
    one_cycle(other)
    other.load_state_dict(optimizer.state_dict())
    step(other, 0)
    assert other.param_groups[1]["betas"] == (0.875, 0.999)


def test_a_muon_group_with_the_keys_of_a_scheduler_that_cycles_betas_is_refused() -> None:
    """OneCycleLR, made when there are AdamW groups alone, also sets the betas of later groups."""
    vector, matrix = parameter(1, [4]), parameter()
    optimizer = muon.Muon([{"params": [vector], "algorithm": "adamw"}])
    one_cycle(optimizer)
    keys = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
    group = {key: optimizer.param_groups[0][key] for key in keys}
    with pytest.raises(ValueError, match="make OneCycleLR after the first Muon group is added"):
        optimizer.add_param_group({"params": [matrix], **group})
    later = {"params": [parameter(2, [4])], "algorithm": "adamw", **group}
    optimizer.add_param_group(later)
    optimizer.add_param_group({"params": [matrix]})
    scheduler = one_cycle(optimizer)
    step(optimizer, 0)
    scheduler.step()
    step(optimizer, 1)
    assert optimizer.param_groups[2]["momentum"] == optimizer.param_groups[0]["betas"][0] != 0.95
    # The groups of this optimizer may begin another.
    adamw, _, matrices = optimizer.param_groups
    muon.Muon([adamw, matrices])


def with_scheduler() -> tuple[muon.Muon, lr_scheduler.LRScheduler]:
    """Return an optimizer whose AdamW group comes first, after a step of a scheduler."""
    groups = [{"params": [parameter(1, [4])], "algorithm": "adamw"}, {"params": [parameter()]}]
    optimizer = muon.Muon(groups)
    scheduler = one_cycle(optimizer)
    step(optimizer, 0)
    scheduler.step()
    return optimizer, scheduler


def test_an_optimizer_with_a_scheduler_is_copied() -> None:
    optimizer, _ = with_scheduler()
    for other in (deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        step(optimizer, 1)
        step(other, 1)
        assert torch.equal(
            other.param_groups[1]["params"][0], optimizer.param_groups[1]["params"][0]
        )
        optimizer, _ = with_scheduler()


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, muon.Muon])
def test_a_max_momentum_of_1_cannot_be_stepped_by_adamw(
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    """torch.optim.AdamW divides by zero."""
    weight = parameter()
    key = {"algorithm": "adamw"} if make_optimizer is muon.Muon else {}
    optimizer = make_optimizer([{"params": [weight], **key}])
    lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, max_momentum=1.0)
    weight.grad = torch.ones_like(weight)
    with pytest.raises((ZeroDivisionError, ValueError)) as caught:
        optimizer.step()
    if make_optimizer is muon.Muon:
        assert str(caught.value) == (
            "betas must be two numbers in [0, 1), got (1.0, 0.999). The max_momentum of a "
            "scheduler must also be below 1"
        )


def test_a_max_momentum_of_1_equals_torch_for_muon() -> None:
    twins = Twins()
    schedulers = [
        lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, max_momentum=1.0)
        for optimizer, _ in twins.both
    ]
    for _ in range(3):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.assert_identical()
