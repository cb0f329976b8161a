"""One rank of a run, and what the run takes of this rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import muon
import tierstore
from tests.rank_programs.training import Case, Model
from tests.support.training import make_groups


def measure(case: Case) -> tuple[tierstore.Stats, tierstore.Stats, int, int]:
    """Measure one step that commits.

    Returns:
        The counters before and after it, the bytes of page files, and the bytes of matrices and
        updates that the rank sent.
    """
    model = Model(case)
    rank = dist.get_rank()
    assert case.directory is not None
    with tierstore.TierStore(case.directory, **case.store_options(rank)) as store:
        optimizer = muon.Muon(make_groups(model.parameters, case.shapes), store=store)
        for parameter in model.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        store.synchronize()
        before, exchanged = store.stats(), optimizer.bytes_exchanged
        optimizer.step()
        store.synchronize()
        after = store.stats()
        folder = Path(case.directory, f"rank-{rank:05d}")
        file_bytes = sum(path.stat().st_size for path in folder.glob("page-*"))
        return before, after, file_bytes, optimizer.bytes_exchanged - exchanged
