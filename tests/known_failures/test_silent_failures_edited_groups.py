"""Param groups that are edited after the first step.

Known failures: each test states the wanted behaviour and fails today.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.support.twins import Twins, refusal

Groups = list[dict[str, Any]]
Parameters = dict[str, nn.Parameter]

PLACES = pytest.mark.parametrize("place", ["memory", "disk"])


def open_store(place: str, directory: Path) -> tierstore.TierStore:
    return tierstore.TierStore(directory if place == "disk" else None)


def replace(groups: Groups, parameters: Parameters) -> None:
    groups[0]["params"][1] = parameters["new"]


def append(groups: Groups, parameters: Parameters) -> None:
    groups[0]["params"].append(parameters["new"])
    groups[0]["param_names"].append("new")


def remove(groups: Groups, parameters: Parameters) -> None:
    del groups[0]["params"][1]
    del groups[0]["param_names"][1]


def reverse_groups(groups: Groups, parameters: Parameters) -> None:
    groups.reverse()


def delete_last_group(groups: Groups, parameters: Parameters) -> None:
    del groups[1]


def assert_followed_or_refused(
    place: str, directory: Path, edit: Callable[[Groups, Parameters], None], name: str
) -> None:
    """Check the step after an edit: that of torch.optim, or refused before anything changes.

    A refusal names the parameter, and the next step of the groups as they were works.
    """
    with open_store(place, directory) as store:
        twins = Twins(
            [["first", "second"], ["third"]], rates=[0.5, 0.0], store=store, algorithm="adamw"
        )
        twins.step()
        twins.add("new")
        groups = twins.optimizer.param_groups
        original = [(group, list(group["params"]), list(group["param_names"])) for group in groups]
        for optimizer, parameters in twins.both:
            edit(optimizer.param_groups, parameters)
        twins.set_gradients()
        before = {key: values.detach().clone() for key, values in twins.ours.items()}
        refused = refusal(twins.optimizer.step)
        if refused is None:
            twins.stock.step()
            twins.assert_identical()
            return
        assert name in refused
        for key, values in twins.ours.items():
            assert torch.equal(values, before[key]), key
        groups[:] = [group for group, _, _ in original]
        for group, members, names in original:
            group["params"][:], group["param_names"][:] = members, names
        twins.optimizer.step()
        assert store.step == 2


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the step goes on with the parameters that the groups had at the first step",
)
@pytest.mark.parametrize(
    ("edit", "name"), [(replace, "second"), (append, "new"), (remove, "second")]
)
@PLACES
def test_a_parameter_that_is_exchanged_in_a_group_is_followed_or_refused(
    place: str, edit: Callable[[Groups, Parameters], None], name: str, tmp_path: Path
) -> None:
    assert_followed_or_refused(place, tmp_path, edit, name)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the group with lr 0 gets the lr of the other",
)
@PLACES
def test_groups_in_another_order_keep_their_learning_rates(place: str, tmp_path: Path) -> None:
    assert_followed_or_refused(place, tmp_path, reverse_groups, "third")


@pytest.mark.xfail(
    strict=True,
    raises=IndexError,
    reason="the sweep looks for the group that was deleted",
)
@PLACES
def test_a_deleted_group_is_followed_or_refused(place: str, tmp_path: Path) -> None:
    assert_followed_or_refused(place, tmp_path, delete_last_group, "third")


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="states are found by position, so each parameter shows the state of the other",
)
@PLACES
def test_parameters_in_another_order_keep_their_states(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(algorithm="adamw", store=store, named=False)
        twins.step()
        for optimizer, _ in twins.both:
            optimizer.param_groups[0]["params"].reverse()
        twins.set_gradients()
        refused = refusal(twins.optimizer.step)
        if refused is not None:
            assert "0." in refused  # How a parameter without a name is called.
            return
        twins.stock.step()
        for key, values in twins.ours.items():
            expected = twins.stock.state[twins.theirs[key]]["exp_avg"]
            assert torch.equal(twins.optimizer.state[values]["exp_avg"], expected), key
