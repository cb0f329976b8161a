"""Compiled steps, steps of many parameters, and defaults.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.twins import Twins

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
