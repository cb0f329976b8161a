"""Ranks that remove parameters, and resume without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

import muon
import tierstore
from tests.rank_programs.collective_order import recorded
from tests.rank_programs.training import STEPS, Case, Model, Trained, trained_by, whole_gradients
from tests.support.training import make_all_groups


def train(case: Case, removed: Sequence[str], at: int) -> Trained:
    """Train as tests.rank_programs.training.train(), and remove parameters after step ``at``.

    A run that goes on after that step has its groups without the parameters.
    """
    rank, model = dist.get_rank(), Model(case)
    resume = case.first > 1
    left_out = removed if case.first > at else ()
    shapes = {name: shape for name, shape in case.shapes.items() if name not in left_out}
    groups = make_all_groups(model.parameters, shapes)
    with (
        recorded(range(dist.get_world_size())) as issued,
        tierstore.TierStore(case.directory, resume=resume, **case.store_options(rank)) as store,
    ):
        optimizer = muon.Muon(groups, store=store, **case.options)
        if resume:
            assert optimizer.restore() == case.first - 1
        for step in range(case.first, case.last + 1):
            model.set_gradients(whole_gradients(case.shapes, step, case.uniform))
            optimizer.step()
            if step == at:
                with (
                    pytest.raises((ValueError, tierstore.TierstoreError)),
                    store.calling("remove_parameters()"),
                ):
                    store.remove(["unknown"] if rank else removed)
                optimizer.remove_parameters(removed)
        kept = {name: shape for name, shape in case.shapes.items() if name not in removed}
        for name in removed:
            del model.parameters[name], model.positions[name]
        model.set_gradients({})
        assert store.read_states().keys() == kept.keys()
        return trained_by(model, optimizer, issued, states=case.last == STEPS)


def resume_other(case: Case, removed: Sequence[str]) -> str:
    """Resume with the parameters that the run has lost; return what that is refused with."""
    with pytest.raises(tierstore.TierstoreError) as refused:
        train(replace(case, first=case.last + 1, last=case.last + 1), removed, at=case.last + 1)
    return str(refused.value)
