"""DeepSpeed loads the universal checkpoints that are written, and trains on as the source did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import muon
import tierstore
from tests.peers.deepspeed_cases import CASES, run_deepspeed, to_universal
from tests.peers.programs.deepspeed_writer import STEPS
from tests.support.deepspeed_truth import assert_is_truth, truth_of
from tests.support.published import tensors_in
from tests.support.universal_files import model_states_in, states_in
from tierstore.tools.convert.convert import convert

# Source -> stages that load it. torch.optim.AdamW has one subgroup in stage 3: DeepSpeed gives all
# subgroups one tensor as their step, and each increments it.
STAGES = {
    "zero1-adamw-1": (1, 2),
    "zero2-adamw": (1, 2),
    "zero3-adamw-one-group": (2, 3),
    "zero3-own-adamw": (2, 3),
}
LOADS = [
    f"{source} zero{stage} {ranks}"
    for source, stages in STAGES.items()
    for stage in stages
    for ranks in (1, 2)
]
OTHER_LR = 0.5
"""In the configuration: the learning rate of the checkpoint counts."""


def case_of(load: str, universal: Path) -> dict[str, Any]:
    source, stage, ranks = load.split(" ")
    kept = {key: CASES[source][key] for key in ("one_group", "own_adam") if key in CASES[source]}
    zero = {"sub_group_size": 100} if source == "zero3-own-adamw" and stage == "zero3" else {}
    fields = {"ranks": int(ranks), "stage": int(stage[-1]), "optimizer": "adamw", "zero": zero}
    return {**fields, **kept, "lr": OTHER_LR, "universal": str(universal)}


class Loaded(NamedTuple):
    """Folders of a case by what was loaded."""

    whole: dict[str, Path]
    zeroed: dict[str, Path]
    """Without the first moments."""


@pytest.fixture(scope="module")
def loaded(deepspeed: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("universal")
    cases: dict[str, Any] = {}
    for source in STAGES:
        convert(deepspeed[source] / "checkpoint", folder / source, to="universal")
        shutil.copytree(folder / source, folder / f"{source} zeroed")
        for path in (folder / f"{source} zeroed").glob("*/zero/*/exp_avg.pt"):
            value = torch.load(path)
            torch.save({**value, "param": torch.zeros_like(value["param"])}, path)
    for load in LOADS:
        source = load.split(" ")[0]
        cases[load] = case_of(load, folder / source)
        cases[f"{load} zeroed"] = case_of(load, folder / f"{source} zeroed")
    paths = run_deepspeed(folder / "loaded", cases)
    return Loaded(
        {load: paths[load] for load in LOADS}, {load: paths[f"{load} zeroed"] for load in LOADS}
    )


def differences(found: Path, source: Path) -> list[float]:
    """Return by how much the next update of each parameter differs from the source's."""
    before, after = numpy.load(source / "truth.npz"), numpy.load(source / "next.npz")
    changed = numpy.load(found / "next.npz")
    assert set(changed.files) == set(after.files)
    found_differences = []
    for name in after.files:
        update = after[name] - before[f"{name}|master"]
        difference = numpy.linalg.norm(changed[name] - after[name]) / numpy.linalg.norm(update)
        found_differences.append(float(difference))
    return found_differences


@pytest.mark.parametrize("load", LOADS)
def test_deepspeed_loads_every_state_and_goes_on(
    deepspeed: dict[str, Path], loaded: Loaded, load: str
) -> None:
    source = deepspeed[load.split(" ")[0]]
    expected, found = (numpy.load(path / "truth.npz") for path in (source, loaded.whole[load]))
    assert set(found.files) == set(expected.files)
    for key in expected.files:
        assert numpy.array_equal(found[key], expected[key]), key
    facts = json.loads((loaded.whole[load] / "facts.json").read_text())
    assert (facts["seen"], facts["step"]) == (7, STEPS + 1)
    assert max(differences(loaded.whole[load], source)) < 1e-5
    assert min(differences(loaded.zeroed[load], source)) > 0.1


def test_deepspeed_does_not_load_what_is_not_trained(
    deepspeed: dict[str, Path], loaded: Loaded, tmp_path: Path
) -> None:
    """If this fails, docs/guide/deepspeed.md need not say how to load it."""
    convert(deepspeed["zero2-adamw"] / "checkpoint", tmp_path / "out", to="universal")
    saved = model_states_in(tmp_path / "out")["module"]["frozen.weight"]
    facts = json.loads((loaded.whole["zero2-adamw zero2 1"] / "facts.json").read_text())
    assert facts["frozen"] != saved.tolist()


