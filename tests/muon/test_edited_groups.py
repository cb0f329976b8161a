"""Edits of param groups after the first step: followed, or refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.support.rank_pool import RankPool
from tests.support.references import assert_same
from tests.support.twins import PLACES, Twins, open_store, parameter

Groups = list[dict[str, Any]]
Parameters = dict[str, nn.Parameter]


def replace(groups: Groups, parameters: Parameters) -> None:
    groups[0]["params"][1] = parameters["new"]


def replace_under_its_name(groups: Groups, parameters: Parameters) -> None:
    groups[0]["params"][1] = nn.Parameter(parameters["second"].detach().clone())


def append(groups: Groups, parameters: Parameters) -> None:
    groups[0]["params"].append(parameters["new"])
    groups[0]["param_names"].append("new")


def remove(groups: Groups, parameters: Parameters) -> None:
    del groups[0]["params"][1]
    del groups[0]["param_names"][1]


def delete_last_group(groups: Groups, parameters: Parameters) -> None:
    del groups[1]


@PLACES
def test_parameters_in_another_order_keep_their_states(place: str, tmp_path: Path) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(algorithm="adamw", store=store, named=False)
        twins.step()
        for optimizer, _ in twins.both:
            optimizer.param_groups[0]["params"].reverse()
        twins.step()
        for key, values in twins.ours.items():
            expected = twins.stock.state[twins.theirs[key]]["exp_avg"]
            assert torch.equal(twins.optimizer.state[values]["exp_avg"], expected), key


def appended_group(optimizer: torch.optim.Optimizer, *parameters: nn.Parameter) -> dict[str, Any]:
    """Return a group as a user may write it by hand, with the keys that torch.optim needs."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if "param" not in key}
    return {**group, "params": list(parameters), "lr": 0.25}


@PLACES
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_reorders_and_a_group_by_hand_are_followed(
    place: str, algorithm: str, tmp_path: Path
) -> None:
    """Parameters keep their names, so a run resumes with the groups in their first order."""
    names = [["first", "second"], ["third"]]
    rates = [0.5, 0.125]
    with open_store(place, tmp_path) as store:
        twins = Twins(names, rates=rates, store=store, algorithm=algorithm)
        twins.step()
        twins.add("new")
        for optimizer, parameters in twins.both:
            groups = optimizer.param_groups
            groups[0]["params"].reverse()
            groups.reverse()
            groups.append(appended_group(optimizer, parameters["new"]))
            groups[0] = {**groups[0], "lr": 0.0625}
        twins.optimizer.param_groups[2]["param_names"] = ["new"]
        twins.step()
        twins.assert_identical()
        saved = twins.optimizer.state_dict()
        assert_same(saved["state"], twins.stock.state_dict()["state"])
        assert [group["param_names"] for group in saved["param_groups"]] == [
            ["third"],
            ["second", "first"],
            ["new"],
        ]
        twins.optimizer.load_state_dict(twins.stock.state_dict())
        twins.step()
        twins.assert_identical()
    if place == "memory":
        return
    with tierstore.TierStore(tmp_path, resume=True) as store:
        again = Twins([*names, ["new"]], rates=[1, 1, 1], store=store, algorithm=algorithm)
        assert again.optimizer.restore() == 3
        assert [group["lr"] for group in again.optimizer.param_groups] == [0.5, 0.0625, 0.25]
        for name, values in again.ours.items():
            assert torch.equal(values, twins.theirs[name]), name


def test_a_dict_put_in_place_of_a_group_is_restored(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        groups = twins.optimizer.param_groups
        groups[0] = {**groups[0], "lr": 0.25}
        store.commit()
        groups[0] = {**groups[0], "lr": 2.0}
        assert twins.optimizer.restore() == 1
        assert groups[0]["lr"] == 0.25


def move_first(groups: Groups, parameters: Parameters) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(0))


def exchange(groups: Groups, parameters: Parameters) -> None:
    first, second = groups
    first["params"], second["params"] = second["params"], first["params"]


def repeat(groups: Groups, parameters: Parameters) -> None:
    groups.append(dict(groups[1]))


def split(groups: Groups, parameters: Parameters) -> None:
    groups.append({**groups[0], "params": [groups[0]["params"].pop()], "param_names": ["second"]})


def lack(groups: Groups, parameters: Parameters) -> None:
    groups[1] = {key: value for key, value in groups[1].items() if key != "lr"}


