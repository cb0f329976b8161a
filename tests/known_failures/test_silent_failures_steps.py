"""Compiled steps, steps of many parameters, and defaults.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.twins import Twins, parameter

# ------------------------------------------------------------------------- compiled steps


@pytest.fixture
def compiled() -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
    """Return what compiles a function."""
    torch.compiler.reset()
    yield lambda function: torch.compile(function, backend="eager")
    torch.compiler.reset()


@pytest.mark.parametrize("engine", ["io_uring", "aiofiles"])
def test_a_compiled_function_may_step(
    engine: str, compiled: Callable[..., Callable[[], Any]], tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path, engine=engine) as store:
        twins = Twins([["first"]], store=store)
        step = compiled(lambda: twins.optimizer.step())
        for _ in range(2):
            twins.set_gradients()
            step()
            twins.stock.step()
        store.synchronize()
        assert store.committed_step == 2
        twins.assert_identical()


@pytest.mark.parametrize(
    "call",
    [
        "prefetch",
        pytest.param(
            "restore",
            marks=pytest.mark.xfail(
                strict=True, raises=AssertionError, reason="the compiler traces a coroutine"
            ),
        ),
    ],
)
def test_a_compiled_function_may_call_the_store(
    call: str, compiled: Callable[..., Callable[[], Any]], tmp_path: Path
) -> None:
    with tierstore.TierStore(tmp_path, engine="aiofiles", buffers=2) as store:
        twins = Twins(store=store)
        twins.step()
        twins.step()
        compiled(lambda: getattr(twins.optimizer, call)())()
        twins.step()
        assert store.step == 3
        twins.assert_identical()


# ------------------------------------------------------------------------ many small parameters


def seconds(*functions: Callable[[], Any]) -> list[float]:
    """Return the shortest of some times that each takes, one after the other."""
    found = []
    for _ in range(4):
        for function in functions:
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return [min(found[index :: len(functions)]) for index in range(len(functions))]


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the time goes with the number of parameters"
)
def test_many_small_parameters_step_about_as_fast_as_foreach() -> None:
    """At most 1.5 times is wanted; today it is about 6 times."""
    weights = [parameter(shape=[64]) for _ in range(1000)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = muon.Muon([{"params": weights, "algorithm": "adamw"}])
    stock = torch.optim.AdamW(weights, foreach=True)
    ours, theirs = seconds(optimizer.step, stock.step)
    assert ours < 3 * theirs


@pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="the time goes with the number of groups"
)
def test_many_groups_step_about_as_fast_as_in_torch(tmp_path: Path) -> None:
    """At most 2 times is wanted; today it is about 12 times."""
    weights = [parameter(shape=[64]) for _ in range(300)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with tierstore.TierStore(tmp_path) as store:
        optimizer = muon.Muon(
            [{"params": [weight], "algorithm": "adamw"} for weight in weights], store=store
        )
        stock = torch.optim.AdamW([{"params": [weight]} for weight in weights])
        ours, theirs = seconds(optimizer.step, stock.step)
    assert ours < 5 * theirs
