"""Real backward passes on several ranks, each with its part of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rank_programs import backward
from tests.support.rank_pool import RankPool

# Sums over the batch differ in their last bits, about 1e-7 of the gradient. Newton-Schulz
# enlarges what is small in a matrix, but by 3.5**5 = 525 at most; a step is LR of that; and
# what was computed from it goes into the next steps.
TOLERANCE = 525 * 1e-7 * backward.LR * backward.STEPS * 10


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {"partition": "by_parameter"}),
        ("ddp", {"partition": "flat"}),
        *((kind, {}) for kind in backward.WRAPPED if kind != "ddp"),
    ],
)
def test_parts_of_a_batch_train_as_the_whole(
    pool: RankPool, kind: str, options: dict[str, Any]
) -> None:
    model = backward.make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward.train(model, None, 0, 1)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    of_ranks = pool.run(4, "tests.rank_programs.backward:work", kind, options)
    for found in of_ranks:
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert torch.equal(values, of_ranks[0][name]), name
            torch.testing.assert_close(values, expected[name], rtol=0, atol=TOLERANCE)
            assert (expected[name] - before[name]).abs().max() > 20 * TOLERANCE