def next_masters(run: Path, gradients: Any, step: int) -> dict[str, torch.Tensor]:
    """Take a step with ``muon.Muon`` in a run at this step, and commit it; return the masters."""
    zeros = {name: torch.zeros(gradients[name].shape).bfloat16() for name in gradients.files}
    parameters = {name: nn.Parameter(tensor) for name, tensor in zeros.items()}
    groups = [
        {
            "params": [(n, p) for n, p in parameters.items() if (p.ndim > 1) == has_decay],
            "algorithm": "adamw",
        }
        for has_decay in (True, False)
    ]
    with tierstore.TierStore(run, resume=True) as store:
        optimizer = muon.Muon(groups, store=store)
        assert optimizer.restore() == step
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradients[name]).bfloat16()
        optimizer.step()
        return {
            name: states["master"].clone() for name, states in store.pages.read_states().items()
        }


def test_deepspeed_goes_on_with_a_run(deepspeed: dict[str, Path], tmp_path: Path) -> None:
    """DeepSpeed begins, ``muon.Muon`` takes a step, and DeepSpeed or ``muon.Muon`` the next one."""
    source = deepspeed["zero3-own-adamw"]
    gradients = numpy.load(source / "gradients.npz")
    convert(source / "checkpoint", tmp_path / "run", to="tierstore")
    before = next_masters(tmp_path / "run", gradients, STEPS)
    convert(tmp_path / "run", tmp_path / "universal", to="universal")
    case = case_of("zero3-own-adamw zero3 2", tmp_path / "universal")
    found = run_deepspeed(tmp_path / "loaded", {"run": case})["run"]
    assert json.loads((found / "facts.json").read_text())["step"] == STEPS + 2
    changed = numpy.load(found / "next.npz")
    for name, expected in next_masters(tmp_path / "run", gradients, STEPS + 1).items():
        difference = torch.from_numpy(changed[name]) - expected
        # Both round masters to float32, after products in another order.
        roundoff = 2**-24 * expected.norm()
        assert difference.norm() < 1e-5 * (expected - before[name]).norm() + roundoff, name


def test_subgroups_of_torchs_adamw_share_their_step_count(
    deepspeed: dict[str, Path], tmp_path: Path
) -> None:
    """In stage 3, also with what DeepSpeed's own tool writes; when this fails, change the docs."""
    source = deepspeed["zero3-adamw"]
    convert(source / "checkpoint", tmp_path / "ours", to="universal")
    to_universal(source / "checkpoint", tmp_path / "own")
    case = {**CASES["zero3-adamw"], "ranks": 1}
    cases = {name: {**case, "universal": str(tmp_path / name)} for name in ("ours", "own")}
    paths = run_deepspeed(tmp_path / "loaded", cases)
    ours, own = (numpy.load(paths[name] / "next.npz") for name in ("ours", "own"))
    for key in own.files:
        # The second group, of vectors, gets the weight decay of the first from DeepSpeed's tool.
        assert numpy.array_equal(ours[key], own[key]) == (own[key].ndim > 1), key
    found = sorted(differences(paths["ours"], source))
    assert found[0] < 1e-5  # Of the first subgroup.
    assert found[-1] > 0.01


@pytest.mark.parametrize("name", ["zero1-adamw", "zero2-adamw", "zero3-adamw", "zero3-own-adamw"])
def test_what_deepspeeds_own_tool_writes_is_read(
    deepspeed: dict[str, Path], name: str, tmp_path: Path
) -> None:
    to_universal(deepspeed[name] / "checkpoint", tmp_path / "in")
    conversion = convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert (conversion.source, conversion.step) == ("universal", STEPS)
    assert_is_truth(tensors_in(tmp_path / "out"), deepspeed[name])


def test_deepspeeds_own_tool_mixes_up_parameters(
    deepspeed: dict[str, Path], tmp_path: Path
) -> None:
    """If this fails, such universal checkpoints need not be refused."""
    source = deepspeed["zero2-round-robin"]
    to_universal(source / "checkpoint", tmp_path / "in")
    expected, found = truth_of(source), states_in(tmp_path / "in")
    wrong = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert wrong
    with pytest.raises(tierstore.CheckpointError, match="round_robin_gradients"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")


@pytest.mark.parametrize("name", ["zero2-muon", "zero3-muon"])
def test_deepspeeds_own_tool_refuses_muon(
    deepspeed: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """If this fails, DeepSpeed has learned it: look whether it also loads ``momentum_buffer``."""
    with pytest.raises(RuntimeError, match="KeyError: 'exp_avg'"):
        to_universal(deepspeed[name] / "checkpoint", tmp_path / "in")
