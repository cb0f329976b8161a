"""Modules without values are routed as the models that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

import muon
from muon.plan import paged_groups
from tierstore.plan.model_files import read_model
from tierstore.plan.skeleton import skeleton_of

CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))

# Last two parts of the names of matrices that are no hidden matrices.
OTHERS = {"embed_tokens.weight", "wte.weight", "wpe.weight", "lm_head.weight"}


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
