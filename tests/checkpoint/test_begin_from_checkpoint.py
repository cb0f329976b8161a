"""restore(checkpoint=): a new run from a published checkpoint, or from one of stock DCP."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)

import muon
import tierstore
from tests.support import training
from tests.support.published import (
    Ours,
    Reference,
    assert_equal,
    digests,
    pages_of,
    published_toy,
    read_with_stock,
    save_with_dcp,
)
from tests.support.stock_reader import Layers
from tests.support.toy import RANK, Toy, resumed, train_and_die

DTYPES = [torch.float32, torch.bfloat16]


def begin(
    directory: Path, checkpoint: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[tierstore.TierStore, muon.Muon, dict[str, nn.Parameter]]:
    """A run of the model of tests/support/training.py from a checkpoint of it."""
    parameters = training.make_parameters(dtype, seed=7)
    store = tierstore.TierStore(directory, **{"page_bytes": 10000, **options})
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    training.make_scheduler(optimizer)
    optimizer.restore(checkpoint=checkpoint)
    return store, optimizer, parameters


@pytest.mark.quick(2)
@pytest.mark.parametrize("page_bytes", [10000, 5000, "256MiB"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_continues_as_the_published_run(
    dtype: torch.dtype, page_bytes: int | str, tmp_path: Path
) -> None:
    """Whatever page size the new run has, it equals a run that was never stopped."""
    parameters = training.make_parameters(dtype)
    store = tierstore.TierStore(tmp_path / "run", page_bytes=10000)
    optimizer = muon.Muon(training.make_groups(parameters), store=store)
    scheduler = training.make_scheduler(optimizer)
    training.train(optimizer, parameters, range(1, 6), scheduler=scheduler)
    store.register(scheduler=scheduler, seen={5: [torch.arange(3)]})
    store.commit()
    store.checkpoint(tmp_path / "checkpoint")
    store.close()

    parameters = training.make_parameters(dtype, seed=7)
    with tierstore.TierStore(tmp_path / "new", page_bytes=page_bytes) as store:
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        scheduler = training.make_scheduler(optimizer)
        seen: dict[int, Any] = {7: "another"}
        store.register(scheduler=scheduler, seen=seen)
        assert optimizer.restore(checkpoint=tmp_path / "checkpoint") == store.step == 5
        assert_equal(seen, {5: [torch.arange(3)]})
        store.register(scheduler=None, seen=None)
        training.assert_identical(
            training.snapshot(optimizer, parameters), training.resident_run(5, dtype)
        )
        training.train(optimizer, parameters, range(6, 10), scheduler=scheduler)
        training.assert_identical(
            training.snapshot(optimizer, parameters), training.resident_run(9, dtype)
        )
    shutil.rmtree(tmp_path / "checkpoint")  # The new run needs nothing of it.
    with tierstore.TierStore(tmp_path / "new", resume=True) as store:
        parameters = training.make_parameters(dtype, seed=8)
        optimizer = muon.Muon(training.make_groups(parameters), store=store)
        assert optimizer.restore() == 9
        training.assert_identical(
            training.snapshot(optimizer, parameters), training.resident_run(9, dtype)
        )


def test_buffers_and_frozen_parameters_come_with_dcp(tmp_path: Path) -> None:
    """restore() loads what is paged; DCP loads the rest of the model."""
    ours = Ours(tmp_path / "run", "everything").train(1, 2)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    other = Ours(tmp_path / "other", "everything", seed=3)
    before = other.model.frozen.weight.clone()
    other.optimizer.restore(checkpoint=tmp_path / "checkpoint")
    assert torch.equal(other.model.frozen.weight, before)
    state = {"model": other.model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    other.model.load_state_dict(state["model"])
    other.train(3)
    other.store.close()
    assert_equal(other.model.state_dict(), Reference("everything").train(1, 2, 3).model_state())


@pytest.mark.quick(3)
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_continues_from_a_checkpoint_of_stock_pytorch(
    named: bool, flat: bool, prefix: bool, tmp_path: Path
) -> None:
    reference = Reference("everything", named=named).train(1, 2, 3)
    reference.optimizers[0].param_groups[0]["lr"] = 0.125
    save_with_dcp(reference, tmp_path / "stock", flat=flat, prefix=prefix)
    ours = Ours(tmp_path / "run", "everything", seed=3)
    assert ours.optimizer.restore(checkpoint=tmp_path / "stock") == 3
    groups = ours.optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.125, 0.004]
    assert [group["algorithm"] for group in groups] == ["muon", "adamw"]
    ours.model.load_state_dict(reference.model.state_dict())  # Buffers and frozen parameters.
    for step in (4, 5, 6):
        assert_equal(ours.train(step).model.state_dict(), reference.train(step).model_state())
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    again = Ours(tmp_path / "again", "everything", seed=4)
    assert again.optimizer.restore(checkpoint=tmp_path / "checkpoint") == 6
    again.store.close()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_continues_from_a_checkpoint_of_fsdp2(ranks: int, tmp_path: Path) -> None:
    """Several ranks saved it in chunks."""
    path = str(tmp_path / "stock")
    found = read_with_stock(
        [("saved", "save", {"path": path, "model": "layers", "steps": [1, 2, 3]})],
        tmp_path / "saver",
        ranks=ranks,
    )["saved"]
    ours = Ours(tmp_path / "run", seed=3, page_bytes=5000)
    assert ours.optimizer.restore(checkpoint=tmp_path / "stock") == 3
    states = ours.store.pages.read_states()
    parameters = dict(ours.model.named_parameters())
    for name, parameter in parameters.items():
        assert_equal(parameter.detach(), found["model"][name], name)
        for state, tensor in states[name].items():
            assert_equal(tensor, found["optimizer"][f"state.{name}.{state}"], name)
    # Stock optimizers in one process go on from the same tensors.
    reference = Reference("layers")
    load_into(reference, tmp_path / "stock")
    assert_equal(reference.model_state(), found["model"])
    ours.model.load_state_dict(reference.model.state_dict())
    for step in (4, 5):
        assert_equal(ours.train(step).model.state_dict(), reference.train(step).model_state())
    ours.store.close()


def load_into(reference: Reference, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    state = {
        "model": reference.model.state_dict(),
        "optimizer": get_optimizer_state_dict(reference.model, reference.optimizers),
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    reference.model.load_state_dict(state["model"])
    set_optimizer_state_dict(reference.model, reference.optimizers, state["optimizer"])


def test_muon_alone_has_no_step_count(tmp_path: Path) -> None:
    """Its stock state is only the momentum: the new run begins at step 0, with that momentum."""
    models = [nn.Linear(5, 4, bias=False) for _ in range(3)]
    reference = torch.optim.Muon(models[0].parameters())

    def step(optimizer: torch.optim.Optimizer, model: nn.Module, seed: int) -> None:
        grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model.get_parameter("weight").grad = grad
        optimizer.step()

    for seed in range(3):
        step(reference, models[0], seed)
    optimizer_state = get_optimizer_state_dict(models[0], reference)
    state = {"model": models[0].state_dict(), "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    with tierstore.TierStore(tmp_path / "run") as store:
        optimizer = muon.Muon(muon.param_groups(models[1]), store=store)
        assert optimizer.restore(checkpoint=tmp_path / "stock") == 0
        store.synchronize()
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        optimizer = muon.Muon(muon.param_groups(models[2]), store=store)
        assert optimizer.restore() == 0
        for seed in range(3, 5):
            step(optimizer, models[2], seed)
            step(reference, models[0], seed)
            assert torch.equal(models[2].weight, models[0].weight)


def test_masters_of_a_bf16_model_come_from_an_fp32_one(tmp_path: Path) -> None:
    """The masters of a float32 checkpoint are not rounded."""
    ours = Ours(tmp_path / "run").train(1, 2)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    other = Ours(tmp_path / "other", dtype=torch.bfloat16, seed=3)
    other.optimizer.restore(checkpoint=tmp_path / "checkpoint")
    states = other.store.pages.read_states()
    for name, parameter in other.model.named_parameters():
        expected = ours.model.get_parameter(name).detach()
        assert_equal(states[name]["master"], expected, name)
        assert_equal(parameter.detach(), expected.bfloat16(), name)
    other.store.close()


def test_model_with_everything_in_module(tmp_path: Path) -> None:
    """Its names begin like the names of a wrapped model."""
    models = [nn.Module() for _ in range(2)]
    for model in models:
        model.module = Layers()
    ours = Ours(tmp_path / "run", model=models[0])
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    ours.optimizer.step()
    ours.store.checkpoint(tmp_path / "given", model=models[0])
    ours.store.checkpoint(tmp_path / "not given")
    ours.store.close()
    for name in ("given", "not given"):
        other = Ours(tmp_path / f"from {name}", model=models[1])
        for parameter in models[1].parameters():
            parameter.data.zero_()
        assert other.optimizer.restore(checkpoint=tmp_path / name) == 1
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)
        other.store.close()


@pytest.mark.parametrize("wrapper", [torch.compile, nn.DataParallel])
def test_a_wrapped_or_an_unwrapped_model(
    wrapper: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    ours = Ours(tmp_path / "run").train(1)
    ours.store.checkpoint(tmp_path / "checkpoint", model=ours.model)
    ours.store.close()
    other = Ours(tmp_path / "other", model=wrapper(Layers()))
    assert other.optimizer.restore(checkpoint=tmp_path / "checkpoint") == 1
    for mine, theirs in zip(other.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other.store.close()


# ------------------------------------------------------------------------ crash and restart


def test_the_first_commit_holds_the_loaded_state(tmp_path: Path) -> None:
    checkpoint = published_toy(tmp_path)
    toy = Toy(tmp_path / "run")
    assert toy.store.restore(checkpoint=checkpoint) == 3
    assert toy.store.committed.step == 0
    toy.store.synchronize()
    assert toy.store.committed.step == 3
    toy.store.close()
    train_and_die(tmp_path / "run", ["step", "synchronize"])
    toy = resumed(tmp_path / "run", 4)
    toy.store.close()
    # It was another run that the checkpoint was published from.
    runs = [(tmp_path / name / RANK / "run.json").read_bytes() for name in ("origin", "run")]
    assert runs[0] != runs[1]


def test_a_crash_before_the_first_commit_leaves_a_new_run(tmp_path: Path) -> None:
    """Nothing was committed, so the same program loads the checkpoint again."""
    checkpoint = published_toy(tmp_path)
    Toy(tmp_path / "run").store.restore(checkpoint=checkpoint)
    shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    toy = Toy(tmp_path / "crashed", resume=True)
    assert toy.store.restore() == 0
    assert toy.store.restore(checkpoint=checkpoint) == 3
    toy.step()
    toy.store.close()
    resumed(tmp_path / "crashed", 4).store.close()


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    """The loaded state can be published again, by the new run."""
    checkpoint = published_toy(tmp_path)
    toy = Toy(tmp_path / "run")
    toy.store.restore(checkpoint=checkpoint)
    toy.store.checkpoint(tmp_path / "again")
    assert not {p.stat().st_ino for p in pages_of(checkpoint)} & {
        p.stat().st_ino for p in pages_of(tmp_path / "again")
    }
    toy.store.close()


def test_published_files_are_only_read(tmp_path: Path) -> None:
    checkpoint = published_toy(tmp_path)
    before = digests(checkpoint)
    toy = Toy(tmp_path / "run")
    toy.store.restore(checkpoint=checkpoint)
    for _ in range(4):
        toy.step()
    toy.assert_at(7)
    toy.store.close()
    assert digests(checkpoint) == before
