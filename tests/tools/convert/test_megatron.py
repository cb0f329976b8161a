"""Checkpoints of Megatron, built after its published source: every tensor bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import muon
import tierstore
from tests.support.commands import call
from tests.support.conversions import no_trace
from tests.support.megatron import ITERATION, Truth, write_fsdp_dtensor, write_torch_dist
from tests.support.published import assert_equal, tensors_in
from tests.support.rank_pool import RankPool
from tierstore.tools.convert.convert import Conversion, convert
from tierstore.tools.inspect.verify import verify


def converted(source: Path, out: Path, truth: Truth, **options: Any) -> Conversion:
    """Convert to DCP, and check every tensor and hyperparameter."""
    conversion = convert(source, out, to="dcp", **options)
    assert (conversion.source, conversion.step) == ("megatron", ITERATION)
    found = {key: t for key, t in tensors_in(out).items() if "param_groups" not in key}
    assert_equal(found, truth.expected())
    assert_hyperparameters(out, truth)
    return conversion


def assert_hyperparameters(out: Path, truth: Truth) -> None:
    convert(out, out.with_suffix(".pt"), to="torch")
    groups = torch.load(out.with_suffix(".pt"))["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["param_names"]} == truth.masters.keys()
    for group in groups:
        for name in group.pop("param_names"):
            expected = truth.group(name)
            kept = ("lr", "weight_decay", "momentum", "betas", "eps")
            values = {key: expected[key] for key in kept if key in expected}
            algorithm = "muon" if truth.is_muon(name) else "adamw"
            assert {k: v for k, v in group.items() if k != "params"} == {
                **values,
                "algorithm": algorithm,
            }, name


@pytest.mark.quick(2)
@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_torch_dist(muon: bool, experts: bool, tmp_path: Path) -> None:
    truth = Truth(muon=muon, experts=experts)
    write_torch_dist(tmp_path / "in", truth)
    conversion = converted(tmp_path / "in", tmp_path / "out", truth)
    note, order = conversion.notes
    assert "does not save which parameters a param group has" in note
    assert "the order of the parameters" in order
    assert [line.split(":")[0] for line in conversion.lost] == [
        "'rng_state'",
        "'args'",
        "'opt_param_scheduler'",
        "the extra state of modules",
    ]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    [
        {"stack": False},
        {"common_file": True},
        {"chained": True},
        {"sharding": None, "master": "fp32_param"},
        {"sharding": None, "chained": True, "common_file": True},
        {"stack": False, "halves": True},
    ],
    ids=str,
)
def test_other_layouts_of_torch_dist(options: dict[str, Any], tmp_path: Path) -> None:
    truth = Truth(muon=True)
    folder = write_torch_dist(tmp_path / "in", truth, **options)
    assert verify(folder).good
    converted(folder, tmp_path / "out", truth)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("muon", "experts"), [(False, True), (True, False)])
def test_fsdp_dtensor(muon: bool, experts: bool, tmp_path: Path) -> None:
    truth = Truth(muon=muon, experts=experts)
    folder = write_fsdp_dtensor(tmp_path / "in", truth, swiglu=not muon)
    conversion = converted(tmp_path / "in", tmp_path / "out", truth)
    (order,) = conversion.notes
    assert "the order of the parameters" in order
    assert [line.split(":")[0] for line in conversion.lost] == [
        "'args'",
        "'opt_param_scheduler'",
    ]
    shutil.copytree(folder, tmp_path / "anywhere")
    convert(tmp_path / "anywhere", tmp_path / "again", to="dcp", from_="megatron")
    assert_equal(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "out"))


@pytest.mark.parametrize(
    "write",
    [
        lambda root, truth: write_torch_dist(root, truth),
        lambda root, truth: write_torch_dist(root, truth, stack=False, halves=True),
        lambda root, truth: write_fsdp_dtensor(root, truth),
    ],
)
def test_parameters_of_groups_are_in_the_order_of_layers(
    write: Callable[[Path, Truth], Path], tmp_path: Path
) -> None:
    truth = Truth(muon=True)
    write(tmp_path / "in", truth)
    convert(tmp_path / "in", tmp_path / "out.pt", to="torch")
    for group in torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]["param_groups"]:
        names = group["param_names"]
        layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
        assert layers == sorted(layers)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["torch_dist", "fsdp_dtensor"])
def test_chunks_of_several_ranks(kind: str, pool: RankPool, tmp_path: Path) -> None:
    truth = Truth(experts=True)
    pool.run(2, "tests.rank_programs.megatron:write", kind, tmp_path / "in", truth)
    converted(tmp_path / "in", tmp_path / "out", truth, memory="64MiB")


def make_model(truth: Truth) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.zeros(master.shape, dtype=torch.bfloat16))
        for name, master in truth.masters.items()
    }


def test_training_goes_on(tmp_path: Path) -> None:
    """A run, and a new run from DCP, have masters and states, and do the step they tell."""
    truth = Truth(muon=True)
    write_torch_dist(tmp_path / "in", truth)
    convert(tmp_path / "in", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "in", tmp_path / "run", to="tierstore")
    with tierstore.TierStore(tmp_path / "run", resume=True) as store:
        parameters = make_model(truth)
        members = _groups_of(tmp_path / "in", parameters)
        optimizer = muon.Muon(members, momentum_dtype=torch.float32, store=store)
        assert optimizer.restore() == ITERATION
        check_states(store, parameters, truth)
    with tierstore.TierStore(tmp_path / "new") as store:
        parameters = make_model(truth)
        members = _groups_of(tmp_path / "in", parameters)
        for group in members:
            if group["algorithm"] == "muon":  # Which the files do not tell.
                group["adjust_lr_fn"] = "match_rms_adamw"
        optimizer = muon.Muon(members, momentum_dtype=torch.float32, store=store)
        assert optimizer.restore(checkpoint=tmp_path / "dcp") == ITERATION
        check_states(store, parameters, truth)
        matrices = [g for g in optimizer.param_groups if g["algorithm"] == "muon"]
        assert {group["adjust_lr_fn"] for group in matrices} == {"match_rms_adamw"}


def _groups_of(source: Path, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The param groups of the source, with parameters of this model."""
    path = source.with_suffix(".groups.pt")
    convert(source, path, to="torch", force=path.exists())
    return [
        {
            "params": [(name, parameters[name]) for name in group["param_names"]],
            "algorithm": group["algorithm"],
        }
        for group in torch.load(path)["optimizer"]["param_groups"]
    ]


