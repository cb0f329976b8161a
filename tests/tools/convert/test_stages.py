"""Checkpoints of pipeline stages become one checkpoint of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import muon
import tierstore
from tests.rank_programs.stages import Net, groups_of
from tests.support.rank_pool import RankPool
from tests.support.torch_version import torch_before
from tierstore.tools.convert.convert import convert

WORK = "tests.rank_programs.stages:train"
STEPS = 2

pytestmark = pytest.mark.skipif(
    torch_before(2, 13), reason="pipelines of torch 2.9 abort in gloo, also without a store"
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(tmp_path_factory.mktemp("worlds")) as ranks:
        yield ranks


@pytest.mark.parametrize("source", ["stage", "run"])
def test_stages_become_one_checkpoint(source: str, pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(4, WORK, tmp_path, STEPS)
    expected = {**ranks[0], **ranks[2]}
    sources = [tmp_path / f"{source}-{number}" for number in (0, 1)]
    convert(sources, tmp_path / "whole", to="dcp")
    model = Net()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "whole")
    assert all(torch.equal(value, expected[f"model.{k}"]) for k, value in state["model"].items())
    with tierstore.TierStore(tmp_path / "alone") as store:
        optimizer = muon.Muon(groups_of(model), store=store, ns_dtype=torch.float32)
        assert optimizer.restore(checkpoint=tmp_path / "whole") == STEPS
        for name, tensors in store.pages.read_states().items():
            for key, value in tensors.items():
                assert torch.equal(value, expected[f"{name}.{key}"]), (name, key)


def test_stages_that_do_not_belong_together(pool: RankPool, tmp_path: Path) -> None:
    pool.run(4, WORK, tmp_path / "first", STEPS)
    pool.run(4, WORK, tmp_path / "second", STEPS + 1)
    first, second = tmp_path / "first", tmp_path / "second"
    destination = tmp_path / "whole"
    with pytest.raises(tierstore.CheckpointError, match="different steps"):
        convert([first / "stage-0", second / "stage-1"], destination, to="dcp")
    with pytest.raises(tierstore.CheckpointError, match=r"master of 'layers\.0\.weight' twice"):
        convert([first / "stage-0", second / "stage-0"], destination, to="dcp")
    assert not destination.exists()
