"""Functions that torch.compile compiles and that step an optimizer or call a store."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import muon
import tierstore
from tests.support.twins import Twins

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ["io_uring", "libaio", "aiofiles"]


@pytest.fixture
def compiled() -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return a function that compiles a function."""
    torch.compiler.reset()
    counters.clear()
    yield lambda function: torch.compile(function, backend="eager")
    torch.compiler.reset()


@pytest.mark.parametrize("engine", ENGINES)
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
        assert store.committed.step == 2
        twins.assert_identical()


class Training:
    """A model of two layers, and its runs in a directory."""

    def __init__(self, directory: Path, engine: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        self.store = tierstore.TierStore(directory, engine=engine, **options)
        self.optimizer = muon.Muon(muon.param_groups(self.model, lr=0.1), store=self.store)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Do a whole step; return the loss."""
        loss: torch.Tensor = self.model(batch).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.store.commit()
        return loss.detach()


@pytest.mark.quick(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_training_step_has_the_same_bits(
    engine: str, compiled: Callable[..., Any], tmp_path: Path
) -> None:
    """Forward, backward, step and commit in one function; also resumed, by a compiled function."""
    plain = Training(tmp_path / "plain", engine)
    training = Training(tmp_path / "compiled", engine)
    batches = torch.randn(5, 8, 4)
    expected = [plain.step(batch) for batch in batches]
    step = compiled(training.step)
    losses = [step(batch) for batch in batches[:3]]
    compiled(training.store.close)()
    training = Training(tmp_path / "compiled", engine, resume=True)
    assert compiled(lambda: training.optimizer.restore())() == 3
    losses += [compiled(training.step)(batch) for batch in batches[3:]]
    assert list(map(torch.equal, losses, expected)) == [True] * 5
    for one, other in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    training.store.close()
    plain.store.close()


@pytest.mark.quick(7)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "call",
    [
        lambda store, optimizer: optimizer.prefetch(),
        lambda store, optimizer: optimizer.restore(),
        lambda store, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda store, optimizer: store.pages.write_states(store.pages.read_states()),
        lambda store, optimizer: store.move("host"),
        lambda store, optimizer: store.commit(),
        lambda store, optimizer: store.synchronize(),
        lambda store, optimizer: store.stats(),
    ],
    ids=["prefetch", "restore", "state_dict", "states", "move", "commit", "synchronize", "stats"],
)
def test_a_compiled_function_may_call_the_store(
    call: Callable[..., Any],
    engine: str,
    compiled: Callable[..., Callable[[], Any]],
    tmp_path: Path,
) -> None:
    with tierstore.TierStore(tmp_path / "run", engine=engine) as store:
        twins = Twins(store=store)
        twins.step()
        twins.step()
        store.synchronize()
        compiled(lambda: call(store, twins.optimizer))()
        twins.step()
        assert store.step == 3
        twins.assert_identical()


def test_a_compiled_function_may_publish(compiled: Callable[..., Any], tmp_path: Path) -> None:
    training = Training(tmp_path / "run", "aiofiles")
    training.step(torch.ones(1, 4))
    compiled(lambda: training.store.checkpoint(tmp_path / "checkpoint", training.model))()
    training.store.close()
    training = Training(tmp_path / "new", "aiofiles")
    assert compiled(lambda: training.optimizer.restore(tmp_path / "checkpoint"))() == 1
    training.store.close()


def test_nothing_inside_of_a_step_is_compiled(
    compiled: Callable[..., Callable[[], Any]], tmp_path: Path
) -> None:
    """Steps compile nothing after the first two, and the compiler sees no frame of the store."""
    with tierstore.TierStore(tmp_path) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        twins = Twins(store=store)
        step = compiled(lambda: twins.optimizer.step())
        found = []
        for _ in range(4):
            twins.set_gradients()
            step()
            found.append(counters["frames"]["total"])
    assert found[-1] == found[1] < 12
    assert not [reason for reason in counters["graph_break"] if "coroutine" in reason]


_ALONE = """
import sys, muon, torch, tierstore
with tierstore.TierStore(None) as store:
    parameter = tierstore.pages.PagedParameter(name="one", tensor=torch.nn.Parameter(torch.ones(2)))
    store.pages.attach([tierstore.pages.PagedGroup(parameters=[parameter], hyperparameters={})])
    parameter.tensor.grad = torch.ones(2)
    with store.pages.sweep() as pages:
        list(pages)
muon.Muon([{"params": [parameter.tensor], "algorithm": "adamw"}]).step()
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.long
def test_neither_a_store_nor_a_step_loads_the_compiler() -> None:
    """Its import takes seconds."""
    subprocess.run([sys.executable, "-c", _ALONE], cwd=ROOT, check=True)