def check_states(
    store: tierstore.TierStore, parameters: dict[str, nn.Parameter], truth: Truth
) -> None:
    states = store.pages.read_states()
    for name, master in truth.masters.items():
        assert torch.equal(states[name]["master"], master)
        assert torch.equal(parameters[name].detach(), master.bfloat16())
        for key, tensor in truth.states[name].items():
            assert torch.equal(states[name][key], tensor)
        assert store.pages.scalars.get(name) == (
            None if truth.is_muon(name) else {"step": float(ITERATION)}
        )


# ------------------------------------------------------------------------------ refusals


def assert_weights_alone(source: Path, out: Path, truth: Truth) -> None:
    """--only model converts the masters, whatever is wrong with the optimizer."""
    conversion = convert(source, out, to="safetensors", only="model")
    assert conversion.step is None
    assert_equal(load_file(out / "model.safetensors"), {**truth.masters, **truth.buffers})


@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_sharded_model_space"])
def test_states_of_no_parameter_are_refused(sharding: str, tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "in", Truth(), sharding=sharding)
    with no_trace(tmp_path):
        code, _, error = call("convert", tmp_path / "in", tmp_path / "out", "--to", "dcp")
    assert code == 2
    assert f"has the optimizer in the form '{sharding}'" in error
    assert "--dist-ckpt-optim-fully-reshardable" in error
    assert_weights_alone(tmp_path / "in", tmp_path / "weights", Truth())


def test_buckets_are_refused_by_their_keys(tmp_path: Path) -> None:
    bucket = "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"
    write_torch_dist(tmp_path / "in", Truth(), sharding=None, more={bucket: torch.ones(3)})
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="dp_reshardable"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert_weights_alone(tmp_path / "in", tmp_path / "weights", Truth())


