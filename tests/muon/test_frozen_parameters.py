"""Parameters that are frozen during a run: they stay in it with their values and states."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.killed_processes import _processes
from tests.support.references import assert_same

FROZEN_AT, KILLED_AT, THAWED_AT, LAST = 2, 4, 6, 7


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)]
    return nn.Sequential(*layers, nn.Linear(8, 12))


def freeze(model: nn.Sequential, is_frozen: bool) -> None:
    """Freeze a matrix of Muon, with its bias, and vectors of AdamW."""
    for layer in (model[1], model[3]):
        layer.requires_grad_(not is_frozen)


def train(model: nn.Sequential, optimizer: muon.Muon, first: int, last: int) -> None:
    """Do steps ``first`` to ``last``; the layers are frozen between two of them."""
    for step in range(first, last + 1):
        freeze(model, FROZEN_AT < step < THAWED_AT)
        generator = torch.Generator().manual_seed(step)
        # Linear, so that gradients are the same bits in every process.
        factors = [torch.randn(each.shape, generator=generator) for each in model.parameters()]
        products = zip(model.parameters(), factors, strict=True)
        optimizer.zero_grad()
        sum((each * factor).sum() for each, factor in products).backward()
        optimizer.step()


def train_and_end(directory: Path, is_killed: bool) -> None:
    """Commit KILLED_AT steps, and end in the middle of the run."""
    model, store = make_model(), tierstore.TierStore(directory, page_bytes=4096)
    train(model, muon.Muon(muon.param_groups(model), store=store), 1, KILLED_AT)
    store.commit()
    store.synchronize()
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    store.__exit__(RuntimeError)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """A run that an error has ended while layers were frozen."""
    train_and_end(tmp_path / "run", False)
    return tmp_path / "run"


def state_of(model: nn.Sequential, optimizer: muon.Muon) -> Any:
    return [dict(model.state_dict()), optimizer.state_dict()["state"]]


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_run_ends_and_is_resumed_with_frozen_layers(is_killed: bool, tmp_path: Path) -> None:
    """As one that did not end and has no store, also once the layers are trained again."""
    process = _processes.Process(target=train_and_end, args=(tmp_path, is_killed))
    if is_killed:
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    else:
        train_and_end(tmp_path, False)
    expected = make_model()
    reference = muon.Muon(muon.param_groups(expected))
    train(expected, reference, 1, KILLED_AT)
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)  # What is not restored would be seen.
    with tierstore.TierStore(tmp_path, resume=True) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        freeze(model, True)
        assert optimizer.restore() == KILLED_AT
        assert_same(state_of(model, optimizer), state_of(expected, reference))
        train(expected, reference, KILLED_AT + 1, LAST)
        train(model, optimizer, KILLED_AT + 1, LAST)
        assert_same(state_of(model, optimizer), state_of(expected, reference))


def test_a_frozen_layer_is_in_the_checkpoint_of_the_run(ended: Path, tmp_path: Path) -> None:
    expected = make_model()
    train(expected, muon.Muon(muon.param_groups(expected)), 1, KILLED_AT)
    model = make_model()
    with tierstore.TierStore(ended, resume=True) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        optimizer.restore()
        store.checkpoint(tmp_path / "published", model)
    again = make_model()
    with tierstore.TierStore(tmp_path / "new") as store:
        optimizer = muon.Muon(muon.param_groups(again), store=store)
        assert optimizer.restore(checkpoint=tmp_path / "published") == KILLED_AT
    assert_same(dict(again.state_dict()), dict(expected.state_dict()))


def test_a_layer_that_was_frozen_before_the_groups_were_made_is_refused(ended: Path) -> None:
    model = make_model()
    freeze(model, True)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    with tierstore.TierStore(ended, resume=True) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        with pytest.raises(
            tierstore.RunMismatchError,
            match=r"lacks 4 parameters \('1\.weight', .*freeze parameters after that",
        ):
            optimizer.restore()
    assert_same(dict(model.state_dict()), before)


def test_a_new_run_tells_which_trained_parameters_it_leaves_out(
    ended: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    with tierstore.TierStore(ended, resume=True) as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        optimizer.restore()
        store.checkpoint(tmp_path / "published", model)
    freeze(model, True)
    caplog.set_level(logging.WARNING)
    with tierstore.TierStore(tmp_path / "new") as store:
        optimizer = muon.Muon(muon.param_groups(model), store=store)
        assert optimizer.restore(checkpoint=tmp_path / "published") == KILLED_AT
    text = "4 parameters ('1.bias', '1.weight', '3.bias', ...) that are in no param group here"
    assert text in caplog.text
