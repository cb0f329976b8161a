"""torch's gradient scaler with shards: an overflow on one rank skips the step on all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import muon
from tests.rank_programs.fsdp import Net
from tests.rank_programs.scaling import INIT_SCALE, OVERFLOWS, STEPS
from tests.support.rank_pool import RankPool


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_overflow_on_one_rank_skips_on_all(ranks: int, pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(ranks, "tests.rank_programs.scaling:train", tmp_path / "run")
    model = Net()
    optimizer = muon.Muon(muon.param_groups(model))
    scale, in_a_row, scales = INIT_SCALE, 0, []
    for step in range(STEPS):
        if step in OVERFLOWS:
            scale, in_a_row = scale / 2, 0
        else:
            model(torch.arange(5)).backward()
            optimizer.step()
            optimizer.zero_grad()
            in_a_row += 1
        if in_a_row == 2:
            scale, in_a_row = scale * 2, 0
        scales.append(scale)
    for found_scales, done, parameters in found:
        assert found_scales == scales
        assert done == STEPS - len(OVERFLOWS)
        for name, parameter in model.named_parameters():
            # Ranks add gradients up in another order than one process.
            assert torch.allclose(parameters[name], parameter, rtol=1e-4, atol=1e-5), name