def remove_algorithm(groups: Groups, parameters: Parameters) -> None:
    del groups[1]["algorithm"]


def change_algorithm(groups: Groups, parameters: Parameters) -> None:
    groups[1]["algorithm"] = "muon"


def append_vector(groups: Groups, parameters: Parameters) -> None:
    groups.append({"params": [("vector", nn.Parameter(torch.ones(3)))], "algorithm": "muon"})


def clear(groups: Groups, parameters: Parameters) -> None:
    groups.clear()


REFUSED = [
    (replace, "'second'.*add_param_group.*requires_grad_"),
    (replace_under_its_name, "'second' of param group 0 is another tensor"),
    (append, "'new'.*add_param_group"),
    (remove, "'second' is missing.*requires_grad_"),
    (delete_last_group, "'third' is missing.*requires_grad_"),
    (move_first, "'first' is missing from param group 0"),
    (exchange, "'third' is in param group 0"),
    (repeat, "'third'.*twice"),
    (split, "'second' is missing from param group 0"),
    (lack, "group 1 lacks 'lr'"),
    (change_algorithm, "'adamw'"),
    (remove_algorithm, "group 1 was attached with algorithm 'adamw' and has None now"),
    (append_vector, "'vector' has shape"),
    (clear, "'first' is missing"),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED)
@PLACES
def test_every_call_refuses_an_edit_until_it_is_undone(
    place: str, edit: Callable[[Groups, Parameters], None], message: str, tmp_path: Path
) -> None:
    with open_store(place, tmp_path) as store:
        twins = Twins(
            [["first", "second"], ["third"]], rates=[0.5, 0.25], store=store, algorithm="adamw"
        )
        twins.step()
        twins.add("new")
        groups = twins.optimizer.param_groups
        before = [(group, {key: copy(value) for key, value in group.items()}) for group in groups]
        saved = deepcopy(twins.optimizer.state_dict())
        third = twins.optimizer.state[twins.ours["third"]]
        edit(groups, twins.ours)
        calls: list[Callable[[], object]] = [
            twins.optimizer.step,
            twins.optimizer.state_dict,
            lambda: third["exp_avg"],
        ]
        if place == "disk":
            calls.append(twins.optimizer.restore)
        for call in calls:
            with twins.unchanged(), pytest.raises(ValueError, match=message):
                call()
        if place == "disk":
            store.commit()  # Of the step before the edit.
        with pytest.raises(ValueError):
            twins.optimizer.load_state_dict(saved)
        groups[:] = [group for group, _ in before]
        for group, values in before:
            group.update(values)
        assert_same(twins.optimizer.state_dict()["state"], saved["state"])
        twins.step()
        twins.assert_identical()


def test_close_commits_the_step_before_a_refused_edit(tmp_path: Path) -> None:
    with tierstore.TierStore(tmp_path) as store:
        twins = Twins(store=store)
        twins.step()
        twins.optimizer.param_groups.clear()
    with tierstore.TierStore(tmp_path, resume=True) as store:
        again = Twins(store=store)
        assert again.optimizer.restore() == 1
        assert again.optimizer.param_groups[0]["lr"] == 0.5
        again.theirs = twins.theirs
        again.assert_identical()


def test_an_edit_before_the_first_step_is_free() -> None:
    twins = Twins([["first", "second"], ["third"]], rates=[0.5, 0.25], algorithm="adamw")
    for optimizer, parameters in twins.both:
        groups = optimizer.param_groups
        remove(groups, parameters)
        groups.reverse()
        groups[0] = dict(groups[0])
        groups.append(
            {**appended_group(optimizer, parameters["second"]), "param_names": ["second"]}
        )
    twins.step()
    twins.step()
    twins.assert_identical()


def test_a_group_of_an_edited_list_is_checked_at_the_first_step() -> None:
    optimizer = muon.Muon([parameter()])
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"'0.1' has shape \(3,\)"):
        optimizer.step()


@pytest.mark.parametrize("ranks_that_edit", [[0, 1], [1]])
def test_all_ranks_refuse_an_edit_of_some_ranks(ranks_that_edit: list[int], pool: RankPool) -> None:
    found = pool.run(2, "tests.rank_programs.refusals:edited_groups", ranks_that_edit)
    for rank, texts in enumerate(found):
        for text in texts:
            assert "'second' is missing from param group 0" in text
            assert ("rank 1" in text) == (rank not in ranks_that_edit)
