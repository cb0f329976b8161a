"""A state above 2 GiB, which takes several records, in a page on a real disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore

ROWS = 23_500  # A factor of 2.2 GB.


class Factored(torch.optim.Optimizer):
    """Adds the outer product of the gradient to two rows of a square factor."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, rows = self.state[p], len(p)
                if not state:
                    state["factor"] = p.new_zeros(rows, rows)
                for row in (0, rows - 1):
                    state["factor"][row] += p.grad[row, 0] * p.grad[:, 0]
                p.sub_(state["factor"][:, :1], alpha=group["lr"])


def trained(optimizer: Any, parameter: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        parameter.grad = torch.arange(step, step + ROWS, dtype=torch.float32).remainder(7)[:, None]
        optimizer.step()


@pytest.mark.long
@pytest.mark.timeout(900)  # It moves 20 GB.
def test_a_factor_above_a_record(tmp_path: Path) -> None:
    stock_parameter = torch.nn.Parameter(torch.ones(ROWS, 1))
    stock = Factored([stock_parameter])
    trained(stock, stock_parameter, range(4))
    for first, last in ((0, 2), (2, 4)):
        parameter = torch.nn.Parameter(torch.ones(ROWS, 1))
        with tierstore.TierStore(tmp_path / "run", resume=True, host_memory="5GiB") as store:
            optimizer = tierstore.Paged([("w", parameter)], Factored, store=store)
            assert optimizer.restore() == first
            trained(optimizer, parameter, range(first, last))
            store.checkpoint(tmp_path / f"step-{last}").wait()
    assert torch.equal(parameter, stock_parameter)
    factor = stock.state[stock_parameter]["factor"]
    key = "optimizer.state.w.factor"
    loaded = {key: torch.empty(ROWS, ROWS)}
    dcp.load(loaded, checkpoint_id=tmp_path / "step-4")
    assert torch.equal(loaded[key], factor)
    metadata = dcp.FileSystemReader(tmp_path / "step-4").read_metadata()
    assert len(metadata.state_dict_metadata[key].chunks) == 2
