"""The container and the checkpointer of torchtitan, in a loop with the calls of its Trainer.

tests/peers/test_trainers.py has the Trainer itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import tierstore
from muon.integrations.torchtitan import MuonContainer
from tests.support.attempts import attempt
from tests.support.fake_cuda import fake_cuda
from tests.support.rank_pool import RankPool
from tests.support.titan_loop import Batches, Loop
from tierstore.integrations.torchtitan import Checkpointer, Container


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(directory: Path, steps: int, cls: Any = None) -> Loop:
    loop = Loop(tierstore.TierStore(directory, resume=True), cls=cls)
    loop.train(steps)
    loop.checkpointer.close()
    return loop


@pytest.mark.parametrize("cls", [None, torch.optim.Adamax])
def test_a_run_continues_with_all_that_its_commit_has(cls: Any, tmp_path: Path) -> None:
    """With Muon, and with a class of torch."""
    whole = train(tmp_path / "whole", 6, cls)
    train(tmp_path / "run", 2, cls)
    resumed = train(tmp_path / "run", 6, cls)
    assert resumed.state_dict() == {"step": 6, "seen": 24}
    assert all(map(torch.equal, resumed.values, whole.values))


def test_gradients_that_left_are_clipped(tmp_path: Path) -> None:
    """With the norms and weights of gradients that stay."""
    found = []
    for name, options in {"stay": {}, "leave": {"offload_gradients": "backward"}}.items():
        with fake_cuda():
            loop = Loop(tierstore.TierStore(tmp_path / name, **options), max_norm=0.01)
            loop.train(4)
            loop.checkpointer.close()
        found.append(loop)
    left, stayed = found
    assert left.norms == stayed.norms
    assert min(left.norms) > 0.01
    assert all(map(torch.equal, left.values, stayed.values))


@pytest.mark.parametrize("closed", ["while it is handled", "afterwards"])
def test_an_exception_within_a_step_loses_that_step_alone(closed: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4)
    loop = Loop(tierstore.TierStore(tmp_path / "run", resume=True))
    try:
        loop.train(4, fails_at=3)
    except RuntimeError:
        if closed == "while it is handled":
            loop.checkpointer.close()
    loop.checkpointer.close()
    loop = Loop(tierstore.TierStore(tmp_path / "run", resume=True))
    assert loop.checkpointer.load()
    assert loop.state_dict() == {"step": 2, "seen": 8}
    loop.checkpointer.close()
    assert all(map(torch.equal, train(tmp_path / "run", 4).values, whole.values))


def test_steps_that_are_not_due_are_committed_at_the_end(tmp_path: Path) -> None:
    """Also if the program handles an exception that is not ours."""
    try:
        raise KeyError
    except KeyError:
        loop = Loop(tierstore.TierStore(tmp_path, commit_every=5))
        loop.train(3)
        loop.checkpointer.close()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        assert store.committed.step == 3


def test_checkpoints_are_published(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        loop.checkpointer = Checkpointer(loop, folder=folder, interval=2, keep_last=2)
        loop.train(5)
        assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-5"]
        found = {name: torch.zeros_like(p) for name, p in loop.model_parts[0].state_dict().items()}
        dcp.load(found, checkpoint_id=folder / "step-5", no_dist=True)  # torchtitan's keys.
        for name, value in loop.model_parts[0].state_dict().items():
            assert torch.equal(found[name], value)
    with tierstore.TierStore(tmp_path / "another run") as store:  # It replaces them.
        loop = Loop(store)
        loop.checkpointer = Checkpointer(loop, folder=folder, interval=4)
        loop.train(4)
        dcp.load(found, checkpoint_id=folder / "step-4", no_dist=True)
        assert torch.equal(found["0.weight"], loop.model_parts[0].state_dict()["0.weight"])


def test_hooks_of_the_container_and_its_calls(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        loop = Loop(store)
        container, calls = loop.optimizers, list[str]()
        container.register_step_pre_hook(lambda *_: calls.append("before"))
        container.register_step_post_hook(lambda *_: calls.append("after"))
        assert not loop.checkpointer.load()
        loop.model_parts[0](next(loop.dataloader)).sum().backward()
        container.step()
        assert calls == ["before", "after"]
        assert store.step == 1
        assert len(container) == len(list(container)) == 1
        container.zero_grad()
        assert all(parameter.grad is None for parameter in loop.model_parts[0].parameters())


def test_the_store_decides_where_training_continues(tmp_path: Path) -> None:
    train(tmp_path, 2)
    loop = Loop(tierstore.TierStore(tmp_path, resume=True))
    raised = attempt(lambda: loop.checkpointer.load(step=1))
    assert raised.startswith(
        "ValueError: step 1 conflicts with the store, which continues from its step 2"
    )
    assert loop.checkpointer.load(step=2)
    assert loop.optimizers.state_dict() == {"tierstore_step": 2}
    loop.optimizers.load_state_dict({"tierstore_step": 2})
    for other in ({"tierstore_step": 1}, {"state.weight.momentum_buffer": torch.ones(1)}):
        with pytest.raises(
            ValueError, match="conflicts with the store, which continues from its step 2"
        ):
            loop.optimizers.load_state_dict(other)
    loop.checkpointer.close()


def test_a_run_of_another_program_is_refused(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        loop = Loop(store)
        loop.model_parts[0](next(loop.dataloader)).sum().backward()
        loop.optimizers.step()
        store.register(own={"at": 1})
        store.commit()
    loop = Loop(tierstore.TierStore(tmp_path, resume=True))
    with pytest.raises(ValueError, match="step 1 of the store was not committed by a Trainer"):
        loop.checkpointer.load()


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_continue_where_they_were(ranks: int, pool: RankPool, tmp_path: Path) -> None:
    """After an exception between a step and its commit, and refused in between on other ranks."""
    work = "tests.rank_programs.titan:train"
    whole = pool.run(ranks, work, tmp_path / "whole", 4)
    assert pool.run(ranks, work, tmp_path / "run", 4, 3) == ["RuntimeError: at step 3"] * ranks
    refused = pool.run(3, work, tmp_path / "run", 4)
    text = "was committed by a Trainer with this checkpointer of another number of processes"
    assert all(text in str(each) for each in refused)
    found = pool.run(ranks, work, tmp_path / "run", 4)
    for one, other in zip(found, whole, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_rewind_by_a_program_that_carries_the_states_along(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 5)
    with tierstore.TierStore(tmp_path / "run") as store:
        loop = Loop(store)
        loop.checkpointer = Checkpointer(loop, folder=tmp_path, interval=2)
        loop.train(4)
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        loop = Loop(store)
        store.register(**{name: {} for name in store.committed.states})
        assert next(iter(loop.optimizers)).restore(tmp_path / "step-2", rewind=True) == 2
    resumed = train(tmp_path / "run", 5)
    assert resumed.state_dict() == {"step": 5, "seen": 20}
    assert all(map(torch.equal, resumed.values, whole.values))


def test_a_loop_with_one_object_more_or_less(tmp_path: Path) -> None:
    train(tmp_path, 2)
    more = {"a": 1}
    loop = Loop(tierstore.TierStore(tmp_path, resume=True))
    loop.optimizers.store.register(more=more)
    with pytest.warns(UserWarning, match="step 2 was committed without 'more'"):
        loop.train(3)
    loop.checkpointer.close()
    loop = Loop(tierstore.TierStore(tmp_path, resume=True))
    with pytest.raises(ValueError, match=r"step 3 was committed with 'more'.*\(more=None\)"):
        loop.checkpointer.load()
    loop.optimizers.store.register(more=None)
    loop.train(4)
    loop.checkpointer.close()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        assert store.committed.step == 4
        assert "more" not in store.committed.states


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        loop = Loop(store)
        with pytest.raises(ValueError, match="interval=5 needs a folder"):
            Checkpointer(loop, interval=5)
        with pytest.raises(ValueError, match="parameters of one model part, got 2"):
            MuonContainer([nn.Linear(2, 2), nn.Linear(2, 2)], store=store)
        with pytest.raises(TypeError, match="SGD has no TierStore"):
            Container(loop.model_parts, torch.optim.SGD(loop.model_parts[0].parameters()))
        loop.dataloader = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match="the Trainer has no dataloader"):
            Checkpointer(loop)
        loop.dataloader = Batches()
        loop.checkpointer.load()
        loop.model_parts[0](next(loop.dataloader)).sum().backward()
        loop.optimizers.step()
        with pytest.raises(ValueError, match="the store is at step 1 already"):
            Checkpointer(loop)
        loop.optimizers = torch.optim.SGD(loop.model_parts[0].parameters())
        with pytest.raises(TypeError, match="must be a Container of a store, got SGD"):
            Checkpointer(loop)
