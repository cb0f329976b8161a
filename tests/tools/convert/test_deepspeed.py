"""Checkpoints that DeepSpeed 0.19.8 wrote, from tests/tools/convert/fixtures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.support.continuation import MUON_TOLERANCE, differences, run_differences
from tests.support.conversions import no_trace
from tests.support.deepspeed_files import change, classes_of_deepspeed, fragment_address
from tests.support.deepspeed_truth import assert_is_truth, key_of, truth_of
from tests.support.published import tensors_in
from tests.support.universal_files import model_states_in
from tierstore.tools.convert.convert import Conversion, convert

FIXTURES = Path(__file__).parent / "fixtures" / "deepspeed"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


def to_dcp(source: Any, out: Path) -> tuple[Conversion, dict[str, torch.Tensor]]:
    conversion = convert(source, out, to="dcp")
    return conversion, tensors_in(out)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copy the files of a fixture's step, which a test then changes."""

    def copy(name: str) -> Path:
        target = tmp_path / "copy" / name
        shutil.copytree(FIXTURES / name / "checkpoint" / "step3", target)
        return target

    return copy


def refused(source: Any, tmp_path: Path, kind: type[Exception], match: str) -> None:
    with no_trace(tmp_path), pytest.raises(kind, match=match):
        convert(source, tmp_path / "out", to="dcp")


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_carried(name: str, tmp_path: Path) -> None:
    folder = FIXTURES / name
    conversion, tensors = to_dcp(folder / "checkpoint", tmp_path / "out")
    assert (conversion.source, conversion.step) == ("deepspeed", 3)
    assert_is_truth(tensors, folder)
    model = {key for key in tensors if key.startswith("model.")}
    others = model - {key for key in truth_of(folder) if key.startswith("model.")}
    assert others == {"model.positions", "model.frozen.weight"}
    assert torch.equal(tensors["model.positions"], torch.arange(9.0))
    assert tensors["model.frozen.weight"].shape == (5, 3)
    _, of_step = to_dcp(folder / "checkpoint" / "step3", tmp_path / "of step")
    assert of_step.keys() == tensors.keys()


@pytest.mark.parametrize("name", ["zero2-muon", "zero3-adamw"])
def test_every_tensor_is_in_a_file_of_torch_save(name: str, tmp_path: Path) -> None:
    convert(FIXTURES / name / "checkpoint", tmp_path / "out.pt", to="torch")
    value = torch.load(tmp_path / "out.pt", weights_only=True)
    tensors = {f"model.{key}": tensor for key, tensor in value["model"].items()}
    for group in value["optimizer"]["param_groups"]:
        for parameter, number in zip(group["param_names"], group["params"], strict=True):
            for key, state in value["optimizer"]["state"][number].items():
                tensors[f"optimizer.state.{parameter}.{key}"] = state
    assert_is_truth(tensors, FIXTURES / name)


@pytest.mark.parametrize("name", ["zero1-muon", "zero3-adamw"])
def test_every_state_is_in_a_run(name: str, tmp_path: Path) -> None:
    convert(FIXTURES / name / "checkpoint", tmp_path / "run", to="tierstore")
    conversion, tensors = to_dcp(tmp_path / "run", tmp_path / "out")
    assert conversion.step == 3
    assert_is_truth(tensors, FIXTURES / name)


def test_weights_are_in_safetensors(tmp_path: Path) -> None:
    folder = FIXTURES / "zero2-muon"
    convert(folder / "checkpoint", tmp_path / "weights", to="safetensors")
    _, tensors = to_dcp(tmp_path / "weights", tmp_path / "out")
    masters = {key: value for key, value in truth_of(folder).items() if key.startswith("model.")}
    assert all(torch.equal(tensors[key], value) for key, value in masters.items())
    assert torch.equal(tensors["model.positions"], torch.arange(9.0))


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters_and_steps_are_carried(name: str, tmp_path: Path) -> None:
    facts = json.loads((FIXTURES / name / "facts.json").read_text())
    conversion, tensors = to_dcp(FIXTURES / name / "checkpoint", tmp_path / "out")
    adamw = {key for key in tensors if key.endswith(".exp_avg")}
    steps = {key: value for key, value in tensors.items() if key.endswith(".step")}
    assert {key.removesuffix("exp_avg") for key in adamw} <= {k[:-4] for k in steps}
    assert {float(value) for value in steps.values()} == {3.0}
    if name == "zero2-elastic":
        assert any("hyperparameters" in sentence for sentence in conversion.lost)
        return
    assert not conversion.lost
    saved = torch.distributed.checkpoint.FileSystemReader(tmp_path / "out").read_metadata()
    keys = saved.state_dict_metadata
    assert "optimizer.param_groups.embedding.weight.lr" in keys
    assert facts["groups"][0]["hyperparameters"]["lr"] in (0.003, 0.02)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "zero2-elastic"])