@pytest.mark.parametrize("write", [write_torch_dist, write_fsdp_dtensor])
def test_weights_alone(write: Callable[..., Path], tmp_path: Path) -> None:
    truth = Truth(experts=True)
    write(tmp_path / "in", truth)
    assert_weights_alone(tmp_path / "in", tmp_path / "weights", truth)
    convert(tmp_path / "in", tmp_path / "o.pt", to="torch", only="model", dtype=torch.bfloat16)
    expected = {name: master.bfloat16() for name, master in truth.masters.items()}
    assert_equal(dict(torch.load(tmp_path / "o.pt")["model"]), {**expected, **truth.buffers})


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"optimizer.state.exp_avg.decoder.other.weight": torch.ones(3)}, "no weight of this"),
        ({"optimizer.state.exp_avg.output_layer.bias": torch.ones(3)}, "'output_layer.bias'"),
        ({"decoder.layers.0.mlp.linear_fc1.weight_w": torch.ones(3)}, "one half of a SwiGLU"),
        ({"decoder.layers.0.mixer.in_proj.weight.query": torch.ones(3)}, "saves in parts"),
        ({"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(3)}, "twice|shape"),
    ],
)
def test_keys_without_a_match_are_refused(
    more: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write_torch_dist(tmp_path / "in", Truth(), more=more)
    with no_trace(tmp_path), pytest.raises(tierstore.TierstoreError, match=problem):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")


def test_param_groups_that_cannot_be_told_apart(tmp_path: Path) -> None:
    truth = Truth()
    groups = truth.groups()
    truth.groups = lambda: [*groups, {**groups[0], "lr": 1.0, "lr_mult": 10.0}]  # type: ignore[method-assign]
    write_torch_dist(tmp_path / "in", truth)
    problem = "2 param groups may have"
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=problem):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert_weights_alone(tmp_path / "in", tmp_path / "weights", truth)


@pytest.mark.parametrize("text", ["13", "release", "../..", "", "iter_0000012", "x" * 1000])
def test_a_tracker_file_that_leads_elsewhere(text: str, tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "in", Truth())
    (tmp_path / "in/latest_checkpointed_iteration.txt").write_text(text)
    if text == "iter_0000012":
        convert(tmp_path / "in", tmp_path / "out", to="dcp", dry_run=True)
        return
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match="names the iteration"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")


@pytest.mark.parametrize("backend", ["zarr", "torch_dist"])
def test_other_formats_are_refused(backend: str, tmp_path: Path) -> None:
    folder = tmp_path / "in/iter_0000003"
    (folder / "mp_rank_00").mkdir(parents=True)
    if backend == "zarr":
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    (tmp_path / "in/latest_checkpointed_iteration.txt").write_text("3")
    kind = "zarr" if backend == "zarr" else "torch"
    with no_trace(tmp_path), pytest.raises(tierstore.CheckpointError, match=f"format '{kind}'"):
        convert(tmp_path / "in", tmp_path / "out", to="dcp")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"sharded_backend": "torch_dist"', b"\xff"])
def test_damaged_small_files(data: bytes, tmp_path: Path) -> None:
    folder = write_torch_dist(tmp_path / "in", Truth(), common_file=True)
    for name in ("metadata.json", "common.pt"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(data)
        with no_trace(tmp_path), pytest.raises(tierstore.CorruptionError, match=name):
            convert(tmp_path / "in", tmp_path / "out", to="dcp")
        (folder / name).write_bytes(good)


def test_objects_of_the_common_state_are_never_made(tmp_path: Path) -> None:
    mark = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(mark),)

    folder = write_torch_dist(tmp_path / "in", Truth(), common_file=True)
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save({**common, "args": Hostile()}, folder / "common.pt")
    convert(tmp_path / "in", tmp_path / "out", to="dcp")
    assert not mark.exists()


@pytest.mark.parametrize("count", [25, pytest.param(150, marks=pytest.mark.long)])
def test_damaged_files(count: int, tmp_path: Path) -> None:
    """Damage is an error with a name, or is not noticed: never a traceback, never a half result."""
    numbers = random.Random(count)
    write_torch_dist(tmp_path / "originals/0", Truth(muon=True))
    write_torch_dist(tmp_path / "originals/1", Truth(), common_file=True)
    write_fsdp_dtensor(tmp_path / "originals/2", Truth())
    refused = 0
    for number in range(count):
        source = Path(shutil.copytree(tmp_path / f"originals/{number % 3}", tmp_path / "source"))
        path = numbers.choice(sorted(path for path in source.rglob("*") if path.is_file()))
        data = bytearray(path.read_bytes())
        if numbers.random() < 0.2:
            del data[numbers.randrange(len(data)) :]
        else:
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        path.write_bytes(data)
        with no_trace(tmp_path):
            code, _, error = call("convert", source, tmp_path / "o.pt", "--to", "torch")
            (tmp_path / "o.pt").unlink(missing_ok=True)
        assert code in (0, 1, 2), (number, path, error)
        assert code == 0 or error.startswith("tierstore: "), (number, path, error)
        refused += code != 0
        shutil.rmtree(source)
    assert refused > count / 4
