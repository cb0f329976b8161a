"""Steps of thousands of small parameters, and of hundreds of groups."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.twins import parameter


def seconds(*functions: Callable[[], Any]) -> list[float]:
    """Return the shortest of some times that each takes, one after the other."""
    found = []
    for _ in range(10):
        for function in functions:
            started = time.thread_time()
            function()
            found.append(time.thread_time() - started)
    return [min(found[index :: len(functions)]) for index in range(len(functions))]


@pytest.mark.long
def test_many_small_parameters_step_about_as_fast_as_foreach() -> None:
    """1.4 times as long was measured; a step parameter by parameter took 6.5 times as long."""
    weights = [parameter(shape=[64]) for _ in range(2000)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = muon.Muon([{"params": weights, "algorithm": "adamw"}])
    stock = torch.optim.AdamW(weights, foreach=True)
    ours, theirs = seconds(optimizer.step, stock.step)
    assert ours < 3 * theirs


@pytest.mark.long
@pytest.mark.parametrize("is_attached", [False, True])
def test_loops_over_the_state_take_linear_time(is_attached: bool) -> None:
    """With four times the parameters they take four times as long; 15 times was measured."""
    optimizers = []
    for count in (1000, 4000):
        weights = [parameter(shape=[1]) for _ in range(count)]
        optimizers.append(muon.Muon([{"params": weights, "algorithm": "adamw"}]))
        if is_attached:
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizers[-1].step()

    def loop(optimizer: muon.Muon) -> None:
        for weight in optimizer.state:
            assert "exp_avg" in optimizer.state[weight]

    few, many = seconds(partial(loop, optimizers[0]), partial(loop, optimizers[1]))
    assert many < 8 * few
    few, many = seconds(optimizers[0].reset_state, optimizers[1].reset_state)
    assert many < 8 * few


def test_groups_are_added_after_a_step_in_quadratic_time() -> None:
    """With four times the groups it takes 16 times as long; 50 times was measured."""
    weights = [[parameter(shape=[1]) for _ in range(count)] for count in (60, 240)]
    optimizers = []
    for some in weights:
        optimizers.append(muon.Muon([{"params": some[:1], "algorithm": "adamw"}]))
        some[0].grad = torch.ones_like(some[0])
        optimizers[-1].step()

    def add(optimizer: muon.Muon, added: Sequence[torch.Tensor]) -> None:
        del optimizer.param_groups[1:]
        for weight in added:
            optimizer.add_param_group({"params": [weight], "algorithm": "adamw"})

    few, many = seconds(*map(partial, [add, add], optimizers, [some[1:] for some in weights]))
    assert many < 32 * few


def test_the_state_follows_edits_of_the_groups() -> None:
    """The positions of parameters are noted anew."""
    weights = [parameter(seed, shape=[1]) for seed in range(3)]
    optimizer = muon.Muon([{"params": weights[:2], "algorithm": "adamw"}])
    names = [optimizer.state[weight].name for weight in weights[:2]]
    assert weights[2] not in optimizer.state
    optimizer.param_groups[0]["params"].reverse()
    assert [optimizer.state[weight].name for weight in weights[1::-1]] == names
    optimizer.add_param_group({"params": weights[2:], "algorithm": "adamw"})
    assert optimizer.state[weights[2]].name == "1.0"


def groups_of_one(count: int) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return parameters that have gradients, and a group for each."""
    weights = [parameter(shape=[64]) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return weights, [{"params": [weight], "algorithm": "adamw"} for weight in weights]


@pytest.mark.long
def test_state_dicts_of_many_groups_take_linear_time() -> None:
    """With four times the groups they take four times as long; 11.8 times was measured."""
    optimizers = [muon.Muon(groups_of_one(count)[1]) for count in (500, 2000)]
    for optimizer in optimizers:
        optimizer.step()
    few, many = seconds(*(optimizer.state_dict for optimizer in optimizers))
    assert many < 8 * few


def calls(function: Callable[[], Any]) -> int:
    """Return the number of functions of Python and C that a function calls in this thread."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_many_groups_step_in_few_calls() -> None:
    """At most 2 times the time of torch is wanted; 1.8 and 2.7 times were measured.

    That ratio depends on the processor. The number of calls does not: 4.6 times as many, and 5.6
    times when each group opened a range of the profiler, which took a fifth of the time.
    """
    weights, groups = groups_of_one(300)
    with tierstore.TierStore(None) as store:
        optimizer = muon.Muon(groups, store=store)
        stock = torch.optim.AdamW([{"params": [weight]} for weight in weights])
        for step in (optimizer.step, stock.step):
            step()  # The first one attaches the parameters.
        assert calls(optimizer.step) < 5 * calls(stock.step)


@pytest.mark.long
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="a page file for each group: to write and sync it takes 1.3 stock steps",
)
def test_many_groups_step_about_as_fast_as_in_torch_on_disk(tmp_path: Path) -> None:
    """At most 2 times is wanted; 5 times was measured."""
    weights, groups = groups_of_one(300)
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon(groups, store=store)
        stock = torch.optim.AdamW([{"params": [weight]} for weight in weights])
        ours, theirs = seconds(optimizer.step, stock.step)
    assert ours < 2 * theirs


@pytest.mark.long
def test_a_commit_of_5000_parameters_takes_less_than_30_ms(tmp_path: Path) -> None:
    """4 ms of the training thread were measured, and 15 ms when each count was encoded."""
    weights = [parameter(shape=[8]) for _ in range(5000)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon([{"params": weights, "algorithm": "adamw"}], store=store)
        store.register(random=tierstore.RandomState())
        found = []
        for _ in range(4):
            optimizer.step()
            started = time.thread_time()
            store.commit()
            found.append(time.thread_time() - started)
    assert min(found) < 0.03