def test_the_next_update_equals_deepspeed(name: str, tmp_path: Path) -> None:
    to_dcp(FIXTURES / name / "checkpoint", tmp_path / "out")
    found = differences(tmp_path / "out", FIXTURES / name)
    assert max(found["adamw"].values()) < 1e-5
    assert max(found["muon"].values(), default=0) < MUON_TOLERANCE
    without = differences(tmp_path / "out", FIXTURES / name, momentum=False)
    assert min(without["adamw"].values()) > 0.1
    assert min(without["muon"].values(), default=1) > 0.5


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["zero2-muon", "zero2-muon-cpu", "zero2-fp32-1", "zero3-adamw"])
def test_the_first_step_of_a_run_equals_deepspeed(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    found = run_differences(source, tmp_path / "run", FIXTURES / name)
    assert max(found["adamw"].values()) < 1e-5
    assert max(found["muon"].values(), default=0) < MUON_TOLERANCE
    without = run_differences(source, tmp_path / "other", FIXTURES / name, momentum=False)
    assert min(without["adamw"].values()) > 0.1
    assert min(without["muon"].values(), default=1) > 0.5


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_dtypes_of_the_model_outlast_other_formats(to: str, tmp_path: Path) -> None:
    source = FIXTURES / "zero1-adamw" / "checkpoint"
    convert(source, tmp_path / "between.pt", to=to)
    convert(source, tmp_path / "expected", to="universal")
    convert(tmp_path / "between.pt", tmp_path / "found", to="universal")
    expected, found = (
        model_states_in(tmp_path / name)["tierstore"]["dtypes"] for name in ("expected", "found")
    )
    assert found == expected
    assert set(found.values()) == {torch.bfloat16}
    convert(source, tmp_path / "cast.pt", to=to, dtype=torch.float16)
    convert(tmp_path / "cast.pt", tmp_path / "of cast", to="universal")
    dtypes = model_states_in(tmp_path / "of cast")["tierstore"]["dtypes"]
    assert set(dtypes.values()) == {torch.float16}


@pytest.mark.parametrize("name", ["zero2-muon", "zero3-adamw"])
def test_files_of_several_nodes_are_merged(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    first = copied(name)
    second = tmp_path / "copy" / "second"
    second.mkdir()
    for path in first.glob("*zero_pp_rank_1_*"):
        path.rename(second / path.name)
    _, tensors = to_dcp([first, second], tmp_path / "out")
    assert_is_truth(tensors, FIXTURES / name)
    shutil.rmtree(tmp_path / "out")
    refused(first, tmp_path, tierstore.CheckpointError, "of all nodes|partitions|lacks")
    refused([first, first], tmp_path, tierstore.CheckpointError, "both have the file")


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_only_a_path(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    """As with ``--deepspeed_config settings.json`` of a program."""
    folder = copied(name)

    def change_config(value: Any) -> None:
        value["ds_config"] = "settings.json"

    for path in folder.glob("*model_states.pt"):
        change(path, change_config)
    if name == "zero2-round-robin":  # It cuts no parameter, as partitions of parameters do not.
        refused(folder, tmp_path, tierstore.CheckpointError, "whether round_robin_gradients was")
        return
    _, tensors = to_dcp(folder, tmp_path / "out")
    assert_is_truth(tensors, FIXTURES / name)


def test_files_of_different_steps_are_refused(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    def older(value: Any) -> None:
        value["global_steps"] -= 1

    def older_states(value: Any) -> None:
        for state in value["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["step"] = state["step"] - 1

    folder = copied("zero3-adamw")
    change(next(folder.glob("zero_pp_rank_1_*model_states.pt")), older)
    refused(folder, tmp_path, tierstore.CheckpointError, "global_steps is 3 and 2")
    shutil.rmtree(folder)
    folder = copied("zero3-adamw")
    change(next(folder.glob("*zero_pp_rank_1_*optim_states.pt")), older_states)
    refused(folder, tmp_path, tierstore.CheckpointError, "of different steps")


def test_nodes_whose_latest_steps_differ_are_refused(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    nodes = []
    for number in range(2):
        node = tmp_path / f"node {number}"
        node.mkdir()
        folder = node / f"step{number}"
        copied("zero3-adamw").rename(folder)
        for path in folder.glob(f"*zero_pp_rank_{1 - number}_*"):
            path.unlink()
        (node / "latest").write_text(folder.name)
        nodes.append(node)
    refused(nodes, tmp_path, tierstore.CheckpointError, "different steps, .'step0', 'step1'")


def test_a_latest_step_that_is_a_link_is_not_followed(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("zero2-muon")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "latest").write_text("step3")
    (tmp_path / "mine" / "step3").symlink_to(folder)
    refused(tmp_path / "mine", tmp_path, tierstore.CheckpointError, "is a link")


@pytest.mark.parametrize("name", ["zero1-adamw", "zero3-adamw"])
def test_ranks_with_other_dtypes_are_refused(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    def cast(value: Any) -> None:
        state = value["optimizer_state_dict"]
        (key,) = {"single_partition_of_fp32_groups", "fp32_flat_groups"} & state.keys()
        state[key] = [tensor.double() for tensor in state[key]]

    folder = copied(name)
    change(next(folder.glob("*zero_pp_rank_1_*optim_states.pt")), cast)
    refused(folder, tmp_path, tierstore.CheckpointError, "is float64, and rank 0 has float32")


@pytest.mark.parametrize("prefix", ["", "fp16_"])
def test_models_in_fp16(prefix: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    """After DeepSpeed's source, which does not train in fp16 on a CPU."""
    folder = copied("zero1-adamw")

    def make_half(value: Any) -> None:
        module = value["module"]
        module |= {name: tensor.half() for name, tensor in module.items() if name != "positions"}

    def scale(value: Any) -> None:
        value["optimizer_state_dict"]["loss_scaler"].cur_scale = 128.0

    change(folder / "mp_rank_00_model_states.pt", make_half)
    for path in folder.glob("bf16_*"):
        change(path, scale)
        path.rename(folder / path.name.replace("bf16_", prefix))
    conversion, tensors = to_dcp(folder, tmp_path / "out")
    assert_is_truth(tensors, FIXTURES / "zero1-adamw")
    assert conversion.lost == ["the loss scale of fp16, 128.0"]
    convert(folder, tmp_path / "universal", to="universal")
    dtypes = model_states_in(tmp_path / "universal")["tierstore"]["dtypes"]
    assert set(dtypes.values()) == {torch.float16}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "MoE"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "MoE"),
    ],
)
def test_other_parallelism_is_refused_by_name(
    name: str, words: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("zero2-muon")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    refused(folder, tmp_path, tierstore.CheckpointError, words)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "link"])
def test_damage_is_refused(damage: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("zero3-muon")
    path = next(folder.glob("*rank_1*optim_states.pt"))
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[2500] ^= 16  # In the momentum.
        path.write_bytes(data)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    refused(folder, tmp_path, tierstore.CorruptionError, path.name)


def test_a_latest_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero2-muon" / "checkpoint", tmp_path / "run" / "deep")
    (tmp_path / "run" / "latest").write_text("../run/deep/step3")
    refused(tmp_path / "run", tmp_path, tierstore.CheckpointError, "not recognized")


# ------------------------------------------------- layouts built after DeepSpeed's sources


def swap(folder: Path, *, momentum: bool, momentum_dtype: torch.dtype = torch.bfloat16) -> None:
    """Move elements of subgroup 0 to files, as offload to NVMe does."""
    for rank in range(2):
        target = folder / "offloaded_tensors" / f"rank{rank:02d}"
        target.mkdir(parents=True)

        def edit(value: Any, target: Path = target) -> None:
            optimizer = value["optimizer_state_dict"]
            masters = optimizer["fp32_flat_groups"]
            identity = masters[0].ds_id
            states = optimizer["optimizer_state_dict"]["state"][0]
            moved = {f"{identity}.tensor.swp": masters[0]}
            empty = torch.empty(0)
            empty.ds_id = identity  # type: ignore[attr-defined]
            masters[0] = empty
            for name in [n for n, t in states.items() if t.ndim and (momentum or "exp" in n)]:
                dtype = momentum_dtype if name == "momentum_buffer" else torch.float32
                moved[f"{name}-{identity}.tensor.swp"] = states[name].to(dtype)
                states[name] = torch.empty(0, dtype=dtype)
            for name, tensor in moved.items():
                data = tensor.detach().view(torch.uint8).numpy().tobytes()
                (target / name).write_bytes(data + bytes(-len(data) % 1024))

        change(next(folder.glob(f"bf16_*_rank_{rank}_mp_*")), edit)


@pytest.mark.parametrize(
    ("name", "momentum"), [("zero3-adamw", True), ("zero3-muon", True), ("zero3-muon", False)]
)
def test_optimizer_on_nvme(
    name: str, momentum: bool, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied(name)
    swap(folder, momentum=momentum)
    _, tensors = to_dcp(folder, tmp_path / "out")
    assert_is_truth(tensors, FIXTURES / name)
    shutil.rmtree(tmp_path / "out")
    path = next(folder.glob("offloaded_tensors/rank01/[0-9]*.swp"))
    data = path.read_bytes()
    for wrong in (data[:100], data + bytes(4096)):
        path.write_bytes(wrong)
        refused(folder, tmp_path, tierstore.CorruptionError, "subgroup 0")
    path.unlink()
    refused(folder, tmp_path, tierstore.CorruptionError, path.name)


def split_subgroup(folder: Path) -> None:
    """Make two subgroups of subgroup 0; its first two parameters are in the first one."""
    with classes_of_deepspeed():
        model = torch.load(next(folder.glob("*model_states.pt")), weights_only=False)
    shapes = model["param_shapes"][0]
    names = list(shapes)
    halves = [{name: shapes[name] for name in part} for part in (names[:2], names[2:])]
    border = sum(-(-shape.numel() // 2) for shape in halves[0].values())

    def edit_model(value: Any) -> None:
        value["param_shapes"][:1] = halves

    def edit_states(value: Any) -> None:
        optimizer = value["optimizer_state_dict"]
        masters = optimizer["fp32_flat_groups"]
        parts = [masters[0][:border].clone(), masters[0][border:].clone()]
        for number, part in enumerate(parts):
            part.ds_id = f"{number}_{number}"
        masters[:1] = parts
        inner = optimizer["optimizer_state_dict"]
        momentum = inner["state"][0]["momentum_buffer"]
        inner["state"] = {
            0: {"momentum_buffer": momentum[:border].clone()},
            1: {"momentum_buffer": momentum[border:].clone()},
            2: inner["state"][1],
        }
        for group, params in zip(inner["param_groups"], ([0, 1], [2]), strict=True):
            group["params"] = params

    for path in folder.glob("*model_states.pt"):
        change(path, edit_model)
    for path in folder.glob("*optim_states.pt"):
        change(path, edit_states)


@pytest.mark.parametrize("to", ["dcp", "tierstore", "torch"])
def test_momentum_of_two_dtypes(to: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    """A subgroup on NVMe has it in float32, another one in the dtype of the gradients."""
    folder = copied("zero3-muon")
    split_subgroup(folder)
    swap(folder, momentum=True, momentum_dtype=torch.float32)
    convert(folder, tmp_path / "first.pt", to=to)
    _, tensors = to_dcp(tmp_path / "first.pt", tmp_path / "out")
    assert_is_truth(tensors, FIXTURES / "zero3-muon")
    of_muon = [tensor.dtype for key, tensor in tensors.items() if key.endswith("momentum_buffer")]
    # muon.Muon has one dtype for a group, so a run has the wider one.
    two = [torch.float32] * (4 if to == "tierstore" else 2) + [torch.bfloat16] * 2
    assert sorted(map(str, of_muon)) == sorted(map(str, two[:4]))
    found = run_differences(folder, tmp_path / "run", FIXTURES / "zero3-muon")
    assert max(found["muon"].values()) < MUON_TOLERANCE


def test_partitions_that_begin_at_parameters(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Of DeepSpeed #7939: no parameter is cut, and partitions are padded to the largest."""
    folder = copied("zero1-adamw")
    truth = truth_of(FIXTURES / "zero1-adamw")
    shapes = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)["param_shapes"]
    for rank in range(2):

        def edit(value: Any, rank: int = rank) -> None:
            optimizer = value["optimizer_state_dict"]
            for number, group in enumerate(shapes):
                names = list(group)
                halves = [names[:2], names[2:]]
                sizes = [sum(group[name].numel() for name in half) for half in halves]
                mapping, start = {}, 0
                for name in halves[rank]:
                    mapping[name] = fragment_address(group[name].numel(), start)
                    start += group[name].numel()
                optimizer["param_slice_mappings"][number] = mapping
                optimizer["group_paddings"][number] = max(sizes) - sizes[rank]
                states = optimizer["base_optimizer_state"]["state"][number]
                for state in ("master", "exp_avg", "exp_avg_sq"):
                    pieces = [truth[key_of(f"{name}|{state}")].flatten() for name in halves[rank]]
                    flat = torch.cat(pieces)
                    if state == "master":
                        optimizer["single_partition_of_fp32_groups"][number] = flat
                    else:
                        padding = torch.zeros(max(sizes) - sizes[rank])
                        states[state] = torch.cat([flat, padding])

        change(next(folder.glob(f"bf16_*_rank_{rank}_mp_*")), edit)
    _, tensors = to_dcp(folder, tmp_path / "out")
    assert_is_truth(tensors, FIXTURES / "zero1-adamw")


def test_fragments_that_overlap_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("zero1-adamw")

    def edit(value: Any) -> None:
        mapping = value["optimizer_state_dict"]["param_slice_mappings"][0]
        last = list(mapping)[-1]
        mapping[last] = fragment_address(mapping[last].numel, mapping[last].start - 1)

    change(next(folder.glob("bf16_*_rank_1_mp_*")), edit)
    refused(folder, tmp_path, tierstore.CorruptionError, "overlap")
