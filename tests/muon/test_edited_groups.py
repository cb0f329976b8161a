"""Edits of param groups after the first step: values may change, the rest is refused."""

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


def appended_group(optimizer: torch.optim.Optimizer, *parameters: nn.Parameter) -> dict[str, Any]:
    """Return a group as a user may write it by hand, with the keys that torch.optim needs."""
    group = {key: value for key, value in optimizer.param_groups[0].items() if "param" not in key}
    return {**group, "params": list(parameters), "lr": 0.25}


@PLACES
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_values_may_change_and_groups_are_added(place: str, algorithm: str, tmp_path: Path) -> None:
    """Commits have the values that a group has then, also of unknown keys."""
    names = [["first", "second"], ["third"]]
    with open_store(place, tmp_path) as store:
        twins = Twins(names, rates=[0.5, 0.125], store=store, algorithm=algorithm)
        twins.step()
        twins.add("new")
        for optimizer, parameters in twins.both:
            optimizer.param_groups[1]["lr"] = 0.0625
            optimizer.param_groups[1]["lr_scale"] = 3
            group = {"params": [("new", parameters["new"])], "lr": 0.25}
            optimizer.add_param_group(
                {**group, "algorithm": algorithm} if optimizer is twins.optimizer else group
            )
        twins.step()
        twins.assert_identical()
        twins.optimizer.param_groups[0]["lr"] = 0.03125  # What a scheduler does after a step.
        store.commit() if place == "disk" else None
    if place == "memory":
        return
    with tierstore.TierStore(tmp_path, resume=True) as store:
        again = Twins([*names, ["new"]], rates=[1, 1, 1], store=store, algorithm=algorithm)
        assert again.optimizer.restore() == 2
        groups = again.optimizer.param_groups
        assert [group["lr"] for group in groups] == [0.03125, 0.0625, 0.25]
        assert groups[1]["lr_scale"] == 3
        for name, values in again.ours.items():
            assert torch.equal(values, twins.theirs[name]), name


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


def reverse(groups: Groups, parameters: Parameters) -> None:
    groups[0]["params"].reverse()


def reverse_groups(groups: Groups, parameters: Parameters) -> None:
    groups.reverse()


def copy_group(groups: Groups, parameters: Parameters) -> None:
    groups[1] = dict(groups[1])


def rename(groups: Groups, parameters: Parameters) -> None:
    groups[0]["param_names"][0] = "another"


def change_form(groups: Groups, parameters: Parameters) -> None:
    groups[1]["moments_dtype"] = torch.bfloat16


def clear(groups: Groups, parameters: Parameters) -> None:
    groups.clear()


PARAMETERS = "param group 0 has other parameters"
PLACE = "is missing, or another dict is in its place"
HINT = r".* Undo the edit: .*add_param_group\(\) adds .*requires_grad_\(False\) freezes"

REFUSED = [
    (replace, PARAMETERS + HINT),
    (replace_under_its_name, PARAMETERS),
    (append, PARAMETERS),
    (remove, PARAMETERS),
    (move_first, PARAMETERS),
    (exchange, PARAMETERS),
    (split, PARAMETERS),
    (reverse, "param group 0 .* in another order"),
    (rename, r"param group 0 has param_names=\['another', 'second'\], but had another"),
    (delete_last_group, f"param group 1 {PLACE}"),
    (reverse_groups, f"param group 0 {PLACE}"),
    (copy_group, f"param group 1 {PLACE}"),
    (lack, f"param group 1 {PLACE}"),
    (clear, f"param group 0 {PLACE}"),
    (repeat, r"param group 2 was not added by add_param_group\(\)"),
    (append_vector, "param group 2 was not added"),
    (change_algorithm, "param group 1 has algorithm='muon', but had another"),
    (remove_algorithm, "param group 1 has algorithm=None, but had another"),
    (change_form, "param group 1 has moments_dtype=torch.bfloat16, but had another"),
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


def test_an_edit_within_a_list_of_matrices_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = muon.Muon([{"params": [weight], "matrices": [("blocks", 0, 1)]}])
    weight.grad = torch.ones(4, 8)
    optimizer.step()
    optimizer.param_groups[0]["matrices"][0] = ("blocks", 0, 2)
    with pytest.raises(ValueError, match=r"param group 0 has matrices=.*, but had another"):
        optimizer.step()


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
