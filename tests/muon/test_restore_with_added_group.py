"""restore() with a group that was added after the commit: the others go back, it begins anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support.twins import Twins

Act = Callable[[Twins, tierstore.TierStore], Any]

MEMORIES: list[dict[str, Any]] = [{}, {"buffers": 3}, {"commit_every": 2, "buffers": 3}]


def read(twins: Twins, store: tierstore.TierStore) -> None:
    assert not twins.optimizer.state[twins.ours["new"]]["exp_avg"].any()


def step(twins: Twins, store: tierstore.TierStore) -> None:
    twins.set_gradients()
    twins.optimizer.step()


def fail(twins: Twins, store: tierstore.TierStore) -> None:
    """Leave a step after its first page, which is stepped."""
    twins.set_gradients()
    with pytest.raises(tierstore.SweepError), store.pages.sweep() as pages:
        next(iter(pages)).shards[0].chunks[0].master.add_(1)


def restore(twins: Twins, store: tierstore.TierStore) -> None:
    assert twins.optimizer.restore() == 2


ORDERS: dict[str, Sequence[Act]] = {
    "added": [],
    "read": [read],
    "stepped": [step],
    "read, failed": [read, fail],
    "failed": [fail],
    "restored before": [read, restore, step],
}


def compare(twins: Twins) -> None:
    twins.assert_identical()
    for name, ours in twins.ours.items():
        expected = twins.stock.state[twins.theirs[name]]
        for state, value in twins.optimizer.state[ours].items():
            assert torch.equal(value, expected[state]), (name, state)


@pytest.mark.quick(12)
@pytest.mark.parametrize("acts", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("options", MEMORIES, ids=["resting", "streamed", "every second"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_added_group_begins_anew(
    acts: Sequence[Act], options: dict[str, Any], is_resumed: bool, tmp_path: Path
) -> None:
    names = [["first", "second"], ["third"]]
    store = tierstore.TierStore(tmp_path, **options)
    twins = Twins(names, rates=[0.5, 0.25], store=store, algorithm="adamw")
    twins.step()
    twins.step()
    if is_resumed:
        store.close()
        store = tierstore.TierStore(tmp_path, resume=True, **options)
        twins.optimizer = muon.Muon(twins.optimizer.param_groups, store=store)
        twins.optimizer.restore()
    store.synchronize()
    committed = deepcopy(twins.stock.state_dict()), deepcopy(twins.theirs)
    for name in ("new", "newer"):
        twins.add(name)
    twins.optimizer.add_param_group(
        {
            "params": [(name, twins.ours[name]) for name in ("new", "newer")],
            "algorithm": "adamw",
            "lr": 0.125,
        }
    )
    for act in acts:
        act(twins, store)
    restore(twins, store)
    stock_state, values = committed
    with torch.no_grad():
        for name, parameter in twins.theirs.items():
            parameter.copy_(values[name] if name in values else twins.ours[name])
    twins.stock.load_state_dict(stock_state)
    late = [(name, each) for name, each in twins.theirs.items() if name not in values]
    twins.stock.add_param_group({"params": late, "lr": 0.125})
    twins.assert_identical()
    for _ in range(3):
        twins.step()
    compare(twins)
    store.close()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        groups = [
            {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
            for group in twins.optimizer.param_groups
        ]
        twins.optimizer = muon.Muon(groups, store=store)
        assert twins.optimizer.restore() == 5
        twins.step()
        compare(twins)


def test_a_resumed_run_has_the_groups_of_its_commit(tmp_path: Path) -> None:
    """A group that is added before restore() is not one that was added later."""
    with tierstore.TierStore(tmp_path) as store:
        Twins(store=store).step()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        twins = Twins([["first", "second"], ["new"]], rates=[0.5, 0.5], store=store)
        with pytest.raises(tierstore.RunMismatchError, match=r"has further 1 parameters \('new'\)"):
            twins.optimizer.restore()


def test_the_lr_of_a_group_that_no_commit_has_may_change_after_a_restore(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins([["first"]], rates=[0.5], store=store, algorithm="adamw")
        twins.step()
        store.synchronize()
        twins.add("new")
        twins.optimizer.add_param_group({"params": [("new", twins.ours["new"])], "lr": 0.25})
        assert twins.optimizer.restore() == 1
        twins.optimizer.param_groups[1]["lr"] = 0.125
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twins.optimizer.step()
