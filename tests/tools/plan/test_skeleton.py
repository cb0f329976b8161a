"""Modules without values are routed as the models that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import muon
from muon.plan import paged_groups
from tierstore.errors import PlanError
from tierstore.tools.plan.model_files import model_from_listing, read_model
from tierstore.tools.plan.models import model_from_module
from tierstore.tools.plan.skeleton import skeleton_of

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))

# Last two parts of the names of matrices that are not hidden matrices.
OTHERS = {"embed_tokens.weight", "wte.weight", "wpe.weight", "lm_head.weight"}


@pytest.mark.quick(9)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_names_and_routes(config: Path) -> None:
    model = read_model(config)
    skeleton = skeleton_of(model)
    found = [(n, tuple(p.shape), p.dtype) for n, p in skeleton.named_parameters()]
    assert found == [(p.name, p.shape, p.dtype) for p in model.parameters]
    muon_group, adamw_group = paged_groups(muon.param_groups(skeleton))
    names = {parameter.name for parameter in muon_group.parameters}
    for parameter in model.parameters:
        # Scores of experts have fewer rows than columns.
        is_router = ".gate." in parameter.name or ".router." in parameter.name
        is_matrix = len(parameter.shape) == 2 and min(parameter.shape) > 1
        is_hidden = is_matrix and not is_router and "bias" not in parameter.name
        last = ".".join(parameter.name.split(".")[-2:])
        assert (parameter.name in names) == (is_hidden and last not in OTHERS), parameter
    assert all(not parameter.elementwise for parameter in muon_group.parameters)
    assert all(parameter.elementwise for parameter in adamw_group.parameters)


def test_no_parameter_is_lost() -> None:
    """A module has its matrix after other parameters, and modules below it."""
    listing = {"x.bias": [64], "x.weight": [64, 64], "x.y.weight": [8, 64], "z": [3]}
    model = model_from_listing({"z": [3], **{k: v for k, v in listing.items() if k != "z"}})
    found = [(name, tuple(p.shape)) for name, p in skeleton_of(model).named_parameters()]
    assert found == [(p.name, p.shape) for p in model.parameters]


@pytest.mark.parametrize(
    "listing",
    [
        {"a": [2], "a.b": [2]},
        {"training": [2, 2]},
        {"forward.weight": [2, 2]},
        {"a..b": [2, 2]},
        {"x.y.weight": [4, 4], "x.weight": [4, 4]},  # In another order than a module has them.
    ],
)
def test_names_that_no_module_has_are_refused(listing: dict[str, list[int]]) -> None:
    with pytest.raises(PlanError, match="named_parameters"):
        skeleton_of(model_from_listing(listing))


def test_modules_keep_their_class() -> None:
    """A table may have any name in a module; in a listing, the name has to tell."""
    model = nn.ModuleDict({"tok": nn.Embedding(100, 64), "up": nn.Linear(64, 256)})
    groups = muon.param_groups(skeleton_of(model_from_module(model)))
    assert [p.name for p in paged_groups(groups)[0].parameters] == ["up.weight"]
    assert [p.name for p in paged_groups(muon.param_groups(model))[0].parameters] == ["up.weight"]
