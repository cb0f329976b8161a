"""Golden files of encoded states, which every later version has to read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.run.test_format import READERS
from tests.support.golden_files import assert_same_files
from tests.support.make_golden_encoded import SHAPES, STEPS, GoldenEncoded, expected_states, make
from tests.support.toy import unchanged
from tierstore.tools.inspect.verify import verify

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "encoded-1"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden files."""
    return shutil.copytree(GOLDEN, tmp_path / "golden")


def expected() -> dict[str, dict[str, np.ndarray]]:
    return {
        name: {state: np.array(values).reshape(SHAPES[name]) for state, values in states.items()}
        for name, states in json.loads((GOLDEN / "expected.json").read_text()).items()
    }


def assert_golden(model: GoldenEncoded, wanted: dict[str, dict[str, np.ndarray]]) -> None:
    for name, states in model.store.pages.read_states().items():
        parameter = model.model.get_parameter(name).detach()
        found = {"master": parameter} | states
        assert found.keys() == wanted[name].keys()
        for state, values in wanted[name].items():
            assert torch.equal(found[state].double(), torch.from_numpy(values).double())
        # Rounded to nearest, so that half a unit of the last place is the largest distance.
        master = torch.from_numpy(wanted[name]["master"])
        unit = 0 if parameter.dtype == torch.float32 else 2.0 ** (master.log2().floor() - 7)
        assert ((parameter.double() - master).abs() <= unit / 2).all()


@pytest.mark.parametrize("kind", READERS)
def test_golden_files_are_read_independently(kind: str) -> None:
    content = READERS[kind](GOLDEN / kind)
    assert content.step == STEPS
    assert content.states.keys() == expected().keys()
    for name, states in expected().items():
        assert content.states[name].keys() == states.keys()
        for state, values in states.items():
            assert np.array_equal(content.states[name][state].astype(np.float64), values)


def test_golden_run_is_restored_and_goes_on(golden: Path) -> None:
    model = GoldenEncoded(golden / "run", resume=True)
    assert model.store.restore() == STEPS
    assert_golden(model, expected())
    model.step()
    assert_golden(model, expected_states(STEPS + 1))
    model.store.close()


def test_golden_checkpoint_begins_a_run(golden: Path, tmp_path: Path) -> None:
    model = GoldenEncoded(tmp_path / "run")
    with unchanged(golden):
        assert model.store.restore(checkpoint=golden / "published") == STEPS
    assert_golden(model, expected())
    model.store.close()


def test_stock_dcp_loads_the_parameters(tmp_path: Path) -> None:
    model = GoldenEncoded(tmp_path / "run")
    state_dict = {"model": model.model.state_dict()}
    dcp.load(state_dict, checkpoint_id=GOLDEN / "published")
    for name, states in expected().items():
        found = state_dict["model"][name]
        bits = torch.from_numpy(states["master"]).float().view(torch.int32)
        # Halves away from zero: add half a unit of the last place to the magnitude, and cut.
        halves = (bits + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)
        floats = bits.view(torch.float32)
        assert torch.equal(found, halves if found.dtype == torch.bfloat16 else floats)
    model.store.close()


@pytest.mark.parametrize("kind", READERS)
def test_golden_files_are_whole(kind: str) -> None:
    with unchanged(GOLDEN / kind):
        report = verify(GOLDEN / kind)
    assert report.faults == ()
    assert report.step == STEPS


def test_golden_files_are_made_again(tmp_path: Path) -> None:
    """Until another version writes another format."""
    make(tmp_path)
    assert_same_files(tmp_path, GOLDEN)
