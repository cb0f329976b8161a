"""Schedulers that cycle momentum: the momentum of Muon groups, and the betas of AdamW groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            assert optimizer.restore() == first
            if first:
                scheduler.load_state_dict(store.extra)
            for number in range(first, first + 3):
                step(optimizer, number)
                scheduler.step()
                if commits or number == 2:
                    store.commit(extra=scheduler.state_dict())
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
