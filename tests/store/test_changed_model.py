"""A run is restored to its model only; the error names the first difference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import muon
import tierstore
from tests.support import training
from tests.support.toy import (
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    Spec,
    Toy,
    make_run,
    open_muon,
    unchanged,
    unchanged_parameters,
)

FIRST_IS = "in group 0 'first' bfloat16 [5, 7], whole, states: momentum bfloat16"
SECOND_IS = "in group 0 'second' float32 [9], elementwise, states: average float32"
THIRD_IS = "in group 1 'third' float16 [3, 4], whole, states: none"

# The groups attached instead of MODEL; the text about the run, and about the model.
CHANGES: dict[str, tuple[list[list[Spec]], str | None, str]] = {
    "name": (
        [[FIRST, ("2nd", *SECOND[1:])], [THIRD]],
        None,
        "it lacks 1 parameters ('second') and has further 1 parameters ('2nd')",
    ),
    "shape": (
        [[("first", (7, 5), *FIRST[2:]), SECOND], [THIRD]],
        FIRST_IS,
        FIRST_IS.replace("[5, 7]", "[7, 5]"),
    ),
    "dtype": (
        [[FIRST, SECOND], [("third", (3, 4), torch.bfloat16, {}, False)]],
        THIRD_IS,
        THIRD_IS.replace("float16", "bfloat16"),
    ),
    "dtype of a state": (
        [[(*FIRST[:3], {"momentum": torch.float32}, False), SECOND], [THIRD]],
        FIRST_IS,
        FIRST_IS.replace("momentum bfloat16", "momentum float32"),
    ),
    "name of a state": (
        [[(*FIRST[:3], {"average": torch.bfloat16}, False), SECOND], [THIRD]],
        FIRST_IS,
        FIRST_IS.replace("momentum", "average"),
    ),
    "one state more": (
        [[FIRST, SECOND], [(*THIRD[:3], {"average": torch.float32}, False)]],
        THIRD_IS,
        THIRD_IS.replace("none", "average float32"),
    ),
    "rule": (
        [[FIRST, (*SECOND[:4], False)], [THIRD]],
        SECOND_IS,
        SECOND_IS.replace("elementwise", "whole"),
    ),
    "parameter missing at the end": (
        [[FIRST], [THIRD]],
        None,
        "it lacks 1 parameters ('second')",
    ),
    "one parameter more": (
        [[FIRST, SECOND], [THIRD, FOURTH]],
        None,
        "it has further 1 parameters ('fourth')",
    ),
    "one group more": (
        [[FIRST, SECOND], [THIRD], [FOURTH]],
        None,
        "it has further 1 parameters ('fourth')",
    ),
    "group missing": ([[FIRST, SECOND]], None, "it lacks 1 parameters ('third')"),
    "another": (
        [[FIRST], [FOURTH]],
        None,
        "it lacks 2 parameters ('second', 'third') and has further 1 parameters ('fourth')",
    ),
    "order": ([[SECOND, FIRST], [THIRD]], FIRST_IS, SECOND_IS),
    "order of groups": (
        [[THIRD], [FIRST, SECOND]],
        FIRST_IS,
        THIRD_IS.replace("group 1", "group 0"),
    ),
    "moved to another group": (
        [[FIRST], [SECOND, THIRD]],
        SECOND_IS,
        "in group 0 no further parameter",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused_by_its_first_difference(change: str, tmp_path: Path) -> None:
    make_run(tmp_path)
    groups, has_run, has_model = CHANGES[change]
    with unchanged(tmp_path):  # The mark of a clean end is removed, and put back by close().
        toy = Toy(tmp_path, groups, resume=True)
        with (
            unchanged(tmp_path),
            unchanged_parameters(toy),
            pytest.raises(tierstore.RunMismatchError) as caught,
        ):
            toy.store.restore()
        difference = f"First difference: the run has {has_run}; this model has {has_model}. "
        if has_run is None:
            difference = f"{has_model}. "
        assert difference in str(caught.value)
        with unchanged(tmp_path), pytest.raises(tierstore.RunDirectoryError, match="restore"):
            toy.step()
        toy.store.close()

    right = Toy(tmp_path, resume=True)
    assert right.store.restore() == 3
    for parameter in right.parameters.values():
        assert torch.equal(parameter, torch.full_like(parameter, 0.25))
    momentum = right.store.pages.read_states()["first"]["momentum"]
    assert torch.equal(momentum, torch.full((5, 7), 3.0, dtype=torch.bfloat16))
    right.store.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"algorithm": "adamw"}, "'slow' bfloat16 [24, 40], elementwise, states: exp_avg float32"),
        ({"momentum_dtype": torch.float64}, "'slow' bfloat16 [24, 40], whole, states: "),
    ],
)
def test_a_changed_param_group_is_refused(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    store, optimizer, parameters = open_muon(tmp_path)
    training.train(optimizer, parameters, range(1, 2))
    store.close()
    parameters = training.make_parameters(torch.bfloat16)
    groups = training.make_groups(parameters)
    groups[2] = {"params": groups[2]["params"], **change}
    store = tierstore.TierStore(tmp_path, resume=True)
    optimizer = muon.Muon(groups, store=store)
    with pytest.raises(tierstore.RunMismatchError, match=re.escape(complaint)):
        optimizer.restore()
    store.close()


def test_hyperparameters_may_differ_from_the_run(tmp_path: Path) -> None:
    """restore() puts back the values of the run, whatever the groups were built with."""
    make_run(tmp_path)
    toy = Toy(tmp_path, resume=True)
    toy.groups[0].hyperparameters.update(lr=7.0, mine=1)
    assert toy.store.restore() == 3
    assert toy.groups[0].hyperparameters == {"lr": 0.25, "mine": 1}
    toy.store.close()
